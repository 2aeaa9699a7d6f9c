"""However a call ends, nothing is left behind and others are not disturbed."""

import copy
import gc
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tiny_llm import GREEDY, assert_nothing_is_held, ids, joined, make_llm, one, tokens

from headrace import LLM, SamplingParams
from headrace.base.errors import RequestError

PROMPT = ids(1, 20)
LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def at_step(llm: LLM, number: int, act: Callable[[], None]) -> Any:
    """A patch that acts within the forward of step `number` (1 is the next)."""
    path = llm.engine.worker.runner.selector.paths[-1]
    calls = 0
    run = path.run

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            act()
        return run(*arguments)

    return mock.patch.object(path, "run", counted)


def raise_(error: BaseException) -> None:
    raise error


def test_a_failing_step_ends_its_requests_only(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    expected = tokens(llm, PROMPT, LONG)
    stream = llm.stream(ids(2, 9), LONG)
    next(stream)
    with caplog.at_level(logging.CRITICAL), at_step(llm, 4, lambda: raise_(RuntimeError("boom"))):
        output = one(llm, PROMPT, LONG)
    assert output.finish_reason == "error"
    assert "boom" in output.message
    assert 0 < len(output.token_ids) < 40
    assert output.token_ids == expected[0][: len(output.token_ids)]
    assert list(stream)[-1].finish_reason == "error"
    assert tokens(llm, PROMPT, LONG) == expected
    assert_nothing_is_held(llm)


def test_results_that_cannot_be_read_end_their_requests(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.CRITICAL),
        mock.patch.object(llm.engine.scheduler, "_decode_token", side_effect=RuntimeError("boom")),
    ):
        (output,) = llm.generate(
            PROMPT, SamplingParams(n=2, max_tokens=3, logprobs=1), use_tqdm=False
        )
    assert [each.finish_reason for each in output.outputs] == ["error", "error"]
    assert len(one(llm, PROMPT, GREEDY).token_ids) == 8
    assert_nothing_is_held(llm)


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)])
def test_an_interrupt_within_a_step_frees_everything(
    llm: LLM, error: BaseException, step: int
) -> None:
    expected = tokens(llm, [PROMPT, ids(4, 50)], LONG)
    with at_step(llm, step, lambda: raise_(error)), pytest.raises(type(error)):
        llm.generate([PROMPT, ids(4, 50)], LONG, use_tqdm=False)
    assert_nothing_is_held(llm)
    assert tokens(llm, [PROMPT, ids(4, 50)], LONG) == expected


def test_an_interrupt_while_results_are_read(llm: LLM) -> None:
    push = mock.Mock(side_effect=KeyboardInterrupt)
    with (
        mock.patch("headrace.engine.sequence_output.OutputText.push", push),
        pytest.raises(KeyboardInterrupt),
    ):
        llm.generate([PROMPT, ids(4, 50)], LONG, use_tqdm=False)
    assert_nothing_is_held(llm)


def test_ctrl_c_waits_for_the_end_of_the_step(llm: LLM) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        steps = llm.stats().get("steps", 0)
        ours = at_step(llm, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
        with ours, pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPT, LONG, use_tqdm=False)
        assert llm.stats()["steps"] == steps + 3  # the step itself was not torn
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert_nothing_is_held(llm)


def test_a_timeout_by_alarm_reaches_the_caller(llm: LLM) -> None:
    """fabric#1846: taken for a fault of the step, it ended sequences, and the call went on."""

    def ring(*_: object) -> None:
        raise TimeoutError("too long")

    def alarm() -> None:
        os.kill(os.getpid(), signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, ring)
    try:
        with at_step(llm, 3, alarm), pytest.raises(TimeoutError, match="too long"):
            llm.generate([PROMPT] * 40, LONG, use_tqdm=False)
        assert_nothing_is_held(llm)
        with at_step(llm, 2, alarm), pytest.raises(TimeoutError):
            list(llm.stream(PROMPT, LONG))
        assert_nothing_is_held(llm)
        assert signal.getsignal(signal.SIGALRM) is ring
        rung: list[int] = []
        signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
        with at_step(llm, 3, alarm):
            assert one(llm, PROMPT, GREEDY).finish_reason == "length"
        assert rung == [signal.SIGALRM]
    finally:
        signal.signal(signal.SIGALRM, before)


