"""The command line as a whole: help, flags, errors."""

import argparse
import dataclasses
import errno
import os
import runpy
import subprocess
import sys
from itertools import pairwise

import pytest

from headrace.base.errors import CapacityError, HeadraceError
from headrace.cli import watch_flags
from headrace.cli.engine_flags import engine_config, engine_options
from headrace.cli.flags import given_fields
from headrace.cli.main import build_parser, main
from headrace.cli.sampling_flags import SAMPLING_HELP
from headrace.config.engine_config import EngineConfig
from headrace.engine.dumping import USUAL
from headrace.observers.dump_files import NAMES
from headrace.request.sampling_params import SamplingParams
from headrace.request.structured_output import StructuredOutput

VERBS = ("generate", "chat", "explain", "verify", "bench", "version")


def parse(*arguments: str) -> argparse.Namespace:
    return build_parser().parse_args(arguments)


def test_help_imports_no_torch_and_is_quick() -> None:
    code = (
        "import sys\n"
        "from headrace.cli.main import main\n"
        "try:\n    main(['--help'])\n"
        "finally:\n    print([name for name in ('torch', 'transformers', 'numpy') "
        "if name in sys.modules])\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    shown = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    child.stdout.close()
    assert all(verb in shown for verb in VERBS)
    assert shown.strip().endswith("[]")
    assert usage.ru_utime + usage.ru_stime < 1.0  # 0.1 is measured; torch alone takes 2


@pytest.mark.parametrize(
    "verb", [("generate",), ("chat",), ("explain",), ("verify",), ("bench", "offline")]
)
def test_every_engine_field_is_a_flag(verb, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(*verb, "--help")
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for field in dataclasses.fields(EngineConfig):
        if field.name != "model":
            assert f"--{field.name.replace('_', '-')}" in shown


def test_streams_that_are_closed_lead_nowhere() -> None:
    """As some daemons start their children: a socket would get the number of stderr."""
    code = (
        "import os, headrace.cli.main as cli; [os.close(n) for n in range(3)];"
        "cli.main([]); os._exit(sum(map(os.get_inheritable, range(3))))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 3


def test_names_of_dumped_tensors_are_those_of_the_dumper() -> None:
    assert set(watch_flags.NAMES) == set(NAMES)
    assert watch_flags.USUAL == USUAL


def test_every_sampling_field_has_a_flag_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(SAMPLING_HELP) == {field.name for field in dataclasses.fields(SamplingParams)}
    with pytest.raises(SystemExit):
        parse("generate", "--help")
    shown = capsys.readouterr().out
    for name in SAMPLING_HELP:
        flag = "--sampling-seed" if name == "seed" else f"--{name.replace('_', '-')}"
        assert flag in shown


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (("--max-model-len", "100"), "max_model_len", 100),
        (("--dtype=float32",), "dtype", "float32"),
        (("--mem-fraction", "0.5"), "mem_fraction", 0.5),
        (("--no-enable-prefix-cache",), "enable_prefix_cache", False),
        (("--enable-overlap",), "enable_overlap", True),
        (("--no-enable-overlap",), "enable_overlap", False),
        (("--deterministic",), "deterministic", True),
        (("--decode-graph", "1,2,4"), "decode_graph", (1, 2, 4)),
        (("--decode-graph", "off"), "decode_graph", "off"),
        (("--seed", "-3"), "seed", -3),
        (("--attention-backend", "triton"), "attention_backend", "triton"),
    ],
)
def test_engine_flags(flags, name: str, value: object) -> None:
    config = engine_config(parse("explain", "some/model", *flags))
    assert getattr(config, name) == value
    changed = [
        field.name
        for field in dataclasses.fields(EngineConfig)
        if getattr(config, field.name) != getattr(EngineConfig(model="some/model"), field.name)
    ]
    assert changed == [name]
    assert EngineConfig(model="some/model", **engine_options(config)) == config


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (("--max-tokens", "5"), "max_tokens", 5),
        (("--temperature", "0"), "temperature", 0.0),
        (("--stop", "a", "--stop", "b,c"), "stop", ["a", "b,c"]),
        (("--stop-token-ids", "1,2"), "stop_token_ids", (1, 2)),
        (("--allowed-token-ids", "7"), "allowed_token_ids", (7,)),
        (("--bad-words", "x"), "bad_words", ["x"]),
        (("--logit-bias", "5=-100,7=2.5"), "logit_bias", {5: -100.0, 7: 2.5}),
        (("--ignore-eos",), "ignore_eos", True),
        (("--no-skip-special-tokens",), "skip_special_tokens", False),
        (("--sampling-seed", "9"), "seed", 9),
        (("--logprobs", "3"), "logprobs", 3),
        (("--structured", "json_object"), "structured", StructuredOutput(json_object=True)),
        (("--structured", "regex=a=b"), "structured", StructuredOutput(regex="a=b")),
        (("--structured", "choice=a|b"), "structured", StructuredOutput(choice=["a", "b"])),
    ],
)
def test_sampling_flags(flags, name: str, value: object) -> None:
    parsed = parse("generate", "m", *flags)
    assert given_fields(parsed, SamplingParams) == {name: value}
    assert given_fields(parsed, EngineConfig) == {}


