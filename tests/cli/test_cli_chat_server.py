"""`headrace chat --url URL`"""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from fake_openai import Behaviour, FakeOpenAI

from headrace.base import env
from headrace.cli.chat_server import ChatServer, _pieces, request_fields
from headrace.cli.main import main
from headrace.cli.sampling_flags import structured_output


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEADRACE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def messages(server: FakeOpenAI, number: int) -> list[tuple[str, str]]:
    sent = server.generations[number].body["messages"]
    return [(message["role"], message["content"]) for message in sent]


def chat(server: FakeOpenAI, *flags: str) -> list[str]:
    return ["chat", "--url", server.url, "--max-tokens", "3", *flags]


def test_a_conversation(type_in, capsys) -> None:
    type_in("one\n/system Be kind\ntwo\n/reset\nthree\n/quit\nfour\n")
    with FakeOpenAI() as server:
        assert main(chat(server, "--temperature", "0", "--system", "Be terse")) == 0
    shown = capsys.readouterr()
    assert shown.out == "éé.\n" * 3
    assert f"fake at {server.url}" in shown.err
    assert shown.err.count("(cut at the length limit)") == 3
    assert messages(server, 0) == [("system", "Be terse"), ("user", "one")]
    assert messages(server, 1) == [
        ("system", "Be kind"),
        ("user", "one"),
        ("assistant", "éé."),
        ("user", "two"),
    ]
    assert messages(server, 2) == [("system", "Be kind"), ("user", "three")]
    assert len(server.generations) == 3
    body = server.generations[0].body
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("fake", 3, 0.0)
    assert "authorization" not in server.generations[0].headers


def test_thoughts_are_shown_apart(type_in, capsys) -> None:
    type_in("one\ntwo\n")
    with FakeOpenAI(lambda number: Behaviour(reasoning=2)) as server:
        assert main(chat(server)) == 0
    shown = capsys.readouterr()
    assert shown.out == ".\n.\n"
    assert "éé\n" in shown.err
    assert messages(server, 1)[1] == ("assistant", ".")


@pytest.mark.parametrize(
    ("variables", "flags", "key"),
    [
        ({"OPENAI_API_KEY": "b"}, [], "b"),
        ({"OPENAI_API_KEY": "b", "HEADRACE_API_KEY": "a"}, [], "a"),
        ({"HEADRACE_API_KEY": "a"}, ["--api-key", "c"], "c"),
    ],
)
def test_model_and_key(type_in, monkeypatch, variables, flags, key) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    type_in("one\n")
    with FakeOpenAI() as server:
        assert main(chat(server, "--model", "other", *flags)) == 0
    assert server.generations[0].headers["authorization"] == f"Bearer {key}"
    assert server.generations[0].body["model"] == "other"


def refusal(status: int, message: str, code: str | None = None) -> Behaviour:
    return Behaviour(status=status, body=json.dumps({"error": {"message": message, "code": code}}))


def test_errors_take_a_line_and_the_conversation_goes_on(type_in, capsys) -> None:
    answers = {
        0: refusal(400, "bad\nmessage"),
        1: refusal(503, "the queue is full"),
        2: Behaviour(status=502, body="<html>"),
        4: refusal(400, "9 tokens are too many", "context_length_exceeded"),
    }
    type_in("a\nb\nc\nd\ne\nf\n")
    with FakeOpenAI(lambda number: answers.get(number, Behaviour())) as server:
        assert main(chat(server)) == 0
    shown = capsys.readouterr()
    assert shown.out == "éé.\n" * 2
    assert "headrace: error: The server answers 400. Bad message." in shown.err
    assert "headrace: error: The server answers 503. The queue is full." in shown.err
    assert "headrace: error: The server answers 502. <html>." in shown.err
    assert "(the conversation is full: /clear forgets it" in shown.err
    assert messages(server, 5) == [("user", "d"), ("assistant", "éé."), ("user", "f")]


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (Behaviour(error_after=1), "headrace: error: a step failed"),
        (Behaviour(cut_after=1), "headrace: error: The server cut the answer."),
        (Behaviour(abort_after=1), "(ended by the server)"),
    ],
)
def test_an_answer_that_breaks_off(type_in, capsys, behaviour, message) -> None:
    type_in("one\ntwo\n")
    with FakeOpenAI(lambda number: Behaviour() if number else behaviour) as server:
        assert main(chat(server)) == 0
    shown = capsys.readouterr()
    assert shown.out == "é\néé.\n"
    assert message in shown.err


