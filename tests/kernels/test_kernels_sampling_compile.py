"""The sampling kernels compile for a real GPU, and wait where a launch may come early."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import headrace

pytest.importorskip("triton", reason="the kernels need the triton package")


@pytest.mark.parametrize(
    ("capability", "pdl"), [(90, True), pytest.param(80, False, marks=pytest.mark.slow)]
)
def test_sampling_kernels_compile(capability: int, pdl: bool, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(headrace.__file__).parents[1])
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = Path(__file__).with_name("compile_sampling_for_gpu.py")
    done = subprocess.run(
        [sys.executable, str(script), str(capability), "pdl" if pdl else "plain"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reports = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, *_ in reports] == [
        "_score_kernel",  # without filters
        "_score_kernel",
        "narrow_kernel",
        "_score_kernel",
        "_count_kernel",
        "_list_kernel",
        "_prepare_kernel",
        "_advance_kernel",
        "_lengths_kernel",
        "_prepare_extend_kernel",
    ]
    for name, shared, waits, meets in reports:
        assert int(shared) <= 48 * 1024, name
        assert waits == str(pdl), name
        if name in ("_score_kernel", "narrow_kernel"):
            assert meets == "True", name
