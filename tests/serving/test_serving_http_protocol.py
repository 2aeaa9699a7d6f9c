"""What comes over a socket before it is a request."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn

from headrace.serving import body_limits, http_protocol
from headrace.serving.app import make_app
from headrace.serving.http_protocol import MOST_HEAD_BYTES, BoundedHttp
from headrace.serving.service import Service

POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n"
END = b"connection: close\r\n\r\n"


@pytest.fixture
def hear(make_service: Callable[..., Service]) -> Callable[..., bytes]:
    """Send bytes to a server and read until it hangs up. `then` is sent when the answer has begun;
    b"": leave at that moment."""

    async def talk(parts: tuple[bytes, ...], then: bytes | None) -> bytes:
        config = uvicorn.Config(
            make_app(make_service()), http=BoundedHttp, port=0, log_config=None, lifespan="off"
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            for part in parts:
                writer.write(part)
                await asyncio.sleep(0.01)
            if then is None:
                return await asyncio.wait_for(reader.read(), 10)
            begun = await asyncio.wait_for(reader.read(100), 10)
            writer.write(then)
            return begun + (await asyncio.wait_for(reader.read(), 10) if then else b"")
        finally:
            writer.close()
            server.should_exit = True
            await serving

    return lambda *parts, then=None: asyncio.run(talk(parts, then))


@pytest.fixture
def say(hear: Callable[..., bytes]) -> Callable[..., tuple[int, Any]]:
    """The same; (status, body) of the last answer."""

    def last_of(*parts: bytes) -> tuple[int, Any]:
        *_, last = hear(*parts).split(b"HTTP/1.1 ")
        return int(last[:3]), json.loads(last.partition(b"\r\n\r\n")[2])

    return last_of


def test_requests_on_one_connection_are_counted_each(say) -> None:
    padding = b"x: " + b"a" * (MOST_HEAD_BYTES // 2) + b"\r\n"
    body = b'{"prompt": "a"}'
    first = POST + padding + b"content-length: %d\r\n\r\n" % len(body) + body
    assert say(*[first] * 5, HEALTH + padding + END) == (200, {"status": "ok"})


@pytest.mark.parametrize("ends", [True, False])
def test_a_head_without_end_is_refused(say, ends: bool) -> None:
    header = b"x: " + b"a" * (MOST_HEAD_BYTES // 4) + b"\r\n"
    status, body = say(HEALTH + header * 5 + END if ends else HEALTH + header * 5)
    assert (status, body["error"]["code"]) == (431, "head_too_large")


def test_a_body_in_the_same_packet_is_no_head(say) -> None:
    body = b'{"prompt": [' + b"5," * MOST_HEAD_BYTES + b"5]}"
    status, told = say(POST + b"content-length: %d\r\n" % len(body) + END + body)
    assert (status, told["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("junk", [b"\x16\x03\x01\r\n\r\n", POST + b"content-length: -5\r\n\r\n"])
def test_what_is_no_request_gets_the_one_shape_of_errors(say, junk: bytes) -> None:
    status, body = say(junk)
    assert (status, body["error"]["code"]) == (400, "invalid_http")
    assert set(body["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("parts", [(), (HEALTH,), (HEALTH + b"\r\n", HEALTH)])
def test_a_head_that_does_not_come_is_not_awaited_for_ever(say, monkeypatch, parts) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.2)
    status, body = say(*parts)
    assert (status, body["error"]["code"]) == (408, "too_slow")


def test_nor_is_a_body(say, monkeypatch) -> None:
    monkeypatch.setattr(body_limits, "BODY_SECONDS", 0.2)
    status, body = say(POST + b"content-length: 500\r\n\r\n", b'{"prompt"')
    assert (status, body["error"]["code"]) == (408, "too_slow")


@pytest.mark.parametrize("asked", [b"h2c", b"websocket"])
def test_who_asks_for_another_protocol_is_answered_in_this_one(say, asked: bytes) -> None:
    """Java's client asks for HTTP/2 with its first request, whose body is to be read."""
    body = b'{"prompt": "a", "max_tokens": 0, "echo": true}'
    head = POST + b"Connection: Upgrade\r\nUpgrade: " + asked + b"\r\n"
    status, told = say(head + b"content-length: %d\r\n\r\n" % len(body) + body, HEALTH + END)
    assert (status, told) == (200, {"status": "ok"})
    status, told = say(head + b"content-length: 5\r\n\r\n" + b"[1,2]" + HEALTH + END)
    assert (status, told) == (200, {"status": "ok"})
    status, told = say(
        head.replace(b"Connection:", b"connection: close,")
        + b"content-length: %d\r\n\r\n" % len(body)
        + body
    )
    assert (status, told["choices"][0]["text"]) == (200, "a")


def test_a_client_of_the_old_protocol_gets_no_chunks(hear, say) -> None:
    """It would take their lengths for parts of the stream."""
    body = b'{"prompt": "a", "stream": true}'
    old = POST.replace(b"HTTP/1.1", b"HTTP/1.0") + b"content-length: %d\r\n" % len(body)
    head, _, events = hear(old + b"connection: keep-alive\r\n\r\n" + body).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"\r\nconnection: close" in head
    assert events.startswith(b"data: {")
    assert events.endswith(b"}\n\ndata: [DONE]\n\n")
    assert b"\r" not in events
    assert say(HEALTH.replace(b"HTTP/1.1", b"HTTP/1.0") + b"\r\n") == (200, {"status": "ok"})


STREAM = b'{"prompt": "a", "stream": true}'
STREAMED = POST + b"content-length: %d\r\n\r\n" % len(STREAM) + STREAM


def test_of_requests_that_wait_for_another_the_first_ends_with_its_client(
    hear, engine, caplog
) -> None:
    """It ran on for nobody, and its words to a closed socket filled the log."""
    engine.words, engine.pause = ["a"] * 100, 0.01
    with caplog.at_level("ERROR"):
        hear(STREAMED * 2, then=b"")
    assert engine.aborted == [engine.submits[0].request_id]
    assert len(engine.submits) == 1
    assert not caplog.records


def test_no_refusal_stands_in_the_middle_of_a_stream(hear, engine) -> None:
    engine.words, engine.pause = ["a"] * 100, 0.01
    heard = hear(STREAMED, then=b"nonsense\r\n\r\n")
    assert heard.count(b"HTTP/1.1 ") == 1
    assert b"invalid_http" not in heard
    broken = POST + b"transfer-encoding: chunked\r\n\r\n"
    assert b"invalid_http" in hear(broken, b"nonsense\r\n")
