"""`headrace generate`."""

import io
import json
import math
from pathlib import Path

import pytest

from headrace.cli.main import main


def test_one_prompt_streams(fake, capsys) -> None:
    assert main(["generate", "m", "-p", "Say"]) == 0
    assert capsys.readouterr().out == "Hello there\n"
    [(kind, prompt, params)] = fake.calls
    assert (kind, prompt) == ("stream", "Say")
    assert (params.temperature, params.top_k) == (0.5, 7)  # the model's defaults
    assert fake.closed


def test_flags_go_over_the_models_defaults(fake) -> None:
    assert main(["generate", "m", "-p", "x", "--temperature", "0", "--max-tokens", "3"]) == 0
    params = fake.calls[0][2]
    assert (params.temperature, params.top_k, params.max_tokens) == (0.0, 7, 3)


def test_chat_template(fake) -> None:
    main(["generate", "m", "--chat", "-p", "Hi"])
    main(["generate", "m", "--chat", "-p", "Hi", "--json"])
    message = [{"role": "user", "content": "Hi"}]
    assert [(kind, prompt) for kind, prompt, _ in fake.calls] == [
        ("stream_chat", message),
        ("chat", [message]),
    ]


def test_prompts_of_a_file_run_as_a_batch(fake, tmp_path: Path, capsys) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\n")
    assert main(["generate", "m", "-f", str(file)]) == 0
    assert fake.calls[0][:2] == ("generate", ["one", "two"])
    assert capsys.readouterr().out.count("Hello there") == 2


def test_standard_input_is_one_prompt(fake, type_in) -> None:
    type_in("first line\nsecond line\n")
    assert main(["generate", "m"]) == 0
    assert fake.calls[0][1] == "first line\nsecond line"


def test_token_ids(fake) -> None:
    assert main(["generate", "m", "--prompt-ids", "1,2,3"]) == 0
    assert fake.calls[0][1] == (1, 2, 3)
    assert main(["generate", "m", "--prompt-ids", "1,2,3", "--chat"]) == 2


def test_several_outputs_do_not_stream(fake, capsys) -> None:
    assert main(["generate", "m", "-p", "x", "--n", "2"]) == 0
    assert fake.calls[0][0] == "generate"
    shown = capsys.readouterr().out
    assert "--- prompt 0, output 0 (stop)" in shown
    assert "--- prompt 0, output 1 (stop)" in shown


def test_json_has_everything(fake, capsys) -> None:
    fake.logprob = -math.inf
    assert main(["generate", "m", "-p", "x", "-p", "é", "--n", "2", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["prompt_index"], line["index"]) for line in lines] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert lines[2]["prompt"] == "é"
    assert lines[0]["token_ids"] == [5, 6]
    assert lines[0]["logprobs"][0] == [
        {"token_id": 5, "token": "Hello", "logprob": -9999.0, "rank": 1}
    ]
    assert lines[0]["prompt_logprobs"][0] is None
    assert lines[0]["paths"] == [["eager", 2]]
    assert lines[0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "flags",
    [
        ("--logprobs", "0"),
        ("--prompt-logprobs", "1"),
        ("--logprobs-mode", "processed"),
        ("--logprob-token-ids", "1,2"),
        ("--return-hidden-states", "all"),
        ("--return-routed-experts",),
    ],
)
def test_what_text_cannot_show_needs_json(fake, capsys, flags) -> None:
    assert main(["generate", "m", "-p", "x", *flags]) == 2
    assert f"{flags[0]} needs --json" in capsys.readouterr().err
    assert not fake.calls
    assert main(["generate", "m", "-p", "x", *flags, "--json"]) == 0


@pytest.mark.parametrize("flags", [(), ("--json",), ("--n", "2")])
def test_a_failed_output_exits_1(fake, capsys, flags) -> None:
    fake.ending, fake.message = "error", "not a number"
    assert main(["generate", "m", "-p", "x", *flags]) == 1
    shown = capsys.readouterr()
    assert "not a number" in shown.out + shown.err


def test_statistics(fake, capsys) -> None:
    assert main(["generate", "m", "-p", "x", "--stats"]) == 0
    shown = capsys.readouterr().err
    assert shown.startswith("2 tokens in")
    assert "tokens/s" in shown
    assert "first token after" in shown
    assert shown.splitlines()[0].endswith("paths: eager x 6")
    assert shown.splitlines()[1:] == [
        "eager x 3, not decode_graph: not built",
        "kv canary: violations 0",
        "numeric canary: compared 6, left out 0",
    ]


