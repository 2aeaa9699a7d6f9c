"""The only place that wires objects: from a config to a runner that is ready to deliver.

The phases run over all runners of the device, a target now, a draft beside it later: load each,
settle one joint budget, then pools, backends and paths.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from headrace.base.errors import CheckpointError
from headrace.base.log import get_logger
from headrace.checkpoint.interface import Checkpoint
from headrace.checkpoint.names import resolve_model
from headrace.checkpoint.opening import open_checkpoint, open_tokenizer, with_asked_template
from headrace.config.engine_config import EngineConfig
from headrace.config.hardware import Hardware
from headrace.config.persona import Persona
from headrace.config.plan import Plan
from headrace.config.tokenizer_source import TokenizerSource
from headrace.loader.dummy import fill_dummy
from headrace.loader.tied_head import stores_another_head
from headrace.loader.weights import check_room, load_weights
from headrace.memory.budget import KvBudget
from headrace.memory.free_memory import free_bytes
from headrace.models.decoder import CausalDecoder
from headrace.runner.checkpoint_facts import checkpoint_facts
from headrace.runner.cpu_graph_gains import read_gains
from headrace.runner.detect import detect
from headrace.runner.memory_sizes import kv_budget, spendable_bytes, weight_bytes
from headrace.runner.model_runner import ModelRunner
from headrace.runner.persona import persona_of
from headrace.runner.resolve import resolve
from headrace.runner.trial_capture import trial_capture
from headrace.runner.worker import TpModelWorker

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """Everything known before a device is touched: what `explain` shows."""

    config: EngineConfig
    checkpoint: Checkpoint
    persona: Persona
    hardware: Hardware
    plan: Plan
    tokenizer_source: TokenizerSource | None


def settle(
    config: EngineConfig, hardware: Hardware | None = None, *, weights: bool = True
) -> Settled:
    """Read the checkpoint's headers and settle the plan.

    Args:
        hardware: assumed hardware; what is here if absent.
        weights: False does without the files of the weights, for a plan alone.
    """
    is_dummy = config.load_format == "dummy"
    path = resolve_model(config.model, config.revision)
    checkpoint = open_checkpoint(path, weights=weights and not is_dummy)
    persona = persona_of(checkpoint.config)
    if stores_another_head(persona.traits, checkpoint):
        log.warning("%s stores a head of its own, against its config: it is used", path.name)
        persona = replace(persona, traits=replace(persona.traits, tie_word_embeddings=False))
    hardware = hardware or detect(config.device)
    facts = checkpoint_facts(checkpoint)
    gains = read_gains(hardware.name) if hardware.platform == "cpu" else ()
    plan = resolve(config, persona, hardware, checkpoint=facts, gains=gains)
    return Settled(
        config=config,
        checkpoint=checkpoint,
        persona=persona,
        hardware=hardware,
        plan=plan,
        tokenizer_source=_tokenizer_source(config, checkpoint),
    )


def _tokenizer_source(config: EngineConfig, checkpoint: Checkpoint) -> TokenizerSource | None:
    if config.tokenizer is None:
        return with_asked_template(checkpoint.tokenizer_source, config)
    other = open_tokenizer(config)
    if other is None:
        raise CheckpointError(f"{config.tokenizer} holds no tokenizer")
    ends = other.eos_token_ids
    if checkpoint.tokenizer_source is not None:
        ends = (*ends, *checkpoint.tokenizer_source.eos_token_ids)
    return replace(other, eos_token_ids=ends)


def assemble(
    settled: Settled, *, progress: bool = False, model: CausalDecoder | None = None
) -> TpModelWorker:
    """Load, size and wire the runner of this device.

    Args:
        model: weights that an earlier runner loaded for the same persona, device, dtype and ropes;
            that runner is of no use afterwards. Read anew if absent.

    Raises:
        CheckpointError: weights and model do not fit together.
        CapacityError: weights or KV do not fit into memory.
    """
    plan, persona = settled.plan, settled.persona
    device = torch.device(plan.device.value)
    if model is None:
        needed = sum(weight_bytes(persona.traits, plan.dtype.value).values())
        check_room(needed, settled.hardware.name, free_bytes(device))

    def load(model: CausalDecoder) -> None:
        if plan.load_format.value == "dummy":
            fill_dummy(model, settled.config.seed)
        else:
            load_weights(model, settled.checkpoint, progress=progress)

    runner = ModelRunner(settled.config, persona, plan, load)
    runner.initialize(model)
    graphs = trial_capture(runner, progress=progress)
    runner.init_memory_pool(joint_budget(settled, graphs))
    runner.init_attention_backend()
    runner.init_forward_paths()
    if settled.config.capture == "all":
        runner.paths.capture_all(progress=progress)
    return TpModelWorker(runner)


def joint_budget(settled: Settled, graph_bytes: Mapping[str, int]) -> KvBudget:
    """KV tokens that fit, from the memory that is free now that the weights are loaded.

    Args:
        graph_bytes: what captured graphs will take, by name.

    Raises:
        CapacityError: no page fits, or fewer tokens than max_total_tokens asks for.
    """
    plan, traits = settled.plan, settled.persona.traits
    device = torch.device(plan.device.value)
    free = free_bytes(device)
    if free is None:
        free = settled.hardware.memory_bytes
    spendable = spendable_bytes(plan, free=free, total=settled.hardware.memory_bytes)
    return kv_budget(traits, plan, spendable, graph_bytes)
