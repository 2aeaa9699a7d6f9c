"""The plan: every choice of a runner with its reason, from asked x persona x hardware."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from headrace.base.decision import Decision
from headrace.config.persona import RopeTraits

OFF = "off"
"""The value of decisions whose other values are words or sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopePlan:
    """A rope with everything length-dependent settled (dynamic NTK, LongRoPE).

    `length` is the max_model_len the frequencies were fixed for.
    """

    traits: RopeTraits
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One field per decision, in the order `explain` shows them."""

    device: Decision[str]
    load_format: Decision[str]
    dtype: Decision[str]
    kv_cache_dtype: Decision[str]
    max_model_len: Decision[int]
    ropes: Decision[dict[str, RopePlan]]
    page_size: Decision[int]
    deterministic: Decision[bool]
    prefill_attention: Decision[str]
    decode_attention: Decision[str]
    decode_graph: Decision[str | tuple[int, ...]]
    hidden_state_layers: Decision[tuple[int, ...]]
    prefill_graph: Decision[str]
    cpu_graph: Decision[str]
    routed_experts: Decision[bool]
    expert_distribution: Decision[str]
    prefix_cache: Decision[bool]
    overlap: Decision[bool]
    chunked_prefill_size: Decision[int]
    split_prefill_layers: Decision[int]
    max_running_requests: Decision[int]
    mem_fraction: Decision[float]
    max_total_tokens: Decision[int | None]
    window_pool: Decision[str]
    kv_canary: Decision[str]
    kv_canary_real_data: Decision[str]
    kv_canary_sweep_interval: Decision[int]
    numeric_canary: Decision[int]

    @property
    def num_rows(self) -> int:
        """Rows of columns and page tables: one for each running sequence, and the padding row."""
        return self.max_running_requests.value + 1

    @property
    def max_pages(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.max_model_len.value // self.page_size.value)

    @property
    def most_step_tokens(self) -> int:
        """Tokens of the largest step: prompt tokens, and one for each row that decodes."""
        return self.chunked_prefill_size.value + self.max_running_requests.value

    def __iter__(self) -> Iterator[Decision[Any]]:
        return (getattr(self, entry.name) for entry in fields(self))
