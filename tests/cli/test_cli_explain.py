"""`headrace explain`: nothing is loaded, and an assumed GPU needs none."""

import json

import pytest

from headrace.cli.main import main


def test_text(config_only, capsys) -> None:
    assert main(["explain", config_only, "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    for word in ("Persona", "llama, 2 layers", "Hardware", "Plan", "Memory", "decided at start"):
        assert word in shown


@pytest.mark.parametrize(
    "name", ["h100", "h200", "a100-40gb", "a100-80gb", "l4", "l40s", "rtx4090", "b200", "mi300x"]
)
def test_assumed_gpus_need_none(config_only, capsys, name: str) -> None:
    arguments = ["explain", config_only, "--load-format", "dummy", "--assume-gpu", name, "--json"]
    assert main(arguments) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["hardware"]["assumed"]
    assert data["hardware"]["name"].startswith(name)
    assert data["asked"]["load_format"] == "dummy"
    decisions = {entry["name"]: entry for entry in data["decisions"]}
    assert decisions["device"]["value"] == "cuda"
    assert decisions["max_model_len"]["value"] == 256
    assert data["memory"]["kv_tokens"] > 0


def test_a_plan_needs_no_weights_but_running_does(config_only, capsys) -> None:
    assert main(["explain", config_only, "--assume-gpu", "h100"]) == 0
    capsys.readouterr()
    assert main(["generate", config_only, "--prompt-ids", "1"]) == 2
    assert "holds no checkpoint" in capsys.readouterr().err


def test_a_shape_of_the_benchmarks_is_enough(capsys) -> None:
    assert main(["explain", "qwen3-8b", "--assume-gpu", "h100"]) == 0
    assert capsys.readouterr().out.startswith("qwen3-8b, headrace ")
    assert main(["explain", "qwen3-8b", "--assume-gpu", "h100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["asked"]["model"] == "qwen3-8b"


def test_asks_show_as_asked(config_only, capsys) -> None:
    flags = ["--load-format", "dummy", "--device", "cpu", "--page-size", "8", "--json"]
    assert main(["explain", config_only, *flags]) == 0
    decisions = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)["decisions"]}
    assert decisions["page_size"]["asked"]
    assert not decisions["overlap"]["asked"]
    assert decisions["overlap"]["refused"]
