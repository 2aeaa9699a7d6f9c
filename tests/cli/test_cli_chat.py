"""`headrace chat`."""

import signal
from pathlib import Path

import pytest

from headrace.base.errors import ConfigError, RequestError, TooLongError
from headrace.cli.main import main
from headrace.testing.tiny_models import write_tiny_model


def roles(messages: list[dict[str, str]]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


def test_turns_are_remembered(fake, type_in, capsys) -> None:
    type_in("one\n\ntwo\n")
    assert main(["chat", "m"]) == 0
    assert capsys.readouterr().out == "Hello there\nHello there\n"
    assert [roles(messages) for _, messages, _ in fake.calls] == [
        [("user", "one")],
        [("user", "one"), ("assistant", "Hello there"), ("user", "two")],
    ]
    assert fake.closed


def test_commands(fake, type_in, capsys) -> None:
    type_in("/system Be kind\none\n/clear\n/nonsense\ntwo\n/system\n/exit\nthree\n")
    assert main(["chat", "m", "--system", "Be terse"]) == 0
    assert [roles(messages) for _, messages, _ in fake.calls] == [
        [("system", "Be kind"), ("user", "one")],
        [("system", "Be kind"), ("user", "two")],
    ]
    shown = capsys.readouterr().err
    assert "(forgotten)" in shown
    assert "unknown command /nonsense" in shown
    assert shown.count("(system: Be kind)") == 2


def test_system_flag_and_sampling(fake, type_in) -> None:
    type_in("one\n")
    assert main(["chat", "m", "--system", "Be terse", "--temperature", "0"]) == 0
    _, messages, params = fake.calls[0]
    assert roles(messages)[0] == ("system", "Be terse")
    assert (params.temperature, params.top_k) == (0.0, 7)


def test_ctrl_c_stops_the_answer_and_not_the_program(fake, type_in, capsys) -> None:
    before = signal.getsignal(signal.SIGINT)
    fake.words = ["one", " two", " three"]
    fake.on_piece = lambda index: index == 1 and signal.raise_signal(signal.SIGINT)
    type_in("first\nsecond\n")
    assert main(["chat", "m"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "one two\none two\n"
    assert shown.err.count("(stopped)") == 2
    assert fake.aborted
    assert roles(fake.calls[1][1])[1] == ("assistant", "one two")
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_twice_stops_the_program(fake, type_in) -> None:
    def twice(_index: int) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    fake.on_piece = twice
    type_in("first\nsecond\n")
    assert main(["chat", "m"]) == 130
    assert len(fake.calls) == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_a_refused_message_is_not_sent_again(fake, type_in, capsys) -> None:
    type_in("too long\n/clear\n")
    fake.error = RequestError("The prompt is too long")
    assert main(["chat", "m"]) == 0
    assert "headrace: error: The prompt is too long." in capsys.readouterr().err
    fake.error = None
    type_in("too long\nshort\n")

    def refuse_first(messages, params):
        fake.calls.append(("stream_chat", list(messages), params))
        if len(fake.calls) == 2:
            raise RequestError("The prompt is too long")
        return fake._pieces()

    fake.stream_chat = refuse_first
    assert main(["chat", "m"]) == 0
    assert roles(fake.calls[-1][1]) == [("user", "short")]


def test_a_full_conversation_says_so(fake, type_in, capsys) -> None:
    def answer(messages, params):
        fake.calls.append(("stream_chat", list(messages), params))
        if len(messages) > 1 or messages[0]["content"] == "endless":
            raise TooLongError("The prompt has 9 tokens", remedy="Shorten it")
        return fake._pieces()

    fake.stream_chat = answer
    type_in("endless\none\ntwo\n/clear\nthree\n")
    assert main(["chat", "m"]) == 0
    shown = capsys.readouterr()
    assert shown.err.count("The prompt has 9 tokens. Shorten it.") == 1
    assert shown.err.count("the conversation is full: /clear") == 1
    assert shown.out.count("Hello there") == 2


@pytest.mark.parametrize("flag", ["--n", "--logprobs", "--prompt-logprobs"])
def test_what_an_answer_cannot_show_is_not_offered(fake, capsys, flag: str) -> None:
    with pytest.raises(SystemExit):
        main(["chat", "m", flag, "2"])
    told = f"unknown: {flag} (headrace generate has it) 2 (see headrace chat --help)"
    assert told in capsys.readouterr().err
    assert not fake.calls


@pytest.mark.parametrize(
    ("ending", "message", "part"),
    [("length", "", "(cut at the length limit)"), ("error", "not a number", "not a number")],
)
def test_other_endings_are_told(fake, type_in, capsys, ending, message, part) -> None:
    fake.ending, fake.message = ending, message
    type_in("one\n")
    assert main(["chat", "m"]) == 0
    assert part in capsys.readouterr().err


@pytest.mark.parametrize("verb", [("chat",), ("generate", "--chat", "-p", "Hi")])
@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_a_base_model_is_refused_before_its_weights_are_read(
    verb, has_tokenizer, config_only, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr("headrace.llm.LLM.__init__", lambda *_, **__: pytest.fail("it was loaded"))
    model = str(write_tiny_model(tmp_path, "llama")) if has_tokenizer else config_only
    assert main([*verb, model]) == 2
    shown = capsys.readouterr().err
    assert f"{model} has no chat template" in shown
    assert f"headrace generate {model} -p TEXT" in shown


def test_a_base_model_may_be_given_a_chat_template(tmp_path, monkeypatch) -> None:
    model = write_tiny_model(tmp_path, "llama")
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}")
    loaded = []

    def load(self, model: str, *, chat_template: str, **_: object) -> None:
        loaded.append((model, chat_template))
        raise ConfigError("loaded")

    monkeypatch.setattr("headrace.llm.LLM.__init__", load)
    assert main(["chat", str(model), "--chat-template", str(file)]) == 2
    assert loaded == [(str(model), str(file))]


def test_a_hub_is_asked_once_for_a_model_with_a_chat_template(tmp_path, monkeypatch) -> None:
    model = write_tiny_model(tmp_path, "llama")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    asked, loaded = [], []

    def resolve(name: str, revision: str | None, *, weights: bool) -> Path:
        asked.append((name, revision))
        return model

    def load(self, model: str, **_: object) -> None:
        loaded.append(model)
        raise ConfigError("loaded")

    monkeypatch.setattr("headrace.checkpoint.names.resolve_hub_model", resolve)
    monkeypatch.setattr("headrace.llm.LLM.__init__", load)
    assert main(["chat", "owner/name", "--revision", "v1"]) == 2
    assert (asked, loaded) == ([("owner/name", "v1")], [str(model)])
