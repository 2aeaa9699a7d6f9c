"""The input of one forward.

Shapes: T tokens and B sequences of the step. The scheduler fills the host side; in decode the
path gathers the tensors from the rows, in extend too, but for the prompt's token ids.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.batch.facts import BatchFacts
from headrace.batch.forward_mode import ForwardMode
from headrace.batch.sampling_batch_info import SamplingBatchInfo
from headrace.batch.side_request import SideRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class KvGroup:
    """Page tables and write slots of one kind of KV for this step.

    Attributes:
        page_table: [B, max pages] int32, pages of each sequence in order.
        out_cache_loc: [T] int64, slot each new token is written to; 0 for padding.
    """

    name: str
    page_size: int
    page_table: Tensor
    out_cache_loc: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBounds:
    """Lengths as the host knows them: exact without speculation, else upper bounds.

    `prefix_lens[i] + extend_lens[i] == seq_lens[i]`; `extend_lens` is all ones in decode. A row
    that a stop token has ended on the device counts here like a live one. `rows` are the rows.
    """

    seq_lens: list[int]
    extend_lens: list[int]
    rows: list[int] = field(default_factory=list)

    @property
    def prefix_lens(self) -> list[int]:
        return [total - new for total, new in zip(self.seq_lens, self.extend_lens, strict=True)]


@dataclass(slots=True, kw_only=True)
class ForwardBatch:
    """One step's work.

    Attributes:
        mode: kind of the step.
        rows: [B] int64, row of each sequence (`req_pool_indices`); 0 for padding.
        bounds: the host's lengths.
        facts: what the selector looks at.
        prompt_tokens: [T] int64 in extend: ids of prompt tokens, -1 where the row's last token
            stands (a decode row of a mixed step); `None` in decode.
        sampling: the rows that sample in this step, `None` in warm-up and idle steps.
        side: what leaves the forward besides logits.
        names: what each sequence is called, for whoever tells of it; made when asked.
        input_ids, positions: [T] int64, filled by preparation.
        seq_lens, extend_lens, prefix_lens, extend_start: [B] int32, filled by preparation; lengths
            after this step; the last three stay `None` in decode.
        kv: one entry per KV group, filled by preparation.
        asked_states: [M, L, H] for what `side.hidden` asks for, where it names inner layers; filled
            by the model's run but for the last norm's, which is last.
    """

    mode: ForwardMode
    rows: Tensor
    bounds: HostBounds
    facts: BatchFacts
    prompt_tokens: Tensor | None = None
    sampling: SamplingBatchInfo | None = None
    side: SideRequest = field(default_factory=SideRequest)
    names: Callable[[], list[str]] = list
    input_ids: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    positions: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    seq_lens: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    extend_lens: Tensor | None = None
    prefix_lens: Tensor | None = None
    extend_start: Tensor | None = None
    kv: dict[str, KvGroup] = field(default_factory=dict)
    asked_states: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.facts.tokens

    @property
    def num_sequences(self) -> int:
        return self.facts.sequences

    def sequence_names(self) -> list[str]:
        """Of each sequence; of its row where nobody has named it."""
        return self.names() or [f"row {row}" for row in self.bounds.rows]
