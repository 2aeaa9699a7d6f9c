"""Preparation and advance kernels against their twins, with poison wherever nothing may be read."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need the triton package")

from headrace.kernels.batch_preparation import (
    advance_length,
    advance_token,
    gather_decode,
    gather_extend,
    write_slots,
)
from headrace.kernels.batch_preparation_triton import (
    advance_decode,
    prepare_decode,
    prepare_extend,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGES = 600  # more than two blocks of a program
POISON = -99


def columns(page_size: int) -> dict[str, torch.Tensor]:
    """Rows: padding, empty, one page to the brim, just over, long, ended."""
    length = [0, 0, page_size - 1, page_size, page_size * 550 + page_size // 2, 7]
    return {
        "last_token": torch.arange(100, 106, device=DEVICE),
        "length": torch.tensor(length, dtype=torch.int32, device=DEVICE),
        "active": torch.tensor([False, True, True, True, True, False], device=DEVICE),
    }


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_decode_step_is_prepared_as_by_the_twins(page_size: int) -> None:
    state = columns(page_size)
    generator = torch.Generator().manual_seed(1)
    tables = {
        name: torch.randint(1, 9999, (6, PAGES), generator=generator, dtype=torch.int32).to(DEVICE)
        for name in ("full", "window")
    }
    rows = torch.tensor([4, 0, 3, 1, 5, 0, 2], device=DEVICE)
    batch = len(rows)
    out = {
        "input_ids": torch.full((batch,), POISON, device=DEVICE),
        "positions": torch.full((batch,), POISON, device=DEVICE),
        "seq_lens": torch.full((batch,), POISON, dtype=torch.int32, device=DEVICE),
        "page_tables": {
            name: torch.full((batch, PAGES + 3), POISON, dtype=torch.int32, device=DEVICE)
            for name in tables
        },
        "out_cache_locs": {name: torch.full((batch,), POISON, device=DEVICE) for name in tables},
    }
    prepare_decode(rows, **state, tables=tables, page_size=page_size, **out)
    ids, positions, seq_lens = gather_decode(rows, *state.values())
    assert torch.equal(out["input_ids"], ids)
    assert torch.equal(out["positions"], positions)
    assert torch.equal(out["seq_lens"], seq_lens)
    for name, table in tables.items():
        slots = write_slots(rows, positions, state["active"], table, page_size)
        assert torch.equal(out["out_cache_locs"][name], slots)
        for place, row in enumerate(rows.tolist()):
            pages = -(-int(seq_lens[place]) // page_size)
            gathered = out["page_tables"][name][place]
            assert torch.equal(gathered[:pages], table[row, :pages])
            assert (gathered[pages:] == POISON).all(), "pages beyond the length are left alone"


@pytest.mark.parametrize("page_size", [1, 16])
def test_an_extend_step_is_prepared_as_by_the_twins(page_size: int) -> None:
    """Chunks of many lengths, none, more than a program's, a row that ended, padding."""
    state = columns(page_size)
    tables = {
        name: (torch.randperm(6 * 3000, dtype=torch.int32) + 1).view(6, 3000).to(DEVICE)
        for name in ("full", "window")
    }
    rows = torch.tensor([4, 0, 3, 1, 5, 2], device=DEVICE)
    new = [1, 3, 0, 2100, 5, 40]
    new_tokens = torch.tensor(new, dtype=torch.int32, device=DEVICE)
    start = (torch.cumsum(new_tokens, 0) - new_tokens).int()
    prompt = torch.arange(sum(new), device=DEVICE)
    prompt[0] = -1
    out = {
        **{name: torch.full_like(prompt, POISON) for name in ("input_ids", "positions")},
        **{
            name: torch.full_like(new_tokens, POISON)
            for name in ("seq_lens", "extend_lens", "prefix_lens")
        },
    }
    slots = {name: torch.full_like(prompt, POISON) for name in tables}
    prepare_extend(
        rows,
        new_tokens,
        start,
        prompt,
        **state,
        tables=tables,
        page_size=page_size,
        max_new=max(new),
        **out,
        out_cache_locs=slots,
    )
    ids, positions, owner, *lengths = gather_extend(rows, new_tokens, prompt, **state)
    for mine, twin in zip(out.values(), (ids, positions, *lengths), strict=True):
        assert torch.equal(mine, twin)
    # what the twin looks up for rows that ended is dropped
    positions = torch.where(state["active"][rows[owner]], positions, 0)
    for name, table in tables.items():
        twin = write_slots(rows[owner], positions, state["active"], table, page_size)
        assert torch.equal(slots[name], twin)


def test_advance_is_that_of_the_twins() -> None:
    """Rows: padding twice, goes on, stops by id, fails, ended before, penalised ones."""
    generator = torch.Generator().manual_seed(2)
    counts = torch.randint(0, 5, (8, 50), generator=generator, dtype=torch.int32)
    stop_ids = torch.full((8, 6), -1)
    stop_ids[:, :3] = torch.tensor([7, 8, 9])
    stop_ids[1] = -1
    state = {
        "length": torch.tensor([0, 5, 6, 7, 8, 9, 10, 11], dtype=torch.int32),
        "last_token": torch.arange(20, 28),
        "active": torch.tensor([False, True, True, True, False, True, True, True]),
        "stop_ids": stop_ids,
        "penalised": torch.tensor([False, False, True, False, True, True, False, False]),
        "token_counts": counts,
    }
    rows = torch.tensor([0, 3, 1, 2, 0, 4, 5, 6])
    tokens = torch.tensor([0, 9, 7, 12, 3, 13, 49, 0])
    finite = torch.tensor([True, True, True, True, False, True, True, False])
    twin = {name: column.clone() for name, column in state.items()}
    length = twin.pop("length")
    advance_length(rows, torch.ones(8, dtype=torch.int32), length, twin["active"])
    advance_token(rows, tokens, finite, **twin)
    mine = {name: column.to(DEVICE) for name, column in state.items()}
    advance_decode(rows.to(DEVICE), tokens.to(DEVICE), finite.to(DEVICE), **mine)
    for name, column in (twin | {"length": length}).items():
        assert torch.equal(mine[name].cpu(), column), name
    active = [False, True, True, False, False, True, False, True]
    assert mine["active"].tolist() == active, "stopped by id, failed; row 7 was not in the batch"
