"""Random schedules in which requests ask for hidden states: every row once, and the right one."""

import random

import numpy as np
import pytest
import torch
from symbolic_model import VOCAB, Recorder, expected_output, next_token, symbolic_scheduler

from headrace.request.request import Request
from headrace.request.sampling_params import SamplingParams
from headrace.scheduler.admission import Admission
from headrace.scheduler.scheduler import Scheduler
from headrace.scheduler.token_rows import StateRows


def submit(
    scheduler: Scheduler, name: str, prompt: list[int], most: int, states: str, n: int
) -> list[Recorder]:
    sinks = [Recorder() for _ in range(n)]
    params = SamplingParams(temperature=0.0, n=n, return_hidden_states=states)
    request = Request(request_id=name, prompt_token_ids=prompt, params=params)
    scheduler.add(request, most, frozenset(), [Admission(sink=sink) for sink in sinks])
    return sinks


def check(sink: Recorder, prompt: list[int], most: int, states: str, is_aborted: bool) -> None:
    expected = expected_output(prompt, most, frozenset())
    assert sink.tokens == expected[: len(sink.tokens)]
    (ending,) = sink.endings
    assert is_aborted if ending.reason == "abort" else sink.tokens == expected
    if states == "none":
        assert sink.states is None
        return
    assert sink.states is not None
    first = 0 if states == "all" else len(prompt) - 1
    if states == "final" and sink.tokens:
        first += len(sink.tokens) - 1
        assert sink.states.rows == 1
    found = np.frombuffer(sink.states.data, np.float32)
    assert (sink.states.first_position, sink.states.rows) == (first, len(found))
    whole = prompt + expected
    rows = [next_token(whole[: place + 1]) for place in range(first, first + len(found))]
    assert found.tolist() == rows
    if sink.tokens:
        assert first + len(found) == len(prompt) + len(sink.tokens) - 1
    else:
        assert first + len(found) < len(prompt) or not len(found)


@pytest.mark.parametrize("seed", range(40))
def test_random_schedule(seed: int) -> None:
    draw = random.Random(2000 + seed)
    scheduler = symbolic_scheduler(
        pages=draw.choice([18, 24, 60]),
        page_size=draw.choice([1, 2, 4]),
        chunk=draw.choice([1, 5, 16]),
        max_running=draw.choice([1, 3, 6]),
        overlap=bool(seed % 2),
        prefix_cache=draw.random() < 0.7,
        retract_every=draw.choice([0, 2, 3]),
    )
    stems = [[draw.randrange(VOCAB) for _ in range(draw.randint(1, 12))] for _ in range(2)]
    submitted: dict[str, tuple[list[Recorder], list[int], int, str]] = {}
    aborted: set[str] = set()
    ongoing = None
    for turn in range(5000):
        if turn < 40 and draw.random() < 0.4:
            prompt = draw.choice(stems) + [draw.randrange(VOCAB) for _ in range(draw.randint(0, 4))]
            room = scheduler.keeper.capacity_tokens - len(prompt)
            if room > 0:
                name, most = f"r{turn}", draw.randint(1, min(room, 14))
                states = draw.choice(["none", "last", "all", "final"])
                sinks = submit(scheduler, name, prompt, most, states, draw.choice([1, 1, 3]))
                submitted[name] = (sinks, prompt, most, states)
        if submitted and draw.random() < 0.04:
            victim = draw.choice(sorted(submitted))
            if scheduler.abort(victim):
                aborted.add(victim)
        ongoing = scheduler.loop(ongoing)
        if turn >= 40 and ongoing is None and not scheduler.has_work:
            break
    else:
        raise AssertionError("the scheduler makes no progress")
    scheduler.check_integrity()
    for name, (sinks, prompt, most, states) in submitted.items():
        for sink in sinks:
            check(sink, prompt, most, states, name in aborted)


def state_rows(first: int, layers: tuple[int, ...]) -> StateRows:

    return StateRows(first, layers, num_layers=3, hidden_size=2, dtype=torch.float32)


def numbers(rows: StateRows) -> list[float]:
    return np.frombuffer(rows.packed().data, np.float32).tolist()


def test_rows_hold_the_layers_that_were_asked_in_their_order() -> None:
    rows = state_rows(4, (3, 0, 3))
    assert rows.inner == (0,)
    step = np.array([[[0, 1], [10, 11], [30, 31]]], np.float32)  # layers 0, 1 and the last norm's
    rows.add(4, step.view(np.uint8), (0, 1))
    assert numbers(rows) == [30, 31, 0, 1, 30, 31]
    assert rows.next_position == 5
    with pytest.raises(AssertionError, match="in order, each once"):
        rows.add(4, step.view(np.uint8), (0, 1))
    with pytest.raises(AssertionError, match="in order, each once"):
        rows.add(6, step.view(np.uint8), (0, 1))


def test_a_prompts_rows_are_taken_whole_or_not_at_all() -> None:
    leader = state_rows(0, (3,))
    leader.add(0, np.arange(6, dtype=np.float32).reshape(3, 1, 2).view(np.uint8), ())
    for end, expected in ((2, [0, 1, 2, 3]), (3, [0, 1, 2, 3, 4, 5]), (4, []), (0, [])):
        rows = state_rows(0, (3,))
        rows.take_prompt(leader, end)
        rows.take_prompt(leader, end)
        assert numbers(rows) == expected
    outputs_only = state_rows(3, (3,))
    outputs_only.take_prompt(leader, 3)
    assert numbers(outputs_only) == []
