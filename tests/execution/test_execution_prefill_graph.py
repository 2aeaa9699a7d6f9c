"""The prefill graph path: segments, buckets, padding, refusals, capture.

Equality with eager through the whole engine is in tests/engine/test_engine_prefill_graph.py.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from decode_steps import FAMILIES, Steps
from operator_recorder import OperatorRecorder
from torch import Tensor

from headrace.base.decision import Refusal
from headrace.base.errors import UnsupportedError
from headrace.batch.facts import BatchFacts, Bucket
from headrace.batch.forward_batch import ForwardBatch, HostBounds
from headrace.batch.forward_mode import ForwardMode
from headrace.execution.compiled_pieces import CompiledForward
from headrace.execution.eager import EagerPath
from headrace.execution.prefill_graph import (
    BREAKABLE_SIZES,
    NOT_CAPTURED,
    PIECEWISE_SIZES,
    PrefillGraphPath,
    prefill_sizes,
)
from headrace.execution.replacing import replaced


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def steps(tmp_path: Path) -> Steps:
    return Steps(tmp_path, "llama", rows=4)


def make_path(steps: Steps, **options: Any) -> PrefillGraphPath:
    runner = steps.runner
    settings = {
        "sizes": (4, 8, 16, 32),
        "body": lambda tokens: runner.model.forward,
        "layers": runner.model.attention_layers(),
        "groups": steps.groups,
        "dtype": runner.dtype,
        "device": runner.device,
        "recorder": OperatorRecorder(),
        "ask": 1,
        "quick": True,
        "ends": steps.ends(hidden_states),
    }
    return PrefillGraphPath(**(settings | options))


def eager_path(steps: Steps) -> EagerPath:
    return EagerPath(steps.runner.model.forward, steps.ends(hidden_states))


def hidden_states(hidden: Tensor, batch: ForwardBatch) -> Tensor:
    return hidden


def facts(tokens: int, mode: ForwardMode = ForwardMode.EXTEND, **others: Any) -> BatchFacts:
    settings = {"tokens": tokens, "live_tokens": tokens, "sequences": 1, "max_length": 80}
    return BatchFacts(mode=mode, **(settings | others))


def batch(steps: Steps, prefixes: list[int], new: list[int]) -> ForwardBatch:
    """Rows 1, 2, ... with so many tokens each, and new ones; a row with one new token decodes."""
    rows = list(range(1, len(new) + 1))
    steps.runner.rows.length[1 : len(new) + 1] = torch.tensor(prefixes, dtype=torch.int32)
    mixed = 1 in new
    tokens = [
        -1 if count == 1 else (7 * row + 3 * place) % 90
        for row, count in zip(rows, new, strict=True)
        for place in range(count)
    ]
    mode = ForwardMode.MIXED if mixed else ForwardMode.EXTEND
    lengths = [old + count for old, count in zip(prefixes, new, strict=True)]
    return ForwardBatch(
        mode=mode,
        rows=torch.tensor(rows),
        bounds=HostBounds(seq_lens=lengths, extend_lens=new, rows=rows),
        facts=facts(sum(new), mode, sequences=len(new), has_prefix=any(prefixes)),
        prompt_tokens=torch.tensor(tokens),
    )


def run(path: Any, step: ForwardBatch) -> Tensor:
    path.make_ready(step.facts)
    bucket = path.admits(step.facts)
    assert isinstance(bucket, Bucket), bucket
    hidden: Tensor = path.run(step, bucket)
    return hidden.clone()


STEPS = (
    ([0], [5]),
    ([0, 0, 0], [3, 2, 11]),
    ([0, 40], [7, 5]),
    ([17, 33, 0, 60], [1, 1, 9, 20]),
    ([15, 16], [2, 30]),
    ([3], [4]),
)


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("kind", ["breakable", "piecewise"])
def test_hidden_states_and_what_was_written_equal_eager(
    tmp_path: Path, family: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "headrace.execution.compiled_pieces.compile_piece", lambda piece, _: piece.graph
    )
    steps = Steps(tmp_path, family, rows=4)
    path = make_path(steps)
    if kind == "piecewise":
        path = make_path(steps, body=lambda tokens: compiled(steps, tokens))
    for prefixes, new in (*STEPS, *STEPS[::-1]):
        steps.fill_pool()
        expected = run(eager_path(steps), batch(steps, prefixes, new))
        wrote = [steps.written(row + 1, length) for row, length in enumerate(prefixes)]
        steps.fill_pool()
        found = run(path, batch(steps, prefixes, new))
        assert expected.isfinite().all()
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
        for row, length in enumerate(prefixes):
            now = steps.written(row + 1, length)
            torch.testing.assert_close(now, wrote[row], atol=2e-4, rtol=0)


def compiled(steps: Steps, tokens: int) -> CompiledForward:
    runner = steps.runner
    groups = dict.fromkeys(runner.req_to_token_pool.groups, runner.plan.page_size.value)
    layers = runner.model.attention_layers()
    return CompiledForward(
        runner.model, layers, groups, tokens, device=runner.device, remedy="none"
    )


def test_a_segment_before_between_and_after_attention(steps: Steps) -> None:
    recorder = OperatorRecorder()
    path = make_path(steps, recorder=recorder)
    run(path, batch(steps, [0], [6]))
    (recorded,) = path._captured.values()
    layers = [None if each.ending is None else each.ending.layer for each in recorded.segments]
    assert layers == [*steps.runner.model.attention_layers(), None]
    assert (recorder.sessions, recorder.replays) == (2, 4)
    results = {each.ending.attended.data_ptr() for each in recorded.segments if each.ending}
    assert len(results) == 1  # one buffer for all layers


def test_padding_is_token_0_at_slot_0_and_no_stale_result(steps: Steps) -> None:
    path = make_path(steps)
    run(path, batch(steps, [0, 0], [20, 12]))
    inputs = path._inputs
    run(path, batch(steps, [0], [17]))
    assert not inputs._numbers[:, 17:].any()
    assert inputs._numbers[2:, :17].all()
    for buffer in inputs._attended.values():
        assert buffer[:17].any()
        assert not buffer[17:].any()


def test_a_capture_writes_slot_0_only(steps: Steps) -> None:
    pool = steps.runner.token_to_kv_pool
    steps.fill_pool()
    before = [part.clone() for part in pool.key_value(1)]
    path = make_path(steps)
    path.make_ready(facts(10))
    for part, old in zip(pool.key_value(1), before, strict=True):
        assert part[0, 0].isfinite().all()
        assert torch.equal(part[0, 1:].isnan(), old[0, 1:].isnan())
        assert torch.equal(part[1:], old[1:])


@pytest.mark.parametrize("failing", [0, 2])  # a warm-up, the recording
def test_a_capture_that_fails_leaves_everything_as_it_was(steps: Steps, failing: int) -> None:
    model, calls, recorder = steps.runner.model, [], OperatorRecorder()
    before = [layer.backend for layer in model.attention_layers()]

    def fail(*arguments: Any) -> Tensor:
        calls.append(arguments)
        hidden = model.forward(*arguments)
        if len(calls) > failing:
            raise UnsupportedError("no such kernel")
        return hidden

    path = make_path(steps, body=lambda tokens: fail, recorder=recorder)
    with pytest.raises(UnsupportedError, match="no such kernel"):
        path.make_ready(facts(8))
    assert len(calls) == failing + 1
    assert isinstance(path.admits(facts(8)), Refusal)
    assert [layer.backend for layer in model.attention_layers()] == before
    run(make_path(steps, recorder=recorder), batch(steps, [0], [6]))
    assert [layer.backend for layer in model.attention_layers()] == before


def test_an_ended_row_writes_to_the_padding_page(steps: Steps) -> None:
    path = make_path(steps)
    steps.fill_pool()
    steps.runner.rows.active[2] = False
    before = steps.written(2, 33).clone()
    found = run(path, batch(steps, [20, 33, 0], [1, 1, 9]))
    assert torch.equal(steps.written(2, 33), before)
    expected = run(eager_path(steps), batch(steps, [20, 33, 0], [1, 1, 9]))
    live = [0, *range(2, 11)]
    torch.testing.assert_close(found[live], expected[live], atol=2e-4, rtol=0)


def test_refusals(steps: Steps) -> None:
    path = make_path(steps, ask=2)

    def reason(asked: BatchFacts) -> str:
        path.make_ready(asked)
        answer = path.admits(asked)
        assert isinstance(answer, Refusal)
        assert answer.subject == "prefill_graph"
        return answer.reason

    for mode in (ForwardMode.DECODE, ForwardMode.IDLE):
        assert reason(facts(4, mode)) == "the step holds no prompt tokens"
    assert reason(facts(33)) == "more tokens than the largest bucket (32)"
    assert reason(facts(1)) == "its bucket (4) is more than twice its tokens"
    assert reason(facts(8, live_tokens=0)) == "its bucket (8) is more than twice its tokens"
    assert "adapters" in reason(facts(8, adapters=True))
    assert not path.prepare().seconds
    assert reason(facts(8)) == NOT_CAPTURED
    assert reason(facts(9)) == NOT_CAPTURED
    path.make_ready(facts(6, ForwardMode.MIXED))
    bucket = Bucket(tokens=8, sequences=0)
    assert path.admits(facts(5, prompt_logprobs=True, logprobs=True)) == bucket
    assert list(path.prepare().seconds) == list(path.prepare().bytes) == [bucket]
    path.make_ready(facts(8))
    assert list(path.prepare().seconds) == [bucket]
    assert reason(replace(facts(16), tokens=17)) == NOT_CAPTURED


def test_everything_can_be_captured_at_once_the_largest_first(steps: Steps) -> None:
    path = make_path(steps, ask=2)
    path.capture_all()
    assert [bucket.tokens for bucket in path.prepare().seconds] == [32, 16, 8, 4]


def test_one_bucket_at_a_time_in_idle_moments(steps: Steps) -> None:
    path = make_path(steps)
    path.capture(Bucket(tokens=8, sequences=0))
    assert [path.prepare_more() for _ in range(4)] == [True, True, True, False]
    assert [bucket.tokens for bucket in path.prepare().seconds] == [8, 32, 4, 16]
    assert not make_path(steps, quick=False).prepare_more()


def test_buckets_end_with_what_a_step_can_hold() -> None:
    assert prefill_sizes(BREAKABLE_SIZES, 8192)[-1] == 1024
    assert prefill_sizes(BREAKABLE_SIZES, 29) == (4, 8, 16, 32)
    assert prefill_sizes(PIECEWISE_SIZES, 64) == (4, 8, 16, 32, 64)
    for sizes in (BREAKABLE_SIZES, PIECEWISE_SIZES):
        assert all(a < b <= 2 * a for a, b in pairwise(sizes))


def test_values_nobody_reads_again_are_dropped(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a recorded body would keep the intermediates of all its layers."""
    monkeypatch.setattr(
        "headrace.execution.compiled_pieces.compile_piece", lambda piece, _: piece.graph
    )
    forward = compiled(steps, 8)
    constants = sum(value is not None for value in forward._values)
    dropped = [place for piece in forward._pieces for place in piece.dead]
    assert len(dropped) == len(set(dropped)) == len(forward._values) - constants - 1
    assert forward._result not in dropped


def test_replaced_attributes_come_back_whatever_happens() -> None:
    class Thing:
        name = "before"

    thing = Thing()
    with pytest.raises(AttributeError), replaced([(thing, "name", "x"), (thing, "none", "y")]):
        pass
    assert thing.name == "before"
    with replaced([(thing, "name", "x"), (thing, "name", "y")]):
        assert thing.name == "y"
    assert thing.name == "before"