def test_an_interrupted_call_leaves_a_stream_alone(llm: LLM) -> None:
    expected = tokens(llm, PROMPT, LONG)[0]
    stream = llm.stream(PROMPT, LONG)
    pieces = [next(stream)]
    with (
        mock.patch("headrace.engine.shared_engine.Progress.count", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        llm.generate(ids(4, 50), LONG, use_tqdm=False)
    pieces += list(stream)
    assert joined(pieces)[1] == expected
    assert_nothing_is_held(llm)


# ---- streams


@pytest.mark.parametrize("taken", [0, 1, 5])
@pytest.mark.parametrize("how", ["close", "forget", "throw"])
def test_a_stream_left_early_is_aborted(llm: LLM, taken: int, how: str) -> None:
    aborted = llm.stats().get("finished_abort", 0)
    stream = llm.stream(PROMPT, LONG)
    for _ in range(taken):
        next(stream)
    if how == "close":
        stream.close()
    elif how == "throw":
        with pytest.raises(KeyboardInterrupt):
            stream.throw(KeyboardInterrupt)
    del stream
    assert llm.stats().get("finished_abort", 0) == aborted + (taken > 0)
    assert_nothing_is_held(llm)


def test_two_streams_and_a_call_between_them(llm: LLM) -> None:
    other = ids(7, 33)
    expected = tokens(llm, [PROMPT, other], LONG)
    first, second = llm.stream(PROMPT, LONG), llm.stream(other, LONG)
    pieces: tuple[list[Any], list[Any]] = ([], [])
    for _ in range(5):
        pieces[0].append(next(first))
        pieces[1].append(next(second))
    assert tokens(llm, PROMPT, LONG) == expected[:1]  # both streams end within this call
    pieces[1].extend(second)
    pieces[0].extend(first)
    assert [joined(each)[1] for each in pieces] == expected
    assert [each[-1].finish_reason for each in pieces] == ["length", "length"]
    assert_nothing_is_held(llm)


def test_a_stream_collected_within_a_step_does_not_lock_up(llm: LLM) -> None:
    """The garbage collector may find a forgotten stream at any place, a step included."""
    held = [llm.stream(ids(2, 9), LONG)]
    next(held[0])
    with at_step(llm, 3, held.clear):
        assert len(one(llm, PROMPT, LONG).token_ids) == 40
    assert_nothing_is_held(llm)


# ---- threads


def test_threads_share_the_engine(llm: LLM) -> None:
    prompts = [ids(seed, 10 + seed) for seed in range(6)]
    expected = tokens(llm, prompts, GREEDY)
    found: list[Any] = [None] * len(prompts)

    def call(place: int) -> None:
        if place % 2:
            found[place] = joined(list(llm.stream(prompts[place], GREEDY)))[1]
        else:
            found[place] = tokens(llm, prompts[place], GREEDY)[0]

    threads = [threading.Thread(target=call, args=(place,)) for place in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == expected
    assert_nothing_is_held(llm)


def test_a_long_call_does_not_keep_another_thread_out(folder: Path) -> None:
    """Requests of two threads run in one batch: the short one ends long before the long one."""
    llm = make_llm(folder)
    long = SamplingParams(temperature=0.0, max_tokens=230, ignore_eos=True)
    started, order = threading.Event(), []

    def short() -> None:
        started.wait(60)
        tokens(llm, PROMPT, GREEDY)
        order.append("short")

    thread = threading.Thread(target=short)
    thread.start()
    with at_step(llm, 3, started.set):
        tokens(llm, PROMPT, long)
    order.append("long")
    thread.join(60)
    assert order == ["short", "long"]


def test_closing_while_another_thread_generates(folder: Path) -> None:
    llm = make_llm(folder)
    started, found = threading.Event(), []

    def call() -> None:
        found.append(one(llm, PROMPT, SamplingParams(max_tokens=230, ignore_eos=True)))

    thread = threading.Thread(target=call)
    with at_step(llm, 3, started.set):
        thread.start()
        assert started.wait(60)
        llm.close()
    thread.join(60)
    assert found[0].finish_reason == "abort"
    assert 0 < len(found[0].token_ids) < 230


# ---- what a program does around it


EXIT = """
import sys, threading, torch
from headrace import LLM
from headrace.request.structured_output import StructuredOutput
from headrace.sampling.grammar.compiler import GrammarCompiler
llm = LLM(sys.argv[1], load_format="dummy", device="cpu")
path = llm.engine.worker.runner.selector.paths[-1]
run, large, small = path.run, torch.ones(2000, 2000), torch.ones(400, 400)
is_in_step, was_in_step = threading.Event(), threading.Event()
def slow(*arguments):
    is_in_step.set()
    large @ large
    was_in_step.set()
    return run(*arguments)
class Backend:
    def compile(self, structured):
        was_in_step.wait()
        for _ in range(200):
            small @ small
path.run = slow
threading.Thread(target=lambda: llm.generate("a", use_tqdm=False), daemon=True).start()
is_in_step.wait()
grammars = GrammarCompiler(Backend)
grammars.start(StructuredOutput(regex="a"))
"""


def test_a_program_may_end_while_its_threads_generate(folder: Path) -> None:
    """pytorch#38228: C++ that comes back to an interpreter that ends takes the process down, that
    of a step as that of a grammar's compilation."""
    ended = subprocess.run(
        [sys.executable, "-c", EXIT, folder], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr


@pytest.mark.parametrize("take_along", [pickle.dumps, copy.copy, copy.deepcopy])
def test_who_takes_it_along_is_told_that_it_stays(
    llm: LLM, take_along: Callable[[Any], Any]
) -> None:
    """As Ray, multiprocessing and dataclasses.asdict do: "cannot pickle '_thread.lock' object"."""
    with pytest.raises(
        RequestError, match=r"cannot be pickled or copied.*Make it where it is used"
    ):
        take_along(llm)


def test_a_fork_is_told_that_it_cannot_use_it(folder: Path) -> None:
    """vLLM#6152, pytorch#17199: threads do not follow into a fork, and a step there may hang."""
    llm = make_llm(folder)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # must not come back into pytest
        try:
            with llm:
                one(llm, PROMPT, GREEDY)
        except RequestError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        assert "made in another process" in told.read()
    os.waitpid(child, 0)
    assert len(one(llm, PROMPT, GREEDY).token_ids) == 8


TOLD_TO_TORCH: dict[str, Callable[[], Any]] = {
    "device": lambda: torch.device("meta"),  # phi-2's sample begins with set_default_device("cuda")
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),  # as around steps of training
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("told", TOLD_TO_TORCH)
def test_what_a_program_tells_torch_changes_nothing(folder: Path, told: str) -> None:
    asked = replace(GREEDY, logprobs=1, prompt_logprobs=1)
    with make_llm(folder) as llm:
        expected = llm.generate(PROMPT, asked, use_tqdm=False)[0]
    with TOLD_TO_TORCH[told]():
        llm = make_llm(folder)
        inside = llm.generate(PROMPT, asked, use_tqdm=False)[0]
        streamed = joined(list(llm.stream(PROMPT, asked)))
    outside = llm.generate(PROMPT, asked, use_tqdm=False)[0]
    for output in (inside, outside):
        assert output.outputs[0].logprobs == expected.outputs[0].logprobs
        assert output.prompt_logprobs == expected.prompt_logprobs
    assert streamed[1:] == (expected.outputs[0].token_ids, expected.outputs[0].logprobs)


# ---- close


def test_closing(folder: Path) -> None:
    llm = make_llm(folder)
    stream, unstarted = llm.stream(PROMPT, LONG), llm.stream(PROMPT, LONG)
    next(stream)
    engine = llm.engine
    llm.close()
    llm.close()
    assert list(stream)[-1].finish_reason == "abort"
    assert not engine.scheduler.has_work
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate(PROMPT),
        lambda: llm.generate([]),
        lambda: llm.generate(PROMPT, GREEDY),
        lambda: llm.chat([{"role": "user", "content": "x"}]),
        lambda: llm.stream(PROMPT),
        lambda: next(unstarted),
        llm.stats,
        llm.explain,
        llm.get_tokenizer,
        llm.get_default_sampling_params,
    ]
    for call in calls:
        with pytest.raises(RequestError, match="closed"):
            call()


def test_closing_gives_the_memory_back(folder: Path) -> None:
    """Without waiting for the garbage collector."""
    llm = make_llm(folder)
    tokens(llm, PROMPT, GREEDY)
    runner = llm.engine.worker.runner
    held = [weakref.ref(runner), weakref.ref(next(runner.model.parameters()))]
    held.append(weakref.ref(runner.token_to_kv_pool))
    del runner
    gc.collect()
    gc.disable()
    try:
        llm.close()
        assert [reference() for reference in held] == [None] * 3
    finally:
        gc.enable()


def test_an_error_within_the_context_manager_closes(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError), make_llm(folder) as llm:
        raise ZeroDivisionError
    with pytest.raises(RequestError, match="closed"):
        llm.stats()
