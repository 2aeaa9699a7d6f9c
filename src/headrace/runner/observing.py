"""The observers and taps of a runner, as its plan has them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from headrace.batch.rows import Rows
from headrace.config.engine_config import EngineConfig
from headrace.config.plan import Plan
from headrace.models.decoder import CausalDecoder
from headrace.observers.step_observer import Observers, StepObserver
from headrace.observers.tap import NO_TAPS, Taps
from headrace.runner.memory_table import canary_tokens


def build_taps(plan: Plan) -> Taps:
    """Device work around every forward."""
    return NO_TAPS


def build_observers(
    config: EngineConfig,
    plan: Plan,
    model: CausalDecoder,
    *,
    rows: Rows,
    tables: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> Observers:
    """Contexts of the host around every forward.

    Args:
        model: its layers are bound. rows: the columns. tables: page table of each KV group.
        dtype: of the model.
    """
    members: list[StepObserver] = []
    if plan.numeric_canary.value:
        # imported where asked for: without observers a runner has none of their code
        from headrace.observers.numeric_canary import NumericCanary
        from headrace.observers.tolerances import TOLERANCES
        from headrace.runner.step_reading import ReferenceStep, StepReader

        reader = StepReader(rows, tables, plan.page_size.value, model.attention_layers())
        members.append(
            NumericCanary(
                every=plan.numeric_canary.value,
                raises=config.numeric_canary_mode == "raise",
                reference=ReferenceStep(reader, model, plan, dtype).run,
                read=reader.keys_values,
                tolerance=TOLERANCES[plan.dtype.value],
                backends=(plan.prefill_attention.value, plan.decode_attention.value),
                most_tokens=canary_tokens(plan),
            )
        )
    return Observers(members)