def test_ctrl_c_still_shows_statistics(fake, capsys) -> None:
    def interrupt(index: int) -> None:
        if index == 1:
            raise KeyboardInterrupt

    fake.on_piece = interrupt
    assert main(["generate", "m", "-p", "x", "--stats"]) == 130
    shown = capsys.readouterr()
    assert shown.out == "Hello"
    assert "1 tokens in" in shown.err
    assert "paths: eager x 6" in shown.err
    assert "interrupted" in shown.err


def test_ctrl_c_in_a_batch_counts_no_tokens(fake, capsys, monkeypatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fake, "generate", interrupt)
    assert main(["generate", "m", "-p", "x", "--json", "--stats"]) == 130
    shown = capsys.readouterr().err
    assert "no output after" in shown
    assert "paths: eager x 6" in shown


@pytest.mark.parametrize(
    ("flags", "text", "part"),
    [
        (("-f", "/no/such/file"), "", "cannot be read"),
        (("-f", "FILE"), "\n", "is empty"),
        (("-f", "FILE", "-p", "x"), "a\n", "on the command line and in a file"),
        ((), "", "standard input is empty"),
    ],
)
def test_no_prompt_is_an_error(fake, type_in, tmp_path, capsys, flags, text, part) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(text)
    type_in(text)
    flags = [str(file) if flag == "FILE" else flag for flag in flags]
    assert main(["generate", "m", *flags]) == 2
    assert part in capsys.readouterr().err
    assert not fake.calls


def test_a_real_engine_with_dummy_weights(config_only, capsys) -> None:
    arguments = ["generate", config_only, "--load-format", "dummy", "--device", "cpu"]
    arguments += ["--prompt-ids", "5,6,7", "--temperature", "0", "--max-tokens", "4"]
    assert main([*arguments, "--ignore-eos", "--json", "--logprobs", "2", "--stats"]) == 0
    shown = capsys.readouterr()
    line = json.loads(shown.out)
    assert len(line["token_ids"]) == 4
    assert line["prompt_token_ids"] == [5, 6, 7]
    assert all(len(entry) >= 2 for entry in line["logprobs"])
    first = shown.err.splitlines()[0]
    assert first.startswith(f"{config_only} on cpu")
    assert "float32, context 256, KV tokens " in first
    assert "eager x 4" in shown.err


def test_hidden_states_in_json(config_only, capsys) -> None:
    arguments = ["generate", config_only, "--load-format", "dummy", "--device", "cpu", "--json"]
    arguments += ["--prompt-ids", "5,6,7", "--max-tokens", "3", "--ignore-eos"]
    arguments += ["--return-hidden-states", "all", "--sampling-hidden-state-layers=0,-1"]
    assert main(arguments) == 0
    told = json.loads(capsys.readouterr().out)["hidden_states"]
    assert told["first_position"] == 0
    assert told["layers"][0] == 0
    assert [len(row) for row in told["states"]] == [2] * 5
    assert isinstance(told["states"][4][1][0], float)
    assert main([*arguments[:-3], "--return-hidden-states", "none"]) == 0
    assert json.loads(capsys.readouterr().out)["hidden_states"] is None


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_output_that_takes_ascii_only(fake, monkeypatch, flags) -> None:
    monkeypatch.setattr(fake, "words", ("Grüße ", "日本"))
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    assert main(["generate", "m", "-p", "größer", *flags]) == 0
    shown = out.buffer.getvalue().decode("ascii")
    if flags:
        assert json.loads(shown)["prompt"] == "größer"
    else:
        assert "Gr??e ??" in shown


def test_closed_standard_input(fake, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert main(["generate", "m"]) == 2
    assert "No prompt given" in capsys.readouterr().err
    assert main(["chat", "m"]) == 2
    assert "Standard input is closed" in capsys.readouterr().err


def test_standard_input_that_is_not_utf8(fake, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"gr\xf6"), encoding="utf-8"))
    assert main(["generate", "m"]) == 2
    assert "Standard input cannot be read" in capsys.readouterr().err


def test_only_a_newline_ends_a_prompt_of_a_file(fake, tmp_path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffone\u2028two\x0cthree\r\n\r\nfour\rfive\n".encode())
    assert main(["generate", "m", "-f", str(file)]) == 0
    assert fake.calls[0][1] == ["one\u2028two\x0cthree", "four\rfive"]


@pytest.mark.parametrize(("words", "told"), [(("", ""), True), (("", "a"), False)])
def test_tokens_without_text_are_told(fake, capsys, words, told: bool) -> None:
    fake.words = list(words)
    assert main(["generate", "m", "--prompt-ids", "1,2"]) == 0
    assert ("no text in 2 tokens; --json shows their ids" in capsys.readouterr().err) is told
