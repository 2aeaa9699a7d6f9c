"""The kernels compile for a real GPU, which the interpreter does not prove."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import headrace

pytest.importorskip("triton", reason="the kernels need the triton package")

SHARED_LIMIT = {90: 227 * 1024, 89: 99 * 1024}  # bytes a block may have

BRAIN_GROUP = "32,8,128,128,64,bfloat16,all"
FLOAT_TRAITS = "6,2,80,64,1,float32,all"
HALF_WIDE = "8,1,256,256,16,float16,all"
SMALL_HEADS = "9,3,64,64,16,bfloat16,all"
FLOAT_WIDE = "8,1,256,256,128,float32,plain"


@pytest.mark.parametrize(
    ("capability", "shapes"),
    [
        (90, [BRAIN_GROUP]),
        pytest.param(
            90, [FLOAT_TRAITS, HALF_WIDE, FLOAT_WIDE, SMALL_HEADS], marks=pytest.mark.slow
        ),
        pytest.param(89, [BRAIN_GROUP, HALF_WIDE, FLOAT_WIDE], marks=pytest.mark.slow),
    ],
)
def test_kernels_compile_and_fit(capability, shapes, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(headrace.__file__).parents[1])
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).with_name("compile_for_gpu.py")),
            str(capability),
            *shapes,
        ],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reports = [line.rsplit(" ", 2) for line in done.stdout.splitlines()]
    assert len(reports) == 5 * len(shapes)  # decode whole and split, combine, extend twice
    for name, shared, waits in reports:
        assert int(shared) <= SHARED_LIMIT[capability], name
        assert waits == str(capability >= 90), name
