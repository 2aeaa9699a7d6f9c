"""`headrace bench KIND` from end to end, on dummy weights."""

import json
import sys

import pytest

from headrace.base.errors import ConfigError
from headrace.bench import setting
from headrace.bench.ceilings import Ceilings
from headrace.bench.shapes import shape_path
from headrace.bench.startup import Start
from headrace.cli.engine_flags import engine_config
from headrace.cli.main import main


def test_offline(config_only, capsys) -> None:
    arguments = ["bench", "offline", config_only, "--load-format", "dummy", "--device", "cpu"]
    arguments += ["--num-prompts", "1,3", "--input-len", "6", "--output-len", "2", "--json"]
    arguments += ["--repeats", "2", "--shared-prefix-len", "4", "--first-token-len", "8"]
    assert main(arguments) == 0
    shown = capsys.readouterr()
    lines = [json.loads(line) for line in shown.out.splitlines()]
    assert [(line["what"], line["load"]["num_prompts"]) for line in lines] == [
        ("run", 1),
        ("run", 3),
        ("first token", 1),
        ("first token, cached", 1),
    ]
    for line in lines:
        assert line["engine"] == "headrace"
        assert len(line["seconds"]) == 2
        assert line["dtype"] == "float32"
        assert line["threads"] >= 1
    assert "medians of 2" in shown.err
    assert "tokens/s" in shown.err


def test_offline_names_the_flags_of_a_load_that_does_not_fit(config_only, capsys) -> None:
    arguments = ["bench", "offline", config_only, "--load-format", "dummy", "--device", "cpu"]
    assert main([*arguments, "--input-len", "512"]) == 2
    shown = capsys.readouterr().err
    assert "--input-len 512 and --output-len 128 together exceed the context of 256" in shown


def test_a_missing_peer_is_told_before_anything_loads(config_only, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr("headrace.cli.bench.start", lambda arguments: pytest.fail("loaded"))
    assert main(["bench", "offline", config_only, "--against", "transformers"]) == 2
    assert "scripts/setup_venv.sh bench" in capsys.readouterr().err


@pytest.fixture
def given_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of seconds of measuring."""
    given = Ceilings(bandwidth=1e10, matrix_rate=1e11, dtype="float32", how="given")
    monkeypatch.setattr(setting, "measure_ceilings", lambda device, dtype: given)


STEP = ["--device", "cpu", "--batch", "1", "--prefill", "2", "--context", "6", "--repeats", "1"]


@pytest.mark.usefixtures("given_ceilings")
def test_step(config_only, capsys) -> None:
    arguments = ["bench", "step", config_only, "--load-format", "dummy", *STEP]
    assert main([*arguments, "--output-len", "3", "--json"]) == 0
    shown = capsys.readouterr()
    decode, prefill = (json.loads(line) for line in shown.out.splitlines())
    assert (decode["kind"], decode["batch"], decode["paths"]) == ("decode", 1, {"eager": 32})
    assert (prefill["kind"], prefill["prompts"], prefill["length"]) == ("prefill", 2, 6)
    for line in (decode, prefill):
        assert (line["dtype"], line["ceilings"]["how"]) == ("float32", "given")
    assert "steady ms" in shown.err
    assert "ceilings: 10 GB/s, 100 GFLOP/s float32 (given)" in shown.err
    assert "decode steps of 1 x 6 tokens ...\nprefill of 2 x 6 tokens ...\n" in shown.err


@pytest.mark.parametrize(("batch", "prefills"), [("4", (1,)), ("1,32", (1, 32))])
@pytest.mark.usefixtures("given_ceilings")
def test_step_reads_no_more_prompts_at_once_than_a_batch_has(
    config_only, monkeypatch, batch: str, prefills: tuple[int, ...]
) -> None:
    asked = []

    def work(**options):
        asked.append(options["prefills"])
        raise ConfigError("enough")

    monkeypatch.setattr("headrace.bench.step.StepWork", work)
    arguments = ["bench", "step", config_only, "--load-format", "dummy", "--device", "cpu"]
    assert main([*arguments, "--batch", batch]) == 2
    assert asked == [prefills]


def test_step_refuses_the_prefix_cache_and_one_token(config_only, capsys) -> None:
    assert main(["bench", "step", config_only, "--enable-prefix-cache"]) == 2
    assert "without the prefix cache" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "step", config_only, "--output-len", "1"])
    assert "at least 2" in capsys.readouterr().err


@pytest.mark.usefixtures("given_ceilings")
def test_a_shape_by_its_name_where_no_text_is_made(capsys, monkeypatch) -> None:
    asked = []

    def start(arguments):
        asked.append(engine_config(arguments))
        raise ConfigError("enough")

    monkeypatch.setattr("headrace.cli.bench.start", start)
    for verb in ("step", "offline"):
        assert main(["bench", verb, "qwen3-8b", "--device", "cpu"]) == 2
        assert asked[-1].model == str(shape_path("qwen3-8b"))
        assert asked[-1].load_format == "dummy"
    assert asked[0].enable_prefix_cache is False
    assert main(["bench", "offline", "qwen3-8b", "--load-format", "safetensors"]) == 2
    assert asked[-1].load_format == "safetensors"
    capsys.readouterr()
    assert main(["generate", "qwen3-8b", "-p", "x"]) == 2
    assert "'qwen3-8b' not found" in capsys.readouterr().err


def test_startup(capsys, monkeypatch) -> None:
    asked = []

    def measure_starts(options, **how):
        asked.append((options, how))
        for cache in ("cold", "warm"):
            yield Start(
                model="qwen3-8b",
                cache=cache,
                hardware="GPU",
                dtype="bfloat16",
                first_token=9.0,
                phases={"import": 4.0},
                parts=(),
            )

    monkeypatch.setattr("headrace.bench.startup.measure_starts", measure_starts)
    arguments = ["bench", "startup", "qwen3-8b", "--device", "cpu", "--capture", "need"]
    assert main([*arguments, "--input-len", "4", "--no-graphs", "--json"]) == 0
    shown = capsys.readouterr()
    lines = [json.loads(line) for line in shown.out.splitlines()]
    assert [line["cache"] for line in lines] == ["cold", "warm"]
    assert "qwen3-8b, bfloat16, GPU, fresh processes" in shown.err
    ((options, how),) = asked
    assert how == {"input_len": 4, "repeats": 1, "graphs": False}
    assert (options["load_format"], options["device"]) == ("dummy", "cpu")
    assert options["model"] == str(shape_path("qwen3-8b"))


@pytest.mark.usefixtures("given_ceilings")
def test_ceilings(capsys) -> None:
    assert main(["bench", "ceilings", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "ceilings"
    assert main(["bench", "ceilings", "--device", "cpu", "--dtype", "int9"]) == 2
    assert "bfloat16" in capsys.readouterr().err


def test_plot_names_what_it_cannot_read(tmp_path, capsys) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text("{}\n")
    assert main(["bench", "plot", str(file), "-o", str(tmp_path / "out.png")]) == 2
    assert "no decode step to draw" in capsys.readouterr().err
