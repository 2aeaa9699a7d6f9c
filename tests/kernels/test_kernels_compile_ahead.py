"""Launches are noted and left out, then compiled together; the next launch finds its kernel."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace

pytest.importorskip("triton", reason="the kernels need the triton package")

THREE = ["_few_rows_kernel", "_norm_kernel", "_norm_kernel"]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Any:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(headrace.__file__).parents[1])
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_ahead.py"))],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_variant_is_compiled_and_loaded_once_and_nothing_is_launched(told: Any) -> None:
    assert told["cold"] == [THREE, [], [], 3]


def test_later_launches_find_their_kernels(told: Any) -> None:
    assert told["afterwards"] == [[], 5, 3]


def test_what_is_compiled_already_is_not_launched_either(told: Any) -> None:
    assert told["again"] == [0, 5]
    assert told["kept launches"] == [1, 0, 1, 2]


def test_launches_of_other_threads_go_on(told: Any) -> None:
    assert told["another thread"] == [0, 5]


def test_a_new_process_finds_what_an_earlier_one_compiled(told: Any) -> None:
    assert told["warm"] == [[], THREE, 5]


def test_the_first_failure_is_raised_and_the_others_are_kept(told: Any) -> None:
    assert "no size will do" in told["failing"]
    assert told["kept"] == []


def test_it_is_left_as_it_was_found(told: Any) -> None:
    assert told["broken off"].startswith("ZeroDivisionError")
    assert "one call at a time" in told["nested"]
    assert told["restored"] == [None, 5]


def test_the_interpreter_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    from headrace.kernels.compile_ahead_triton import compile_ahead

    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    called: list[int] = []
    assert compile_ahead(lambda: called.append(1), torch.device("cpu")).count == 0
    assert called == []
