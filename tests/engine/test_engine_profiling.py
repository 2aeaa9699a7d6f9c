"""Profiles hold the spans of the steps that were asked for, and their operators inside them."""

import gzip
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_engine import make_engine, run_all
from torch.profiler import profile

from headrace import LLM
from headrace.base.errors import RequestError
from headrace.engine.engine import Engine
from headrace.request.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
PROMPT = list(range(20))


@pytest.fixture
def engine(llama_folder: Path) -> Engine:
    return make_engine(llama_folder, enable_prefix_cache=False)


def events(path: str | Path) -> list[dict[str, Any]]:
    trace = json.loads(gzip.decompress(Path(path).read_bytes()))
    return [event for event in trace["traceEvents"] if event.get("ph") == "X"]


def spans(path: str | Path) -> list[str]:
    """Ours in the order of their beginnings."""
    own = [event for event in events(path) if event["name"].startswith("headrace.")]
    return [event["name"] for event in sorted(own, key=lambda event: event["ts"])]


def steps(path: str | Path) -> list[str]:
    """What ran forward."""
    return [span.split()[2] for span in spans(path) if span.startswith("headrace.forward")]


def run(engine: Engine) -> None:
    run_all(engine, [PROMPT, PROMPT], [GREEDY, GREEDY])


def test_a_step_is_a_span_and_its_parts_lie_inside(engine: Engine, tmp_path: Path) -> None:
    started = engine.profiler.start(str(tmp_path), steps=2)
    run(engine)
    assert [path.name for path in tmp_path.iterdir()] == [Path(started["path"]).name]
    assert spans(started["path"]) == [
        "headrace.schedule",
        "headrace.step 1",
        "headrace.prepare",
        "headrace.forward eager extend: 2 rows, 40 tokens",
        "headrace.sample",
        "headrace.process 1",
        "headrace.wait 1",
        "headrace.schedule",
        "headrace.step 2",
        "headrace.prepare",
        "headrace.forward eager decode: 2 rows, 2 tokens",
        "headrace.sample",
        "headrace.process 2",
        "headrace.wait 2",
    ]


def test_operators_lie_inside_the_span_that_launched_them(engine: Engine, tmp_path: Path) -> None:
    started = engine.profiler.start(str(tmp_path), steps=2)
    run(engine)
    found = events(started["path"])
    forwards = [event for event in found if event["name"].startswith("headrace.forward")]
    attention = [event for event in found if event["name"] == "aten::scaled_dot_product_attention"]
    assert len(attention) == 4  # two layers, two steps
    for operator in attention:
        holding = [
            span
            for span in forwards
            if span["ts"] <= operator["ts"]
            and operator["ts"] + operator["dur"] <= span["ts"] + span["dur"]
        ]
        assert len(holding) == 1


