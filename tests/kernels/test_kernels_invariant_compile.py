"""The batch-invariant kernels compile for a real GPU, all forms to instructions of one kind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import headrace

pytest.importorskip("triton", reason="the kernels need the triton package")

SHARED_LIMIT = {90: 227 * 1024, 80: 163 * 1024}  # bytes a block may have


def compiled(capability, dtype, folder):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(headrace.__file__).parents[1])
    environment["TRITON_CACHE_DIR"] = str(folder)
    script = str(Path(__file__).with_name("compile_invariant_for_gpu.py"))
    done = subprocess.run(
        [sys.executable, script, str(capability), dtype],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    for report in reports:
        assert report["shared"] <= SHARED_LIMIT[capability], report
        assert report["waits"] is (capability >= 90), report
    return reports


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_on_hopper_everything_is_a_warp_groups(dtype, tmp_path):
    reports = compiled(90, dtype, tmp_path)
    assert not any(report["warps"] for report in reports)
    products = [report for report in reports if report["name"] == "_product_kernel"]
    widths = [report["warp groups"] for report in products]
    assert widths == [["m64n16k16"], ["m64n128k16"], ["m64n256k16"], ["m64n32k16"]]
    # A loop of one turn would be undone, and the residual become where its sum starts.
    assert all(report["loops"] for report in products)
    attention = [report for report in reports if report["name"] == "attend_kernel"]
    assert len(attention) == 3
    for report in attention:
        assert report["warp groups"] == ["m64n128k16", "m64n64k16"]
        # Masked or not, whole or spread: a row's logits are added in one order.
        assert len(report["sums"]) == 1
        assert report["sums"] == attention[0]["sums"]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_float32_takes_no_tensor_cores(capability, tmp_path):
    for report in compiled(capability, "float32", tmp_path):
        assert report["warps"] == report["warp groups"] == []