def test_both_seeds_stay_apart() -> None:
    parsed = parse("generate", "m", "--seed", "1", "--sampling-seed", "2")
    assert given_fields(parsed, EngineConfig) == {"seed": 1}
    assert given_fields(parsed, SamplingParams) == {"seed": 2}


@pytest.mark.parametrize(
    ("arguments", "program"),
    [
        (("explain",), "headrace explain"),
        (("bench",), "headrace bench"),
        (("nothing", "m"), "headrace"),
        (("explain", "m", "--page-size", "x"), "headrace explain"),
        (("explain", "m", "--decode-graph", "1,b"), "headrace explain"),
        (("generate", "m", "--logit-bias", "5"), "headrace generate"),
        (("explain", "m", "--no-such-flag"), "headrace explain"),
        (("explain", "m", "--page", "16"), "headrace explain"),
        (("bench", "offline", "m", "--num-prompts", "0"), "headrace bench offline"),
        (("bench", "offline", "m", "--load-seed", "-5"), "headrace bench offline"),
    ],
)
def test_bad_usage_is_one_line_and_exits_2(arguments, program: str, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith("headrace: error: ")
    assert shown.endswith(f"(see {program} --help)\n")
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    "verb",
    [
        *[(), ("serve",), ("generate",), ("chat",), ("explain",), ("verify",), ("diff",)],
        *[("version",), ("collect-env",), ("bench",)],
        *[("bench", kind) for kind in ("offline", "step", "startup", "serve", "ceilings", "plot")],
    ],
)
def test_help_is_grouped_and_fits_80_columns(verb, monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as caught:
        main([*verb, "--help"])
    assert caught.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if line.endswith(" ")]
    assert lines[0].startswith(" ".join(("usage: headrace", *verb)))
    assert lines[1] == "" or lines[2] == ""  # the usage is short
    headings = [place for place, line in enumerate(lines) if line.endswith(":")]
    assert max(b - a for a, b in pairwise([*headings, len(lines)])) < 60


def test_alone_it_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(verb in shown for verb in VERBS)


def test_help_shows_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, parts in (
        (
            ("generate",),
            (
                "sequences that name none (default: 0)",
                "(default: 1.0)",
                "later ones (default: on)",
                "last (of each) or all (default: none)",
                "return the experts of each token",
            ),
        ),
        (("bench", "step"), ("(default: 1,32,128,256)", "(default: 1024)")),
    ):
        with pytest.raises(SystemExit):
            parse(*arguments, "--help")
        shown = " ".join(capsys.readouterr().out.split())
        for part in parts:
            assert part in shown
        assert "(default: None)" not in shown


