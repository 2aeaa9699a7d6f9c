"""The KV canary: what is stamped is found right, what is changed is found, and both kernels agree.

The kernels run in Triton's interpreter, or on a GPU where there is one.
"""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from canary_cases import (
    CAPACITY,
    Pool,
    found,
    make_pool,
    make_step,
    words,
    write_model_output,
)

import headrace
from headrace.kernels import kv_canary
from headrace.kernels.kv_canary import (
    AFTER,
    BEFORE,
    CHAIN,
    DATA,
    HEAD,
    POSITION,
    TOKEN,
    CanaryReport,
    CanaryStep,
    chain_of,
    fingerprints,
)

pytest.importorskip("triton", reason="the kernels need the triton package")

from headrace.kernels import kv_canary_triton

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STEPS = ([5, 9, 1, 70], [1, 1, 1, 1], [3, 1, 0, 1])
KERNELS = {"twin": kv_canary, "triton": kv_canary_triton}
DEVICES = {"twin": CPU, "triton": DEVICE}


def run_step(
    pool: Pool, step: CanaryStep, kernels: ModuleType, seed: int, between: Callable[[], None]
) -> CanaryReport:
    report = pool.report()
    kernels.begin_step(step, pool.records, report)
    write_model_output(pool, step, seed)
    between()
    kernels.end_step(step, pool.records, report)
    return report


def nothing() -> None:
    """The model does what it should."""


@cache
def _filled(kernels: str, real_data: str) -> Pool:
    draw = random.Random(0)
    pool = make_pool(4, pages=120, device=DEVICES[kernels], real_data=real_data)
    for number, new in enumerate(STEPS):
        step = make_step(pool, list(new), draw)
        report = run_step(pool, step, KERNELS[kernels], number, nothing)
        assert found(report) == []
        assert report.ends[:4].tolist() == [chain_of(tokens) for tokens in pool.tokens]
        assert report.inputs[0, : len(step.input_ids)].tolist() == step.input_ids.tolist()
        assert report.inputs[1, : len(step.positions)].tolist() == step.positions.tolist()
    return pool


def filled(kernels: str, real_data: str = "partial") -> Pool:
    """A pool after some steps of four sequences, in which nothing was found."""
    return _filled(kernels, real_data).copy()


SHAPES = [
    {"page_size": 1, "pages": 400, "real_data": "partial"},
    {"page_size": 4, "real_data": "all", "dims": (16, 24), "layers": (2, 0)},
    pytest.param({"page_size": 16, "real_data": "off"}, marks=pytest.mark.slow),
    pytest.param(
        {"page_size": 4, "real_data": "partial", "heads": 1, "dims": (2, 4), "layers": (1,)},
        marks=pytest.mark.slow,
    ),
    {"page_size": 8, "real_data": "all", "dtype": torch.float32, "heads": 3, "dims": (5, 7)},
]


@pytest.mark.parametrize("shape", SHAPES)
def test_both_agree_bit_for_bit(shape: dict[str, object]) -> None:
    shape = {"pages": 120} | shape
    twin = make_pool(4, **shape)  # type: ignore[arg-type]
    mine = make_pool(4, device=DEVICE, **shape)  # type: ignore[arg-type]
    draws = random.Random(1), random.Random(1)
    for number, new in enumerate(STEPS):
        ended = (2,) if number == len(STEPS) - 1 else ()
        reports = [
            run_step(pool, make_step(pool, list(new), draw, ended=ended), kernels, number, nothing)
            for pool, draw, kernels in zip(
                (twin, mine), draws, (kv_canary, kv_canary_triton), strict=True
            )
        ]
        assert found(reports[0]) == found(reports[1]) == []
        for name in ("ends", "inputs"):
            theirs, ours = (getattr(report, name).cpu() for report in reports)
            if name == "inputs" and ended:  # where a row has ended nothing is written, or anything
                theirs, ours = theirs[:, :2], ours[:, :2]
            assert torch.equal(theirs, ours), name
        for name in ("marks", "chains", "prints"):
            theirs, ours = getattr(twin.records, name), getattr(mine.records, name)
            assert theirs is ours is None or torch.equal(theirs, ours.cpu()), name
    assert reports[0].ends[2] == 0


def swap_pages(pool: Pool) -> None:
    pool.table[3, [2, 5]] = pool.table[3, [5, 2]]


