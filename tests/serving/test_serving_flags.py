"""`headrace serve`: flags, other engines' names, file and environment, help."""

import os
import subprocess
import sys

import pytest

from headrace.base.errors import ConfigError
from headrace.cli import serve as verb
from headrace.cli.flags import with_dashes
from headrace.cli.main import build_parser, main
from headrace.cli.other_flags import ALIASES, SWITCHES
from headrace.cli.serve_flags import (
    OPTIONS,
    serve_engine_config,
    server_config,
    with_settings,
)
from headrace.config.engine_config import EngineConfig
from headrace.serving.server_config import ServerConfig, names


@pytest.fixture(autouse=True)
def no_environment(monkeypatch) -> None:
    for name in OPTIONS:
        monkeypatch.delenv(f"HEADRACE_{name.upper()}", raising=False)


def parsed(*typed: str):
    arguments = build_parser().parse_args(["serve", *with_settings(with_dashes(typed))])
    return serve_engine_config(arguments), server_config(arguments)


def test_defaults() -> None:
    asked, config = parsed("tiny")
    assert asked.model == "tiny"
    assert config == ServerConfig()
    assert (config.host, config.port) == ("127.0.0.1", 30000)


@pytest.mark.parametrize(
    ("typed", "name", "value"),
    [
        (("--port", "8000"), "port", 8000),
        (("--host=0.0.0.0",), "host", "0.0.0.0"),
        (("--api_key", "k"), "api_key", "k"),
        (("--log-requests",), "log_requests", True),
        (("--enable-log-requests",), "log_requests", True),
        (("--disable-log-requests",), "log_requests", False),
        (("--no-check-model-name",), "check_model_name", False),
        (("--context-length", "64"), "max_model_len", 64),
        (("--max-num-seqs=8",), "max_running_requests", 8),
        (("--gpu-memory-utilization", "0.5"), "mem_fraction", 0.5),
        (("--mem-fraction-static", "0.5"), "mem_fraction", 0.5),
        (("--random-seed", "7"), "seed", 7),
        (("--tokenizer-path", "t"), "tokenizer", "t"),
        (("--disable-radix-cache",), "enable_prefix_cache", False),
        (("--no-enable-prefix-caching",), "enable_prefix_cache", False),
        (("--disable-overlap-schedule",), "enable_overlap", False),
        (("--enforce-eager",), "decode_graph", "off"),
        (("--disable-cuda-graph",), "prefill_graph", "off"),
        (("--hidden-state-layers", "1"), "hidden_state_layers", (1,)),
        (("--hidden-state-layers=0,-1",), "hidden_state_layers", (0, -1)),
        (("--decode-graph", "1,2"), "decode_graph", (1, 2)),
        (("--tp-size", "1"), "seed", 0),
        (("--enable-metrics",), "seed", 0),
        (("--enable-auto-tool-choice",), "tool_call_parser", "auto"),
        (("--tool-call-parser", "hermes"), "tool_call_parser", "hermes"),
        (("--reasoning-parser=none",), "reasoning_parser", "none"),
        (("--stream-tool-arguments",), "stream_tool_arguments", True),
    ],
)
def test_flags_and_the_names_of_others(typed, name, value) -> None:
    for given in (("tiny", *typed), (*typed, "tiny"), ("--model", "tiny", *typed)):
        asked, config = parsed(*given)
        assert asked.model == "tiny"
        found = [getattr(each, name) for each in (asked, config) if hasattr(each, name)]
        assert found == [value]


def test_every_other_name_leads_to_a_flag_of_ours(capsys) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--help"])
    shown = capsys.readouterr().out
    targets = set(ALIASES.values())
    targets |= {flag for flags in SWITCHES.values() for flag in flags if flag.startswith("--")}
    for flag in targets:
        assert flag in shown


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (("--tp-size", "2"), "--tp-size is 2"),
        (("--tensor-parallel-size=4",), "one device"),
        (("--dp-size=2",), "one device"),
        (("--tp-size",), "needs a value"),
        (("--enforce-eager=1",), "takes no value"),
        (("--config",), "needs a file"),
        (("--config", "/nosuch/file.yaml"), "cannot be read"),
    ],
)
def test_what_cannot_be_is_told(typed, told, capsys) -> None:
    with pytest.raises(ConfigError, match=told):
        parsed("tiny", *typed)
    assert main(["serve", "tiny", *typed]) == 2
    assert told in capsys.readouterr().err


def test_file_environment_and_flags_in_this_order(tmp_path, monkeypatch) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: from-file\nport: 1111\nhost: 0.0.0.0\ncontext_length: 99\nlog-requests: true\n"
        "decode_graph: off\nenable_prefix_cache: false\nseed:\n"
    )
    asked, config = parsed("--config", str(file))
    assert (asked.model, asked.max_model_len, asked.decode_graph) == ("from-file", 99, "off")
    assert (config.port, config.host, config.log_requests) == (1111, "0.0.0.0", True)
    assert asked.enable_prefix_cache is False
    monkeypatch.setenv("HEADRACE_PORT", "2222")
    monkeypatch.setenv("HEADRACE_MODEL", "from-environment")
    monkeypatch.setenv("HEADRACE_LOG_REQUESTS", "off")
    asked, config = parsed("--config", str(file))
    assert (asked.model, config.port, config.log_requests) == ("from-environment", 2222, False)
    asked, config = parsed(f"--config={file}", "--port", "3333", "typed")
    assert (asked.model, config.port, config.host) == ("typed", 3333, "0.0.0.0")


