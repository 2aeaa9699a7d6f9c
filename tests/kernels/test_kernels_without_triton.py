"""The room without the optional package."""

import subprocess
import sys
from pathlib import Path

import headrace
from headrace.kernels.support_triton import triton_available

PROGRAM = """
import sys
sys.modules["triton"] = None  # as if it were not installed
from headrace.kernels import attention_twins, decode_splits
from headrace.kernels import matvec, matvec_settings, norm_rope_write
from headrace.kernels.support_triton import triton_available
print(triton_available("cpu"))
"""


def test_missing_triton_is_a_refusal_with_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    refusal = triton_available()
    assert refusal is not None
    assert refusal.subject == "triton"
    assert refusal.remedy == "pip install 'headrace[cuda]'"


def test_twins_import_without_triton():
    source = Path(headrace.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "pip install" in done.stdout