def test_without_a_profile_no_span_is_opened(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    class Counted:
        def __init__(self, name: str) -> None:
            opened.append(name)

    monkeypatch.setattr("headrace.engine.trace_recording.record_function", Counted)
    run(engine)
    assert not opened


def test_a_stage_begins_with_its_first_step_and_ends_with_another(
    engine: Engine, tmp_path: Path
) -> None:
    started = engine.profiler.start(str(tmp_path), steps=2, stages=["decode"])
    run(engine)
    assert steps(started["path"]) == ["decode:", "decode:"]
    started = engine.profiler.start(str(tmp_path / "more"), stages=["prefill"])
    run(engine)  # one step of the stage, then others
    assert steps(started["path"]) == ["extend:"]
    with pytest.raises(RequestError, match="No profile runs"):
        engine.profiler.stop()


def test_both_stages_have_a_trace_each(engine: Engine, tmp_path: Path) -> None:
    started = engine.profiler.start(str(tmp_path), steps=2, stages=["prefill", "decode"])
    run(engine)
    assert steps(started["paths"]["prefill"]) == ["extend:"]
    assert steps(started["paths"]["decode"]) == ["decode:", "decode:"]


def test_a_profile_begins_with_the_step_that_was_named(engine: Engine, tmp_path: Path) -> None:
    started = engine.profiler.start(str(tmp_path), steps=1, start_step=3)
    run(engine)
    assert "headrace.step 3" in spans(started["path"])
    assert "headrace.step 2" not in spans(started["path"])


def test_stacks_and_shapes(engine: Engine, tmp_path: Path) -> None:
    started = engine.profiler.start(
        str(tmp_path), steps=1, with_stack=True, record_shapes=True, prefix="mine-"
    )
    assert Path(started["path"]).name.startswith("mine-headrace-")
    run(engine)
    found = events(started["path"])
    assert any("Input Dims" in event.get("args", {}) for event in found)
    assert any(event.get("cat") == "python_function" for event in found)


def test_an_engine_that_ends_meanwhile_writes_what_there_is(engine: Engine, tmp_path: Path) -> None:
    started = engine.profiler.start(str(tmp_path))
    run(engine)
    engine.close()
    assert steps(started["path"])[:2] == ["extend:", "decode:"]


def test_threads_may_share_a_profile(engine: Engine, tmp_path: Path) -> None:
    started = engine.profiler.start(str(tmp_path))
    thread = threading.Thread(target=run, args=(engine,))
    thread.start()
    thread.join()
    stopped: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: stopped.append(engine.profiler.stop()))
    thread.start()
    thread.join()
    assert stopped == [{"path": started["path"], "paths": [started["path"]]}]
    assert len(steps(started["path"])) == 4
    assert any(event["name"].startswith("aten::") for event in events(started["path"]))


def test_what_cannot_be_profiled_is_refused(engine: Engine, tmp_path: Path) -> None:
    profiler, folder = engine.profiler, str(tmp_path / "none")
    for options, says in (
        ({"steps": 0}, "steps is 0"),
        ({"steps": "3"}, "steps is '3'. Give a number from 1 on"),
        ({"steps": True}, "steps is True"),
        ({"start_step": -1}, "start_step is -1. Give a number from 0 on"),
        ({"stages": ["both"]}, "stages has 'both'. Give a list of some of prefill, decode"),
        ({"stages": "decode"}, "stages is 'decode'. Give a list"),
        ({"stages": [["decode"]]}, r"stages has \['decode'\]"),
        ({"stages": ["prefill", "decode"]}, "needs a number of steps"),
        ({"activities": ["MEM"]}, "Give a list of some of CPU, GPU, CUDA_PROFILER"),
        ({"activities": []}, "activities is empty. Give a list of some of CPU"),
        ({"activities": 5}, "activities is 5"),
        ({"with_stack": "yes"}, "with_stack is 'yes'. Allowed: True or False"),
        ({"record_shapes": 1}, "record_shapes is 1"),
        ({"prefix": "../x"}, r"prefix is '\.\./x'. Give up to 100 characters of a file's name"),
        ({"prefix": 3}, "prefix is 3"),
        ({"prefix": "\ud800"}, r"prefix is '\\ud800'. Give up to 100"),
        ({"activities": ["CPU", "GPU"]}, "There is no GPU here"),
    ):
        with pytest.raises(RequestError, match=says):
            profiler.start(folder, **options)  # type: ignore[arg-type]
    assert not Path(folder).exists()
    started = profiler.start(folder, stages=["decode"])
    with pytest.raises(RequestError, match="A profile runs already, into"):
        profiler.start(folder)
    with pytest.raises(RequestError, match="No step of the profile came"):
        profiler.stop()
    assert not Path(started["path"]).exists()  # no empty file is left
    profiler.start(folder, steps=1)  # and the next may begin
    assert profiler.stop()["paths"]


