"""The execution shell of one device: persona first, then assembly, then delivery.

The runner consumes rows, page tables and slots from above and takes no memory decision. `forward`
and `_forward_raw` stay this small: a feature is a path, a backend, an observer or a layer.
"""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from headrace.attention.backend import AttentionBackend, AttentionSetting
from headrace.attention.selection import build_attention_backend
from headrace.base.decision import Decision
from headrace.batch.facts import BatchFacts
from headrace.batch.forward_batch import ForwardBatch
from headrace.batch.outputs import (
    LogitsProcessorOutput,
    ModelRunnerOutput,
    PPProxyTensors,
    SampleOutput,
)
from headrace.batch.rows import Rows
from headrace.config.engine_config import EngineConfig
from headrace.config.persona import Persona
from headrace.config.plan import Plan
from headrace.execution.selector import Choice, Selector
from headrace.execution.split_prefill import SplitForward, SplitPrefill
from headrace.layers.operator_choice import choose_operators, deterministic_format
from headrace.layers.row_blocks import RowBlockFormat
from headrace.layers.weight_formats import WEIGHT_FORMATS, choose_weight_format
from headrace.layers.weights import finish_weights, weight_bytes
from headrace.memory.arena import Arena
from headrace.memory.budget import KvBudget
from headrace.memory.kv_pool import MHATokenToKVPool
from headrace.memory.req_to_token import ReqToTokenPool
from headrace.models.decoder import CausalDecoder
from headrace.models.registry import build_model
from headrace.observers.kv_canary import KvCanary
from headrace.observers.spans import Spans
from headrace.observers.step_observer import Evidence, ForwardRun, Observers
from headrace.runner.forward_paths import ForwardPaths, PathBuilder, absent_paths
from headrace.runner.memory_pools import build_kv_canary, build_kv_pool, build_page_tables
from headrace.runner.observing import ExpertWatch, build_observers, build_taps, watch_experts
from headrace.runner.startup import Startup
from headrace.sampling.sampler import Sampler
from headrace.sampling.step_sampler import StepSampler

LoadWeights = Callable[[CausalDecoder], None]


