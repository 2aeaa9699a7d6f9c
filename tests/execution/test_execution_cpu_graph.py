"""The CPU graph equals eager; what it refuses; what compiling costs and where it ends."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from decode_steps import FAMILIES, Steps, assert_equal_to_eager, decode_facts

from headrace.base.decision import Refusal
from headrace.base.errors import UnsupportedError
from headrace.batch.facts import Bucket
from headrace.batch.forward_mode import ForwardMode
from headrace.execution import compiled_pieces
from headrace.execution.cpu_graph import CpuGraphPath, bucket_sizes
from headrace.execution.eager import EagerPath
from headrace.execution.pieces import Piece, cut

BATCHES = ([40], [3, 61], [17, 1, 15], [5, 80, 33, 16, 47], [9, 2, 70, 31, 15, 64, 1, 22])
CPU = torch.device("cpu")
# The last position of a page and the first of the next, then on.
CHANGING = ([15, 40], [16, 41], [17, 42], [30, 5])


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pieces run as they were traced, uncompiled: all but the compiler. The keys of the pieces."""
    keys: list[str] = []

    def keep(piece: Piece, _: str) -> Callable[..., object]:
        keys.append(piece.key)
        return piece.graph

    monkeypatch.setattr(compiled_pieces, "compile_piece", keep)
    return keys


@pytest.fixture
def steps(tmp_path: Path) -> Steps:
    return Steps(tmp_path, "llama", rows=8)


def test_pieces_equal_eager(tmp_path: Path, family: str, traced_only: list[str]) -> None:
    steps = Steps(tmp_path, family, rows=8)
    path = steps.path(CpuGraphPath, sizes=(1, 2, 4, 8))
    for lengths in (*BATCHES, *CHANGING):
        assert_equal_to_eager(steps, path, lengths)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_pieces_equal_eager_in_short_floats(
    tmp_path: Path, dtype: str, traced_only: list[str]
) -> None:
    steps = Steps(tmp_path, "llama", rows=4, dtype=dtype)
    expected = steps.step(steps.path(EagerPath), [5, 30, 17])
    found = steps.step(steps.path(CpuGraphPath, sizes=(4,)), [5, 30, 17])
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0)


def test_equal_layers_share_a_piece(steps: Steps, traced_only: list[str]) -> None:
    path = steps.path(CpuGraphPath, sizes=(2,))
    path.prepare()
    assert len(set(traced_only)) == len(traced_only) == 3  # before, between and after attention
    pieces = cut(steps.runner.model, {"full": 16}, 2, CPU).pieces
    assert [piece.layer for piece in pieces] == [0, 1, 2, None]


def test_a_trace_leaves_the_model_as_it_was(steps: Steps) -> None:
    model = steps.runner.model
    before = [(layer.operators, layer.backend) for layer in model.attention_layers()]
    cut(model, {"full": 16}, 2, CPU)
    assert [(layer.operators, layer.backend) for layer in model.attention_layers()] == before


def test_a_trace_does_not_keep_the_weights(tmp_path: Path) -> None:
    """PyTorch's tracers are cycles that hold them, until the garbage collector comes by."""
    steps = Steps(tmp_path, "llama", rows=2)
    weight = weakref.ref(next(steps.runner.model.parameters()))
    gc.collect()
    gc.disable()
    try:
        cut(steps.runner.model, {"full": 16}, 2, CPU)
        del steps
        assert weight() is None
    finally:
        gc.enable()


def test_an_ended_row_writes_to_the_padding_page(steps: Steps, traced_only: list[str]) -> None:
    path = steps.path(CpuGraphPath, sizes=(4,))
    steps.runner.rows.active[2] = False
    before = steps.written(2, 33).clone()
    found = steps.step(path, [20, 33, 9])
    assert torch.equal(steps.written(2, 33), before)
    expected = steps.step(steps.path(EagerPath), [20, 33, 9])
    torch.testing.assert_close(found[[0, 2]], expected[[0, 2]], atol=2e-4, rtol=0)