def test_a_file_in_the_names_of_others(tmp_path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model-path: m\ngpu-memory-utilization: 0.8\nenforce-eager: true\ntensor-parallel-size: 1\n"
        "enable-chunked-prefill: true\ndisable-overlap-schedule: false\ntask:\n"
        "served-model-name: [a, b]\nenable-log-requests: true\n"
    )
    asked, config = parsed("--config", str(file))
    assert asked == EngineConfig(
        model="m", mem_fraction=0.8, decode_graph="off", prefill_graph="off"
    )
    assert config == ServerConfig(served_model_name="a,b", log_requests=True)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tp-size: 2", "--tp-size is 2. This version runs on one device"),
        ("enforce-eager: 2", "enforce_eager is 2. Allowed: 1, true, on"),
        ("no_such: 1\nport: 1", r"unknown options: no_such\."),
        ("page_sise: 1", r"unknown options: page_sise \(did you mean --page-size\?\)\."),
        ("quantization: fp8", "unknown options: quantization .weights are taken as"),
        ("port: x", r"^port in .*serve\.yaml: 'x' is not a whole number"),
        ("[1]", "no options"),
        ("a: [", "read"),
    ],
)
def test_a_file_that_is_wrong(tmp_path, text, told) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=told):
        parsed("tiny", "--config", str(file))


def test_a_switch_in_the_environment_that_is_neither(monkeypatch) -> None:
    monkeypatch.setenv("HEADRACE_LOG_REQUESTS", "perhaps")
    with pytest.raises(ConfigError, match="log_requests is 'perhaps'"):
        parsed("tiny")


def test_a_variable_that_cannot_be_read_is_named(monkeypatch) -> None:
    monkeypatch.setenv("HEADRACE_PORT", "x")
    with pytest.raises(ConfigError, match=r"^HEADRACE_PORT: 'x' is not a whole number"):
        parsed("tiny")


def test_a_variable_that_means_nothing_is_warned_about(monkeypatch, capsys) -> None:
    monkeypatch.setenv("HEADRACE_PRT", "1")
    monkeypatch.setenv("HEADRACE_PORT", "1")
    main(["version"])
    warned = capsys.readouterr().err
    assert "HEADRACE_PRT means nothing" in warned
    assert "HEADRACE_PORT means" not in warned


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"port": -1}, "port is -1"),
        ({"port": 65536}, "port is 65536"),
        ({"max_body_bytes": 5}, "max_body_bytes is 5"),
        ({"log_level": "loud"}, "log_level is 'loud'"),
        ({"on_engine_death": "mourn"}, "on_engine_death"),
        ({"ssl_certfile": "a"}, "ssl_keyfile is not given"),
        ({"ssl_keyfile": "a"}, "ssl_certfile is not given"),
        ({"cors_origins": '["*"]'}, r"cors_origins holds '\["),
        ({"cors_origins": "https://a.test, b.test"}, "cors_origins holds 'b.test'"),
        ({"api_key": "same", "admin_api_key": "same"}, "same as api_key"),
        ({"api_key": " "}, "api_key"),
    ],
)
def test_options_out_of_range(options, told) -> None:
    with pytest.raises(ConfigError, match=told):
        ServerConfig(**options)


def test_names() -> None:
    assert names("a, b/c,,d ") == ("a", "b/c", "d")
    assert names(None) == ()


@pytest.mark.parametrize(
    ("word", "flags", "others"),
    [
        ("graph", ("--decode-graph", "--prefill-graph"), ("--port", "--api-key")),
        ("context-length", ("--max-model-len",), ("--port",)),
        ("body", ("--max-body-bytes",), ("--seed",)),
        ("YAML", ("--config",), ("--seed",)),
    ],
)
def test_help_can_be_searched(word, flags, others, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--help", word])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(flag in shown for flag in flags)
    assert not any(flag in shown for flag in others)


def test_a_search_that_finds_nothing(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--help", "zzzz"])
    assert ended.value.code == 2
    assert "'zzzz'" in capsys.readouterr().err


def test_help_is_quick_and_imports_neither_torch_nor_fastapi() -> None:
    code = (
        "import sys\nfrom headrace.cli.main import main\n"
        "try:\n    main(['serve', '--help'])\nfinally:\n"
        "    print([n for n in ('torch', 'fastapi', 'pydantic', 'uvicorn') if n in sys.modules])\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    shown = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    child.stdout.close()
    assert shown.strip().endswith("[]")
    assert usage.ru_utime + usage.ru_stime < 1.0  # 0.1 is measured; torch alone takes 2


def test_without_a_model(capsys) -> None:
    assert main(["serve"]) == 2
    assert "No model is named" in capsys.readouterr().err


def test_without_the_packages_it_says_which_command_installs_them(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "headrace.serving.launch", raising=False)
    assert main(["serve", "tiny", "--port", "0"]) == 2
    assert verb.INSTALL in capsys.readouterr().err