def test_two_profiles_of_one_process_do_not_meet(
    engine: Engine, llama_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """torch has one at a time, and dies where two are ended."""
    other = make_engine(llama_folder)
    started = engine.profiler.start(str(tmp_path))
    run(engine)
    with pytest.raises(RequestError, match=r"cannot begin\. Another of torch runs in this process"):
        other.profiler.start(str(tmp_path))
    later = other.profiler.start(str(tmp_path), stages=["decode"])  # its time has not come
    run(other)  # ends as if nobody had asked
    assert "cannot begin" in caplog.text
    assert not Path(later["path"]).exists()
    with pytest.raises(RequestError, match="No profile runs"):
        other.profiler.stop()
    assert steps(engine.profiler.stop()["path"])[:2] == ["extend:", "decode:"]
    assert [path.name for path in tmp_path.iterdir()] == [Path(started["path"]).name]


def test_a_profile_that_somebody_else_has_ended_is_lost(engine: Engine, tmp_path: Path) -> None:
    engine.profiler.start(str(tmp_path))
    with profile():
        run(engine)
    with pytest.raises(RequestError, match=r"The profile is lost\. Another of torch"):
        engine.profiler.stop()
    assert not list(tmp_path.iterdir())
    engine.profiler.start(str(tmp_path), steps=1)
    run(engine)
    assert len(list(tmp_path.iterdir())) == 1


def test_ctrl_c_waits_for_the_beginning_and_the_end_of_a_profile(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("start", "stop"):
        original = getattr(profile, name)

        def pressed(self: Any, original: Callable[[Any], None] = original) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            original(self)

        monkeypatch.setattr(profile, name, pressed)
    with pytest.raises(KeyboardInterrupt):
        engine.profiler.start(str(tmp_path))
    run(engine)
    with pytest.raises(KeyboardInterrupt):
        engine.profiler.stop()
    (path,) = tmp_path.iterdir()
    assert steps(path)[:2] == ["extend:", "decode:"]
    with pytest.raises(RequestError, match="No profile runs"):
        engine.profiler.stop()


def test_what_cannot_be_written_leaves_no_half_and_ends_no_request(
    engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for options in ({"steps": 2}, {"steps": 1, "stages": ["decode"]}, {}):
        gone = tmp_path / "gone"
        engine.profiler.start(str(gone), **options)  # type: ignore[arg-type]
        shutil.rmtree(gone)
        gone.touch()  # now it is a file: there is nothing to remove below it either
        run(engine)
        if options:
            assert "cannot be written" in caplog.text
        else:
            with pytest.raises(RequestError, match="cannot be written to"):
                engine.profiler.stop()
        gone.unlink()
        caplog.clear()
    assert "failed_steps" not in engine.stats()


def test_the_llm_profiles_a_stage(llama_folder: Path, tmp_path: Path) -> None:
    with LLM(
        str(llama_folder), load_format="dummy", device="cpu", dtype="float32", max_model_len=64
    ) as llm:
        started = llm.start_profile(tmp_path, steps=1, stage="decode", with_stack=True)
        llm.generate([PROMPT], GREEDY, use_tqdm=False)
        assert steps(started["path"]) == ["decode:"]
        with pytest.raises(RequestError, match="No profile runs"):
            llm.stop_profile()
        paths = set()
        for _ in range(3):  # within a second
            paths.add(llm.start_profile(tmp_path)["path"])
            llm.generate([[1]], GREEDY, use_tqdm=False)
            assert steps(llm.stop_profile()["path"])
        assert len(paths) == 3
        with pytest.raises(RequestError, match="stage and stages were both given"):
            llm.start_profile(tmp_path, stage="decode", stages=["prefill"])
        with pytest.raises(RequestError, match="cannot be written to None"):
            llm.start_profile(None)  # type: ignore[arg-type]


def test_spans_cost_little(engine: Engine) -> None:
    span = engine.worker.runner.spans
    rounds = 20000
    best = min(_timed(span, rounds) for _ in range(5))
    assert best / rounds < 5e-6  # measured 0.3 us, of this thread's own time


def _timed(span: Any, rounds: int) -> float:
    start = time.thread_time()
    for number in range(rounds):
        with span("step", number):
            pass
    return time.thread_time() - start