def test_refusals(steps: Steps, traced_only: list[str]) -> None:
    path = steps.path(CpuGraphPath, sizes=(1, 4))

    def reason(rows: int, mode: ForwardMode = ForwardMode.DECODE) -> str:
        answer = path.admits(decode_facts(rows, mode))
        assert isinstance(answer, Refusal)
        assert answer.subject == "cpu_graph"
        return answer.reason

    assert reason(3) == "not compiled yet"
    for mode in (ForwardMode.EXTEND, ForwardMode.MIXED):
        assert reason(3, mode) == "the step holds prompt tokens"
    assert reason(5) == "more rows than the largest bucket (4)"
    path.make_ready(decode_facts(5))
    path.make_ready(decode_facts(2, ForwardMode.EXTEND))
    assert reason(2) == "not compiled yet"
    path.make_ready(decode_facts(2))
    assert path.admits(decode_facts(3)) == Bucket(tokens=4, sequences=4)


def test_compiling_is_reported_and_bounded(steps: Steps, traced_only: list[str]) -> None:
    path = steps.path(CpuGraphPath, sizes=(1, 2), compile_seconds=1e-9)
    report = path.prepare()
    one = Bucket(tokens=1, sequences=1)
    assert list(report.seconds) == [one]
    assert report.seconds[one] > 0
    path.make_ready(decode_facts(2))
    answer = path.admits(decode_facts(2))
    assert isinstance(answer, Refusal)
    assert "for compiling are spent" in answer.reason
    assert path.admits(decode_facts(1)) == one


def test_a_runner_takes_it_first_where_the_plan_wants_it(
    tmp_path: Path, traced_only: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.runner.detect.compilers", lambda: frozenset({"g++"}))
    runner = Steps(tmp_path, "llama", rows=2, cpu_graph="on").runner
    assert [path.name for path in runner.selector.paths] == ["cpu_graph", "eager"]
    assert runner.explain(decode_facts(1)).value == "cpu_graph"
    two = runner.explain(decode_facts(2))
    assert (two.value, [str(refusal) for refusal in two.refused[-1:]]) == (
        "eager",
        ["cpu_graph: not compiled yet"],
    )
    assert Steps(tmp_path, "llama", rows=2).runner.paths.cpu_graph is None


def test_buckets_end_with_the_most_rows() -> None:
    assert bucket_sizes(64) == (1, 2, 4, 8)
    assert bucket_sizes(3) == (1, 2, 3)
    assert bucket_sizes(1) == (1,)


def test_a_compiler_that_fails_is_told(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no such compiler\nmore")

    monkeypatch.setattr("torch._inductor.compile", fail)
    with pytest.raises(UnsupportedError, match="no such compiler") as caught:
        steps.path(CpuGraphPath, sizes=(1,)).prepare()
    assert "cpu_graph off" in caught.value.remedy


def test_a_compiled_piece_equals_its_graph(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one real compile of the quick suite: a packed product, rope and the write to the pool."""
    # Few kernels compile faster than the headers that many would share.
    monkeypatch.setitem(compiled_pieces.INDUCTOR_OPTIONS, "cpp_cache_precompile_headers", False)
    steps.fill_pool()
    with torch.inference_mode():
        whole = cut(steps.runner.model, {"full": 16}, 3, CPU)
        first = whole.pieces[0]
        arguments = dict(
            zip(whole.arguments, torch.tensor([[5, 6, 7], [20, 8, 0], [21, 40, 33]]), strict=True)
        )
        held = [whole.values[place] for place in first.inputs]
        assert sum(value is None for value in held) == 3
        before = [
            arguments[place] if value is None else value
            for place, value in zip(first.inputs, held, strict=True)
        ]
        inputs, others = _copies(before), _copies(before)
        results, expected = compiled_pieces.compile_piece(first, "")(*inputs), first.graph(*others)
    torch.testing.assert_close(results, expected, atol=2e-4, rtol=0)
    torch.testing.assert_close(
        [x for x in inputs if x.layout is torch.strided],
        [x for x in others if x.layout is torch.strided],
        atol=2e-4,
        rtol=0,
        equal_nan=True,  # page 0
    )
    written = [
        not torch.equal(now.nan_to_num(), then.nan_to_num())
        for now, then in zip(inputs, before, strict=True)
        if now.dim() == 3
    ]
    assert written == [True, True]  # keys and values


def _copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies, but of packed weights, which nothing writes."""
    return [x.clone() if x.layout is torch.strided else x for x in tensors]


@pytest.mark.slow
def test_compiled_families_equal_eager(tmp_path: Path, family: str) -> None:
    steps = Steps(tmp_path, family, rows=8)
    path = steps.path(CpuGraphPath, sizes=(1, 2, 4, 8))
    for lengths in (*BATCHES, *CHANGING):
        assert_equal_to_eager(steps, path, lengths)
