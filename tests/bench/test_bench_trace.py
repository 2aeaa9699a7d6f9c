"""Gaps and calls read from traces made by hand, and from one of torch's own."""

import json
from pathlib import Path
from typing import Any

from headrace.bench.trace import TURN, read_trace


def event(cat: str, name: str, start: float, length: float, correlation: int | None = None) -> Any:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": length, "args": args}


def turn(start: float, length: float = 90) -> Any:
    return event("user_annotation", TURN, start, length)


def launch(correlation: int, at: float, name: str = "cudaGraphLaunch") -> Any:
    return event("cuda_runtime", name, at, 5, correlation)


def kernel(correlation: int, start: float, stop: float) -> Any:
    return event("kernel", "k", start, stop - start, correlation)


def test_the_gap_lies_between_the_graphs_of_two_turns() -> None:
    events = [
        turn(0),
        launch(1, 10),
        turn(100),
        launch(2, 110),
        turn(200),
        launch(3, 210),
        kernel(1, 100, 140),
        kernel(1, 150, 180),  # what is idle inside a step is not the host's
        kernel(2, 187, 260),
        kernel(3, 258, 300),  # programmatic launch: it starts before the other ended
        {"ph": "M", "name": "process_name", "args": {}},
        event("cpu_op", "aten::copy_", 12, 3),
    ]
    report = read_trace(list(reversed(events)))
    assert report.turns == 3
    assert report.gaps == (7.0, 0.0)
    assert report.gap == 3.5
    assert read_trace(events, skip=1).gaps == (0.0,)
    assert report.as_dict() == {"turns": 3, "gap_us": 3.5, "longest_gap_us": 7.0, "calls": {}}


def test_kernels_beside_the_graph_are_no_idle_time_and_no_end_of_the_step() -> None:
    events = [
        turn(0),
        launch(1, 10),
        launch(8, 20, "cudaLaunchKernel"),
        turn(100),
        launch(2, 110),
        kernel(1, 100, 150),
        kernel(8, 155, 165),  # after the graph: 5 idle before it, 15 after it
        kernel(2, 180, 200),
    ]
    assert read_trace(events).gaps == (20.0,)


def test_without_graphs_a_step_is_what_its_turn_launched() -> None:
    events = [
        turn(0),
        launch(1, 10, "cudaLaunchKernel"),
        event("cuda_driver", "cuLaunchKernelEx", 20, 5, 2),
        turn(100),
        launch(3, 110, "cudaLaunchKernel"),
        kernel(99, 5, 15),  # launched before the first turn
        kernel(1, 100, 120),
        kernel(2, 160, 170),
        kernel(3, 195, 200),
    ]
    assert read_trace(events).gaps == (25.0,)


def test_calls_that_disturb_are_counted_within_turns_only() -> None:
    events = [
        turn(0),
        turn(100),
        event("cuda_runtime", "cudaMalloc", 10, 1, 1),
        event("cuda_runtime", "cudaEventSynchronize", 20, 1, 2),
        event("cuda_runtime", "cudaEventSynchronize", 120, 1, 3),
        event("cuda_runtime", "cudaDeviceSynchronize", 95, 1, 4),  # between turns
        event("cuda_runtime", "cudaMemcpyAsync", 30, 1, 5),
        event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 40, 1, 5),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 50, 1, 6),
    ]
    report = read_trace(events)
    assert dict(report.calls) == {
        "cudaMalloc": 1,
        "cudaEventSynchronize": 2,
        "Memcpy HtoD (Pageable -> Device)": 1,
    }
    assert report.gaps == ()
    assert report.gap is None


def test_turns_of_a_profile_are_found(tmp_path: Path) -> None:
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            with record_function(TURN):
                pass
    file = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(file))
    assert read_trace(json.loads(file.read_text())["traceEvents"]).turns == 3