def other_page(pool: Pool) -> None:
    pool.table[3, 4] = pool.table[1, 1]


def changed_key(pool: Pool) -> None:
    pool.keys[1].flatten(0, 1)[pool.slot(3, 30), 0, 0] += 1


def changed_value_of_another_layer(pool: Pool) -> None:
    pool.values[3].flatten(0, 1)[pool.slot(3, 30), 0, 0] += 1


def changed_end_of_value(pool: Pool) -> None:
    pool.values[2].flatten(0, 1)[pool.slot(3, 30), -1, -1] += 1


def stale_slot(pool: Pool) -> None:
    """As another sequence left it that had the same position there."""
    slot, other = pool.slot(3, 5), pool.slot(1, 5)
    for name in ("marks", "chains", "prints"):
        getattr(pool.records, name)[slot] = getattr(pool.records, name)[other]


BOTH = CHAIN | POSITION
SWAPPED = {
    **dict.fromkeys([8, 20], BOTH),
    **dict.fromkeys([9, 10, 11, 21, 22, 23], POSITION),
    **dict.fromkeys([12, 24], CHAIN),
}
FAULTS = [
    (swap_pages, "partial", SWAPPED),
    (other_page, "partial", {16: BOTH, 17: POSITION, 18: POSITION, 19: POSITION, 20: CHAIN}),
    (changed_key, "partial", {30: DATA}),
    (changed_key, "off", {}),
    (changed_value_of_another_layer, "all", {}),
    (changed_end_of_value, "partial", {}),
    (changed_end_of_value, "all", {30: DATA}),
    (stale_slot, "partial", {5: CHAIN | DATA, 6: CHAIN}),
]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("fault", "real_data", "kinds"), FAULTS)
def test_a_fault_is_found_where_it_is(
    kernels: str, fault: Callable[[Pool], None], real_data: str, kinds: dict[int, int]
) -> None:
    pool = filled(kernels, real_data)
    fault(pool)
    report = run_step(
        pool, make_step(pool, [1] * 4, random.Random(9)), KERNELS[kernels], 9, nothing
    )
    lines = found(report)
    assert {line["place"] for line in lines} <= {3}
    after = {line["position"]: line["kinds"] for line in lines if line["stage"] == AFTER}
    assert after == kinds
    before = {line["position"]: line["kinds"] for line in lines if line["stage"] == BEFORE}
    records = {position: kind & ~DATA for position, kind in kinds.items()}
    assert before == {position: kind for position, kind in records.items() if kind}
    for line in lines:
        assert line["slot"] == pool.slot(3, line["position"])
        assert line["expected"] != line["found"]


@pytest.mark.parametrize("kernels", KERNELS)
def test_what_a_step_does_wrong_is_found_behind_it(kernels: str) -> None:
    pool = filled(kernels)
    step = make_step(pool, [1] * 4, random.Random(3))
    step.out_cache_loc[1] = pool.slot(3, 7)  # somebody else's place
    lines = found(run_step(pool, step, KERNELS[kernels], 3, nothing))
    lines = [line for line in lines if line["stage"] == AFTER]  # a kernel may see it at once
    last = pool.lengths[1] - 1
    own = [line for line in lines if line["place"] == 1]
    assert [(line["position"], line["kinds"]) for line in own] == [
        (last, CHAIN | POSITION | TOKEN)
    ], "nothing was stamped where the table leads"
    assert {line["position"]: line["kinds"] for line in lines if line["place"] == 3} == {
        7: CHAIN | POSITION | DATA,
        8: CHAIN,
    }

    pool = filled(kernels)
    step = make_step(pool, [1] * 4, random.Random(3))
    victim = pool.slot(0, 2)

    def overwrite() -> None:
        pool.keys[0].flatten(0, 1)[victim] = 7.0

    lines = found(run_step(pool, step, KERNELS[kernels], 3, overwrite))
    assert [(each["place"], each["position"], each["kinds"]) for each in lines] == [(0, 2, DATA)]

    pool = filled(kernels)
    step = make_step(pool, [1] * 4, random.Random(3))
    step.positions[2] += 5
    lines = found(run_step(pool, step, KERNELS[kernels], 3, nothing))
    at = pool.lengths[2] - 1
    assert [
        (each["place"], each["stage"], each["kinds"], each["expected"], each["found"])
        for each in lines
    ] == [(2, BEFORE, POSITION, at, at + 5)]


