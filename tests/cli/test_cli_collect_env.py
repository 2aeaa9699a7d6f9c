"""`headrace collect-env`"""

import json
import sys
import time
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from headrace.cli import collect_env
from headrace.cli.collect_env import HIDDEN, PACKAGES, relevant_environment
from headrace.cli.main import main
from headrace.version import __version__


def test_json(capsys, monkeypatch) -> None:
    monkeypatch.setattr(collect_env, "SECONDS", 60.0)  # the machine may be busy
    assert main(["collect-env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["headrace"]["version"] == __version__
    assert found["system"]["python"].startswith(sys.version.split()[0])
    assert found["torch"]["version"].startswith("2.")
    assert found["packages"].keys() == PACKAGES.keys()
    assert "GiB" in found["system"]["MemTotal"]
    assert found["gpus"]


def script(folder: Path, name: str, text: str) -> tuple[str, ...]:
    file = folder / name
    file.write_text(text)
    return (sys.executable, str(file))


def test_a_gpu_and_a_torch_that_cannot_be_imported(tmp_path, monkeypatch, capsys) -> None:
    rows = "print('NVIDIA H200, 570.1, 143771 MiB, 9.0\\nNVIDIA H200, 570.1, 143771 MiB, 9.0')"
    programs = {
        "torch": script(tmp_path, "torch.py", "raise ImportError('libcudart.so.13 is missing')"),
        "gpus": script(tmp_path, "gpus.py", rows),
        "driver": script(tmp_path, "driver.py", "print('| Driver: 570.1  CUDA Version: 13.0 |')"),
        "nvcc": script(tmp_path, "nvcc.py", "print('Cuda tools, release 12.8, V12.8.1')"),
    }
    monkeypatch.setattr(collect_env, "_PROGRAMS", programs)
    monkeypatch.setattr(collect_env, "SECONDS", 60.0)
    assert main(["collect-env"]) == 0
    shown = capsys.readouterr().out
    assert "fails: ImportError: libcudart.so.13 is missing" in shown
    assert "gpu 1" in shown
    assert "NVIDIA H200, 570.1, 143771 MiB, 9.0" in shown
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "CUDA of the driver 13.0" in lines
    assert "CUDA toolkit 12.8" in lines


def test_what_does_not_answer_in_time_is_told(tmp_path, monkeypatch) -> None:
    slow = script(tmp_path, "slow.py", "import time; time.sleep(120)")
    monkeypatch.setattr(collect_env, "_PROGRAMS", dict.fromkeys(collect_env._PROGRAMS, slow))
    monkeypatch.setattr(collect_env, "SECONDS", 0.3)
    began = time.monotonic()
    found = collect_env.collect()
    assert time.monotonic() - began < 60.0
    assert found["torch"]["import"] == "no answer within 0.3 s; a first one takes long, try again"
    assert found["gpus"] == {"nvidia-smi": "no answer within 0.3 s"}


def test_packages_that_are_missing_say_how_to_get_them(monkeypatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(collect_env, "version", missing)
    assert "pip install 'headrace[grammar]'" in collect_env._package("xgrammar", "grammar")
    assert "pip install headrace)" in collect_env._package("torch", "")


def test_extras_are_those_of_the_project() -> None:
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    project = tomllib.loads(pyproject.read_text())["project"]
    extras = {"": project["dependencies"], **project["optional-dependencies"]}
    for name, extra in PACKAGES.items():
        assert any(line.startswith(f"{name}>=") for line in extras[extra]), name


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("HF_TOKEN", "hf_abc", HIDDEN),
        ("HEADRACE_ADMIN_API_KEY", "abc", HIDDEN),
        ("OPENAI_API_KEY", "abc", HIDDEN),
        ("TOKENIZERS_PARALLELISM", "false", "false"),
        ("CUDA_VISIBLE_DEVICES", "1", "1"),
        ("https_proxy", "http://me:secret@proxy:80", "http://***@proxy:80"),
        ("HOME", "/root", None),
    ],
)
def test_secrets_are_not_shown(name: str, value: str, shown: str | None) -> None:
    assert relevant_environment({name: value}).get(name) == shown
