"""The float32 eager engine that every configuration is held against, forced to their tokens.

Forcing makes every place of a sequence comparable: the reference sees exactly the tokens that the
configuration chose before it, in the prompt, in the KV pool and in the counts of the penalties.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from headrace.batch.outputs import SampleOutput
from headrace.batch.rows import Rows
from headrace.batch.sampling_batch_info import SamplingBatchInfo
from headrace.config.engine_config import EngineConfig
from headrace.engine.engine import Engine
from headrace.layers.operators import TORCH_OPERATORS
from headrace.request.outcome import Logprob
from headrace.request.sampling_params import SamplingParams
from headrace.sampling.sampler import Sampler
from headrace.sampling.step_sampler import StepSampler
from headrace.testing.combinations import one_by_one
from headrace.text.tokenizer import Tokenizer

PAGE_SIZE = 32  # one that no configuration has
REQUEST = "scored"  # id of the one request that runs


@dataclass(slots=True, kw_only=True)
class Scored:
    """What the reference says about one sequence, by place of its output.

    Attributes:
        logprobs: [V] float32 each, raw. picks: the token it would have chosen.
        excused: the token that was forced instead is one that a change of the logits within the
            tolerance makes the reference choose.
        prompt_logprobs: an entry per prompt token, `None` when not asked.
        states: [n, H] behind the last norm, of which the tokens were made; `None` when not asked.
    """

    logprobs: list[Tensor] = field(default_factory=list)
    picks: list[int] = field(default_factory=list)
    excused: list[bool] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    states: Tensor | None = None


class ForcingSampler(Sampler):
    """Writes down what it would choose and chooses what it is told. One sequence at a time.

    Attributes:
        tolerance: of a logit, for what is excused.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tolerance = 0.0
        self.scored = Scored()
        self.forced: Sequence[int] | None = None

    def sample(
        self, logits: Tensor, info: SamplingBatchInfo, rows: Rows, positions: Tensor
    ) -> SampleOutput:
        assert len(logits) == 1, "the reference runs one sequence at a time"
        output = super().sample(logits, info, rows, positions)
        scored = self.scored
        place, own = len(scored.picks), int(output.next_token_ids)
        scored.logprobs.append(torch.log_softmax(logits[0].float(), -1).cpu())
        scored.picks.append(own)
        token = own if self.forced is None else self.forced[place]
        near = token != own and any(
            int(super(ForcingSampler, self).sample(bent, info, rows, positions).next_token_ids)
            == token
            for bent in _bent(logits, own, token, self.tolerance)
        )
        scored.excused.append(near)
        return replace(output, next_token_ids=torch.full_like(output.next_token_ids, token))


def _bent(logits: Tensor, own: int, other: int, tolerance: float) -> Iterator[Tensor]:
    """Logits within the tolerance that speak for `other` against `own`, each in its way.

    Raising one token by twice the tolerance is lowering all others by it and raising the one: what
    temperature, noise, top-k and min-p make of it decides. A token drops out of top-p when what is
    likelier gains and comes in when that loses, hence the last two.
    """
    yield _raised(logits, logits == logits[0, other], 2 * tolerance)
    yield _raised(logits, logits == logits[0, own], -2 * tolerance)
    yield _raised(logits, logits <= logits[0, other], 2 * tolerance)
    yield _raised(logits, logits <= logits[0, own], -2 * tolerance)


def _raised(logits: Tensor, where: Tensor, amount: float) -> Tensor:
    return torch.where(where, logits + amount, logits)


class Reference:
    """Scores sequences, each alone, without cache, operator by operator in torch.

    Args:
        config: what the configurations are made from; model, weights and lengths come from it.
        longest: tokens of the longest sequence.
        dtype: of weights and cache; another one than float32 tells what rounding alone does.
        tokenizer: see `Engine`.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        longest: int,
        dtype: str = "float32",
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.engine = Engine(
            one_by_one(
                config,
                longest=longest,
                dtype=dtype,
                kv_cache_dtype="auto",
                attention_backend="torch_native",
                prefill_attention_backend=None,
                decode_attention_backend=None,
                page_size=PAGE_SIZE,
                deterministic=False,
            ),
            tokenizer=tokenizer,
        )
        runner = self.engine.worker.runner
        for module in runner.model.modules():
            if hasattr(module, "operators"):
                module.operators = TORCH_OPERATORS  # type: ignore[assignment]
        self.sampler = ForcingSampler()
        runner.step_sampler = StepSampler(runner.rows, self.sampler)

    def score(
        self, prompt: list[int], params: SamplingParams, forced: Sequence[int] | None = None
    ) -> Scored:
        """What the reference says along `forced`, or along its own choice."""
        sampler = self.sampler
        sampler.scored, sampler.forced = Scored(), forced
        handle = self.engine.add(prompt, replace(params, logprobs=None), request_id=REQUEST)
        while not handle.is_finished:
            self.engine.step()
        output = handle.output()
        assert output.outputs[0].finish_reason == "length", output.outputs[0].message
        sampled = len(output.outputs[0].token_ids)
        assert len(sampler.scored.picks) == sampled, "somebody else sampled"
        sampler.scored.prompt_logprobs = output.prompt_logprobs
        if output.hidden_states is not None:
            sampler.scored.states = output.hidden_states.states[:, -1]
        return sampler.scored

    def close(self) -> None:
        self.engine.close()
        del self.engine
        gc.collect()


@contextmanager
def exact_float32() -> Iterator[None]:
    """Float32 products in float32, not in TF32."""
    precision, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = cudnn