class ModelRunner:
    """Runs one model on one device.

    Args:
        config: what was asked. persona: what the model is. plan: what was decided.
        load_weights: fills the parameters of a freshly built model.
    """

    model: CausalDecoder
    sampler: Sampler
    rows: Rows
    step_sampler: StepSampler
    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool: MHATokenToKVPool
    kv_canary: KvCanary | None
    kv_budget: KvBudget
    backends: dict[str, AttentionBackend]
    paths: ForwardPaths
    selector: Selector
    observers: Observers
    expert_watch: ExpertWatch | None

    # ---- persona

    def __init__(
        self, config: EngineConfig, persona: Persona, plan: Plan, load_weights: LoadWeights
    ) -> None:
        self.config, self.persona, self.plan = config, persona, plan
        self.device = torch.device(plan.device.value)
        self.dtype: torch.dtype = getattr(torch, plan.dtype.value)
        self.startup = Startup()
        self.measured: list[Decision[Any]] = []
        self.spans = Spans()
        self._load_weights = load_weights

    # ---- assembly

    def initialize(self, model: CausalDecoder | None = None) -> None:
        """Sampler and weights. Memory, backends and paths follow when the budget is known.

        `model`: one that is loaded already; its layers are bound to this runner from now on.
        """
        self.arena = Arena(self.device)
        self.init_sampler()
        if model is None:
            self.load_model()
        else:
            self.model = model

    def init_sampler(self) -> None:
        with self.part("sampler"):
            self.sampler = Sampler()

    def load_model(self) -> None:
        form = choose_weight_format(self.device, self.dtype)
        deterministic, weight_format = self.plan.deterministic.value, WEIGHT_FORMATS[form.value]
        kernels, operators = choose_operators(self.device, form.value, deterministic=deterministic)
        self.measured += [form, kernels]
        if deterministic:
            weight_format = deterministic_format(weight_format, self.device, self.dtype)
        # oneDNN's memory is not the arena's, so the weights are counted on the model
        with self.startup.part("weights", lambda: weight_bytes(self.model)):
            self.model = build_model(
                self.persona.traits,
                self.plan.ropes.value,
                self.dtype,
                self.device,
                arena=self.arena,
                weight_format=weight_format,
                operators=operators,
            )
            self._load_weights(self.model)
            finish_weights(self.model)
        if isinstance(weight_format, RowBlockFormat):
            self.measured.append(weight_format.decision)

    def init_memory_pool(self, budget: KvBudget) -> None:
        """KV pool, page tables and rows, sized by `budget`."""
        self.kv_budget = budget
        self.measured.append(
            Decision(name="kv_tokens", value=budget.tokens, reason=f"measured: {budget.reason}")
        )
        with self.part("memory pool"):
            self.make_pools(budget.pages)

    def make_pools(self, num_pages: int) -> None:
        """KV pool of so many pages, page 0 included, page tables and rows."""
        plan, traits = self.plan, self.persona.traits
        self.token_to_kv_pool = build_kv_pool(plan, traits, self.arena, num_pages)
        self.kv_canary = build_kv_canary(plan, traits, self.token_to_kv_pool, self.arena)
        self.req_to_token_pool = build_page_tables(plan, traits, self.arena)
        self.rows = Rows(plan.num_rows, traits.vocab_size, self.arena.allocate)
        self.step_sampler = StepSampler.of(self.rows, self.sampler)

    def drop_pools(self) -> None:
        """Forget the pools and all that holds their addresses: backends, paths, observers."""
        for layer in self.model.attention_layers():
            layer.unbind()
        for mixture in self.model.moe_layers():
            mixture.tap = None
        del self.selector, self.paths, self.backends, self.observers, self.expert_watch
        del self.rows, self.step_sampler, self.req_to_token_pool, self.token_to_kv_pool
        del self.kv_canary
        gc.collect()
        torch.cuda.empty_cache()

    def init_attention_backend(self) -> None:
        """One backend per KV group, bound with the pool to the layers of the group."""
        plan, traits = self.plan, self.persona.traits
        with self.part("attention backend"):
            self.backends = {
                group.name: build_attention_backend(
                    plan.prefill_attention.value,
                    plan.decode_attention.value,
                    AttentionSetting.of(plan, traits, group),
                    deterministic=plan.deterministic.value,
                )
                for group in traits.kv_groups
            }
            for layer in self.model.attention_layers():
                # Window layers share the pool of the others: a layer's place in it is its own.
                layer.bind(self.token_to_kv_pool, self.backends[layer.kv_group], layer.layer_id)

    def reinit_attention_backend(self) -> None:
        """Make the backends anew and bind them; paths that hold their addresses are made anew."""
        self.init_attention_backend()
        self.init_forward_paths()

    def init_forward_paths(self) -> None:
        """The table of paths, best first; the eager path is last and admits everything."""
        with self.part("forward paths"):
            self.expert_watch = watch_experts(self.plan, self.model, self.arena.allocate)
            self.paths = self.make_paths(self.plan)
            self.selector = Selector(self.paths.table, absent=absent_paths(self.plan))
            self.observers = build_observers(
                self.config,
                self.plan,
                self.model,
                rows=self.rows,
                tables=self.page_tables,
                experts=self.expert_watch,
                kv_canary=self.kv_canary,
            )

    def make_paths(self, plan: Plan) -> ForwardPaths:
        """Paths over this runner's model and memory, as `plan` has them."""
        return PathBuilder(
            plan,
            self.model,
            rows=self.rows,
            tables=self.page_tables,
            backends=self.backends,
            taps=build_taps(self.expert_watch, self.kv_canary),
        ).build()

    @property
    def page_tables(self) -> dict[str, torch.Tensor]:
        """[R, max pages] int32 of each KV group."""
        pool = self.req_to_token_pool
        return {name: pool.table(name) for name in pool.groups}

    def part(self, name: str) -> AbstractContextManager[None]:
        """Within: a part of assembly; its bytes are those that the arena gives."""
        before = self.arena.bytes()
        return self.startup.part(name, lambda: self.arena.bytes() - before)

    # ---- delivery

    @torch.inference_mode()
    def forward(
        self, batch: ForwardBatch, pp_proxy_tensors: PPProxyTensors | None = None
    ) -> ModelRunnerOutput:
        """One forward of `batch` on the best path that admits it.

        `pp_proxy_tensors`: of the pipeline stage before; plans refuse stages, so there are none.
        """
        self.selector.make_ready(batch.facts)
        choice = self.selector.choose(batch.facts)
        run = ForwardRun(batch=batch, path=choice.path.name, bucket=choice.bucket)
        with self.observers.around(run) as evidence, self.spans("forward", run):
            logits_output = evidence.attach(self._forward_raw(batch, choice, pp_proxy_tensors))
        return _output(logits_output, choice, evidence)

    def _forward_raw(
        self, batch: ForwardBatch, choice: Choice, pp_proxy_tensors: PPProxyTensors | None
    ) -> LogitsProcessorOutput:
        assert pp_proxy_tensors is None, "pipeline stages are refused by the plan"
        return choice.path.run(batch, choice.bucket)

    @torch.inference_mode()
    def begin_split_prefill(self, batch: ForwardBatch) -> tuple[SplitForward, Choice]:
        """Begin a forward that runs in parts; the path must have been chosen for it."""
        choice = self.selector.choose(batch.facts)
        assert isinstance(choice.path, SplitPrefill), "the caller has asked `explain`"
        return choice.path.begin(batch), choice

    @torch.inference_mode()
    def forward_split_prefill(
        self,
        forward: SplitForward,
        choice: Choice,
        layers: int,
        *,
        reinit_attention_backend: bool,
    ) -> ModelRunnerOutput | None:
        """The next `layers` layers of a forward in parts; its output once all have run.

        Args:
            reinit_attention_backend: another batch ran since the last part.
        """
        assert isinstance(choice.path, SplitPrefill), "it began so"
        run = ForwardRun(batch=forward.batch, path=choice.path.name, bucket=choice.bucket)
        with self.observers.around(run) as evidence, self.spans("forward", run):
            output = choice.path.advance(
                forward, layers, reinit_attention_backend=reinit_attention_backend
            )
            if output is not None:
                evidence.attach(output)
        return None if output is None else _output(output, choice, evidence)

    @torch.inference_mode()
    def prepare_in_idle(self) -> bool:
        """Capture one graph that no step has asked for yet; False: there is none. Between steps
        only, and memory is reserved for it."""
        return self.selector.prepare_more()

    @torch.inference_mode()
    def sample(
        self, logits_output: LogitsProcessorOutput, batch: ForwardBatch
    ) -> SampleOutput | None:
        """Sample the rows that sample, then advance all rows; `None` when no row samples."""
        return self.step_sampler.sample(logits_output, batch)

    def explain(self, facts: BatchFacts) -> Decision[str]:
        """Which path such a batch would take, and why better ones would not."""
        return self.selector.explain(facts)


def _output(
    logits_output: LogitsProcessorOutput, choice: Choice, evidence: Evidence
) -> ModelRunnerOutput:
    return ModelRunnerOutput(
        logits_output=logits_output,
        path=choice.path.name,
        bucket=choice.bucket,
        refused=choice.refused,
        evidence=evidence.tensors,
    )
