"""Prompt tokens are prepared alike by torch and by the kernel."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need the triton package")

from headrace.batch.facts import BatchFacts
from headrace.batch.forward_batch import ForwardBatch, HostBounds
from headrace.batch.forward_mode import ForwardMode
from headrace.batch.rows import Rows
from headrace.execution.preparation import BatchPreparation

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NEW = [1, 20, 3, 0, 7]
ROWS = [4, 1, 0, 2, 3]
BEFORE = [0, 16, 5, 9, 30]  # of rows 0 to 4
ENDED = 3


def filled(*, kernels: bool) -> ForwardBatch:
    rows = Rows(5, 64, lambda _, shape, dtype: torch.zeros(*shape, dtype=dtype, device=DEVICE))
    rows.length.copy_(torch.tensor(BEFORE))
    rows.last_token.copy_(torch.arange(50, 55))
    rows.active.fill_(True)
    rows.active[0] = rows.active[ENDED] = False
    tables = {
        name: torch.arange(first, first + 40, dtype=torch.int32, device=DEVICE).view(5, 8)
        for name, first in (("full", 1), ("window", 100))
    }
    lengths = [BEFORE[row] + new for row, new in zip(ROWS, NEW, strict=True)]
    prompt = torch.arange(sum(NEW), device=DEVICE)
    prompt[0] = -1
    batch = ForwardBatch(
        mode=ForwardMode.MIXED,
        rows=torch.tensor(ROWS, device=DEVICE),
        bounds=HostBounds(seq_lens=lengths, extend_lens=NEW, rows=ROWS),
        facts=BatchFacts(
            mode=ForwardMode.MIXED,
            tokens=sum(NEW),
            live_tokens=sum(NEW),
            sequences=len(NEW),
            max_length=max(lengths),
        ),
        prompt_tokens=prompt,
    )
    preparation = BatchPreparation(rows, tables, 8)
    preparation._prepare_extend = None
    if kernels:
        preparation.use_kernels(pdl=False)
    preparation.fill(batch)
    return batch


def test_both_ways_fill_the_same_batch() -> None:
    one, other = filled(kernels=False), filled(kernels=True)
    names = ("input_ids", "positions", "seq_lens", "extend_lens", "prefix_lens", "extend_start")
    for name in names:
        mine, theirs = getattr(one, name), getattr(other, name)
        assert mine.dtype == theirs.dtype, name
        assert torch.equal(mine, theirs), name
    assert one.kv.keys() == other.kv.keys() == {"full", "window"}
    for name, group in one.kv.items():
        assert torch.equal(group.page_table, other.kv[name].page_table)
        assert torch.equal(group.out_cache_loc, other.kv[name].out_cache_loc)
    assert other.extend_start is not None
    assert other.extend_start.tolist() == [0, 1, 21, 24, 24]
    assert other.input_ids[:2].tolist() == [54, 1]
    assert other.seq_lens.tolist() == [31, 36, 0, 5, 0]