def test_underscores_are_taken_and_values_stay(config_only, capsys) -> None:
    asked = ["--load_format=dummy", "--page_size", "32", "--max-model-len", "64"]
    assert main(["explain", config_only, *asked, "--json"]) == 0
    assert '"page_size": 32' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("explain", "/no/such/model"), "not found"),
        (("explain", "m", "--page-size", "3"), "page_size is 3"),
        (("explain", "m", "--assume-gpu", "abacus"), "abacus"),
        (("generate", "m", "-p", "x", "--temperature", "-1"), "temperature is -1"),
        (("generate", "m", "-p", "x", "--device", "mps"), "not found"),
        (("chat", "m", "--top-p", "2"), "top_p is 2"),
        (("bench", "offline", "m", "--shared-prefix-len", "128"), "shared_prefix_len is 128"),
    ],
)
def test_errors_are_one_line_and_exit_2(arguments, part: str, capsys) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr().err.strip().splitlines()
    assert len(shown) == 1
    assert shown[0].startswith("headrace: error: ")
    assert part in shown[0]


def test_device_is_refused_by_name(config_only, capsys) -> None:
    assert main(["explain", config_only, "--load-format", "dummy", "--device", "mps"]) == 2
    assert "Device 'mps' is not supported" in capsys.readouterr().err


def test_debug_shows_where_an_error_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_LOG_LEVEL", "debug")
    with pytest.raises(HeadraceError):
        main(["explain", "/no/such/model"])


def test_errors_of_ours_are_not_dressed_up(fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(fake, "generate", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["generate", "m", "-p", "x", "--json"])


def test_errors_while_running_are_shown(fake, monkeypatch, capsys) -> None:
    def fail(*_: object, **__: object) -> None:
        raise CapacityError("Too little memory", remedy="Buy some")

    monkeypatch.setattr(fake, "generate", fail)
    assert main(["generate", "m", "-p", "x", "--json"]) == 2
    assert capsys.readouterr().err == "headrace: error: Too little memory. Buy some.\n"
    assert fake.closed


def test_ctrl_c_exits_130(fake, monkeypatch, capsys) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fake, "stream", interrupt)
    assert main(["generate", "m", "-p", "x"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_unknown_variables_are_warned_about(monkeypatch, capsys) -> None:
    monkeypatch.setenv("HEADRACE_CASH", "1")
    assert main(["version"]) == 0
    assert "HEADRACE_CASH" in capsys.readouterr().err
    monkeypatch.setenv("HEADRACE_LOG_LEVEL", "loud")
    assert main(["version"]) == 2
    assert "loud" in capsys.readouterr().err


def test_version(capsys) -> None:
    assert main(["version", "--json"]) == 0
    shown = capsys.readouterr().out
    assert '"headrace"' in shown
    assert '"torch"' in shown


def test_the_package_is_a_program(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["headrace", "nonsense"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("headrace", run_name="__main__")
    assert ended.value.code == 2
    assert "no verb 'nonsense'" in capsys.readouterr().err


def test_a_full_disk_is_told_in_one_line(monkeypatch, capsys) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert main(["version"]) == 2
        shown = capsys.readouterr().err
    assert shown.startswith("headrace: error: The output cannot be written. [Errno 28]")
    assert shown.count("\n") == 1


def test_a_disk_error_that_is_not_the_outputs_keeps_its_trace(fake, monkeypatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "a file")

    monkeypatch.setattr(fake, "generate", fail)
    with pytest.raises(OSError, match="a file"):
        main(["generate", "m", "-p", "x", "--json"])


def test_closed_output_is_no_error(monkeypatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    assert main(["version"]) == 0


@pytest.mark.parametrize("name", ["x" * 5000, "~no-such-user-x/y", "o/" + "n" * 300])
def test_a_name_no_model_can_have(name: str, capsys) -> None:
    assert main(["explain", name]) == 2
    shown = capsys.readouterr().err
    assert "not found" in shown
    assert shown.count("\n") == 1


def test_a_form_is_read_from_a_file(tmp_path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "integer"}')
    parsed = parse("generate", "m", "--structured", f"json_schema=@{schema}")
    form = StructuredOutput(json_schema={"type": "integer"})
    assert given_fields(parsed, SamplingParams) == {"structured": form}


@pytest.mark.parametrize("form", ["words=a", "regex=", "json_schema={", "grammar=@/no/such/file"])
def test_a_bad_form_is_told_in_a_line(form: str, capsys) -> None:
    with pytest.raises(SystemExit):
        parse("generate", "m", "--structured", form)
    error = capsys.readouterr().err.splitlines()[-1]
    assert "--structured" in error
    assert "Traceback" not in error