def test_a_socket_that_breaks(monkeypatch) -> None:
    def lines() -> Iterator[bytes]:
        yield b'data: {"choices": [{"delta": {"content": "a"}}]}\n'
        raise ConnectionResetError("reset")

    with FakeOpenAI() as server:
        speaker = ChatServer(server.url, api_key="", model="m", fields={})
    monkeypatch.setattr(speaker, "_open", lambda path, body: nullcontext(lines()))
    said = list(speaker.answer([]))
    assert [piece.text for piece in said] == ["a", ""]
    assert said[1].finish_reason == "error"
    assert "The connection was lost" in said[1].message


@pytest.mark.parametrize("payload", ["{", "[]", '{"choices": [3]}'])
def test_what_is_no_chunk(payload: str) -> None:
    (said,) = _pieces([f"data: {payload}\n".encode()])
    assert (said.finish_reason, said.message) == ("error", "The server sent what is no chat chunk.")


def test_nobody_listens(capsys) -> None:
    with FakeOpenAI() as server:
        url = server.url
    assert main(["chat", "--url", url]) == 2
    assert f"headrace: error: {url} cannot be reached." in capsys.readouterr().err


def test_a_server_that_goes_away(type_in, capsys) -> None:
    type_in("one\n")
    with FakeOpenAI() as server:
        url = server.url
    assert main(["chat", "--url", url, "--model", "m"]) == 0
    assert "cannot be reached" in capsys.readouterr().err


def test_ctrl_c_stops_an_answer_that_is_silent(capsys, monkeypatch) -> None:
    """No piece need come for it: the prompt may be long."""

    def press() -> None:
        while not server.generations:
            time.sleep(0.01)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    before = signal.getsignal(signal.SIGINT)
    slow = Behaviour(first=20.0)
    with FakeOpenAI(lambda number: Behaviour() if number else slow) as server:
        thread = threading.Thread(target=press)
        thread.start()
        began = time.monotonic()
        assert main(chat(server)) == 0
        assert time.monotonic() - began < 10.0
        thread.join()
    shown = capsys.readouterr()
    assert "(stopped)" in shown.err
    assert shown.out == "\néé.\n"
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "needs a MODEL, or the --url of a server"),
        (["m", "--model", "x"], "--model and --api-key belong to --url"),
        (["m", "--url", "http://h"], "--url goes without m"),
        (["--url", "http://h", "--dtype", "float32"], "--url goes without --dtype"),
        (["--url", "ftp://h"], "--url is 'ftp://h'"),
        (["--url", "http://"], "--url is 'http://'"),
    ],
)
def test_what_does_not_go_together(capsys, flags: list[str], message: str) -> None:
    assert main(["chat", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ("json_object", {"response_format": {"type": "json_object"}}),
        (
            'json_schema={"type": "object"}',
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": {"type": "object"}},
                }
            },
        ),
        ("regex=a+", {"structured_outputs": {"regex": "a+"}}),
        ("choice=a|b", {"structured_outputs": {"choice": ["a", "b"]}}),
    ],
)
def test_sampling_fields_of_a_request(form: str, field: dict[str, Any]) -> None:
    given = {"structured": structured_output(form), "logit_bias": {5: 1.0}, "top_k": 3}
    assert request_fields(given) == {"logit_bias": {"5": 1.0}, "top_k": 3, **field}


def test_no_torch_is_imported() -> None:
    script = (
        "import sys\nfrom headrace.cli.main import main\n"
        "main(['chat', '--url', sys.argv[1]])\nprint('torch' in sys.modules)"
    )
    with FakeOpenAI() as server:
        answer = subprocess.run(
            [sys.executable, "-c", script, server.url],
            input="one\n",
            capture_output=True,
            text=True,
            env=env.child_environment({}),
        )
    assert answer.stdout.splitlines()[-1] == "False", answer.stderr
