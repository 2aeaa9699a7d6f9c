"""A kept launch takes the kernel that Triton would take, and Triton is asked only at times."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import headrace

pytest.importorskip("triton", reason="the kernels need the triton package")


@pytest.fixture(scope="module")
def told() -> Any:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(headrace.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("kept_launches.py"))],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", ["extend", "decode"])
def test_the_kernel_is_the_one_that_triton_would_take(told: Any, kind: str) -> None:
    assert told[kind]["wrong"] == []
    assert told[kind]["kernels"] > 5


@pytest.mark.parametrize("kind", ["extend", "decode"])
def test_what_was_launched_before_needs_no_search(told: Any, kind: str) -> None:
    assert told[kind]["asked"] < told[kind]["calls"]
