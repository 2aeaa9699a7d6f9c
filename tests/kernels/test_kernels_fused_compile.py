"""The fused kernels compile for a real GPU, with the wait of dependent launch where it exists."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import headrace

pytest.importorskip("triton", reason="the kernels need the triton package")

SHARED_LIMIT = {90: 227 * 1024, 89: 99 * 1024}  # bytes a block may have


@pytest.mark.parametrize(
    ("capability", "dtypes"),
    [
        (90, ["bfloat16"]),
        pytest.param(90, ["float16", "float32"], marks=pytest.mark.slow),
        pytest.param(89, ["bfloat16", "float16", "float32"], marks=pytest.mark.slow),
    ],
)
def test_fused_kernels_compile_and_fit(capability, dtypes, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(headrace.__file__).parents[1])
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = str(Path(__file__).with_name("compile_fused_for_gpu.py"))
    done = subprocess.run(
        [sys.executable, script, str(capability), *dtypes],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reports = [line.split(" ") for line in done.stdout.splitlines()]
    few_rows = (4 if capability >= 90 else 2) * (len(dtypes) - ("float32" in dtypes))
    assert len(reports) == 11 * len(dtypes) + few_rows
    for name, shared, waits in reports:
        assert int(shared) <= SHARED_LIMIT[capability], name
        assert waits == str(capability >= 90 and name != "_grouped_kernel"), name
