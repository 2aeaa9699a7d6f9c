"""`headrace chat`."""

import signal

import pytest

from headrace.base.errors import RequestError, TooLongError
from headrace.cli.main import main


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
    assert f"unknown: {flag} 2 (see headrace chat --help)" in capsys.readouterr().err
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


def test_a_model_without_chat_template_is_refused(fake, type_in, capsys) -> None:
    fake.has_chat_template = False
    type_in("one\n")
    assert main(["chat", "m"]) == 2
    shown = capsys.readouterr().err
    assert "no chat template" in shown
    assert "headrace generate" in shown
    assert not fake.calls