@pytest.mark.parametrize("kernels", KERNELS)
def test_more_than_fits_is_counted(kernels: str) -> None:
    pool = filled(kernels)
    pool.records.chains.zero_()
    report = run_step(
        pool, make_step(pool, [1] * 4, random.Random(3)), KERNELS[kernels], 3, nothing
    )
    history = sum(pool.lengths) - 4
    assert int(report.count) > history > CAPACITY
    assert all(line["kinds"] == CHAIN for line in found(report))


@pytest.mark.parametrize("kernels", KERNELS)
def test_single_pages_are_swept(kernels: str) -> None:
    """Each as a run of its own behind the page before it."""
    pool = filled(kernels)
    runs = [(3, index) for index in range(12)] + [(1, 0), (1, 1)]

    def sweep() -> list[dict[str, int]]:
        def tensor(numbers: list[object]) -> torch.Tensor:
            return torch.tensor(numbers, dtype=torch.int32, device=DEVICES[kernels])

        tokens = torch.zeros(1, dtype=torch.int64, device=DEVICES[kernels])
        pages = [[int(pool.table[s, max(i - 1, 0)]), int(pool.table[s, i])] for s, i in runs]
        none = tensor([0] * len(runs))
        step = CanaryStep(
            seq_lens=tensor([(index + 1) * pool.page_size for _, index in runs]),
            firsts=tensor([index * pool.page_size for _, index in runs]),
            extend_lens=none,
            extend_start=none,
            input_ids=tokens,
            positions=tokens,
            out_cache_loc=tokens,
            page_table=tensor(pages),  # type: ignore[arg-type]
            page_size=pool.page_size,
        )
        report = pool.report()
        KERNELS[kernels].end_step(step, pool.records, report)
        assert int(report.inputs.max()) == -1, "nothing was fed"
        return found(report)

    assert sweep() == []
    pool.values[2].flatten(0, 1)[pool.slot(3, 30), 0, 0] += 1
    pool.records.chains[pool.slot(3, 19)] += 1
    lines = [(runs[each["place"]], each["position"], each["kinds"]) for each in sweep()]
    assert sorted(lines) == [
        ((3, 4), 19, CHAIN),
        ((3, 5), 20, CHAIN),
        ((3, 7), 30, DATA),
    ]


def test_a_fingerprint_misses_no_change_of_one_word() -> None:
    pool = make_pool(1, dtype=torch.float32, real_data="all", pages=3)
    slots = torch.tensor([5])
    before = int(fingerprints(pool.records, slots))
    seen = {before}
    for layer, tensor in ((0, pool.keys), (2, pool.values)):
        flat = words(tensor)[layer, 5]
        for word in range(len(flat)):
            for change in (1, -(2**31), 0x5A5A5A):
                flat[word] ^= change
                seen.add(int(fingerprints(pool.records, slots)))
                flat[word] ^= change
    assert len(seen) == 1 + 3 * (words(pool.keys).shape[2] + words(pool.values).shape[2])
    assert int(fingerprints(pool.records, slots)) == before


def test_a_chain_names_tokens_and_their_places() -> None:
    tokens = [3, 1, 4, 1, 5]
    assert chain_of([]) == HEAD
    assert chain_of(tokens[3:], 3, chain_of(tokens[:3])) == chain_of(tokens)
    others = [[3, 1, 4, 1], [3, 4, 1, 1, 5], [3, 1, 4, 1, 6], [*tokens, 0], [0, *tokens]]
    assert len({chain_of(each) for each in [tokens, *others]}) == 6


@pytest.mark.parametrize("capability", [90, pytest.param(89, marks=pytest.mark.slow)])
def test_kernels_compile_for_gpus_and_read_wide(capability: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(headrace.__file__).parents[1])
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = str(Path(__file__).with_name("compile_canary_for_gpu.py"))
    done = subprocess.run(
        [sys.executable, script, str(capability)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split(" ") for line in done.stdout.splitlines()]
    assert len(lines) == 3 * 2 * 2
    for name, real_data, wide, stack in lines:
        assert (int(wide) > 0) == (name == "_after_kernel" and real_data != "off"), name
        assert stack == "0", f"{name} spills"
