"""Streams over time: disconnects, silence, slow readers, failures on the way."""

import asyncio
import json
from typing import Any

import msgspec
import pytest
from asgi import Exchange
from sse import events_of

from headrace.base.errors import EngineDeadError, RequestError
from headrace.serving import event_stream
from headrace.serving.app import make_app

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    COMPLETIONS: {"prompt": "Hi"},
    GENERATE: {"text": "Hi"},
}
EVERY_ROUTE = pytest.mark.parametrize("route", BODIES)


def exchange(service, route: str, **body) -> Exchange:
    return Exchange(make_app(service), route, BODIES[route] | body)


def run(test) -> None:
    async def limited() -> None:
        async with asyncio.timeout(10):
            await test()

    asyncio.run(limited())


@EVERY_ROUTE
@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_goes_away_aborts_at_once(service, engine, route, streams) -> None:
    async def test() -> None:
        engine.hold = asyncio.Event()  # never set: the prefill takes for ever
        call = exchange(service, route, stream=streams)
        running = asyncio.create_task(call.run())
        await call.until(lambda: len(service.waiting) == 1)
        await asyncio.sleep(0.02)
        call.gone.set()
        await asyncio.wait_for(running, 0.5)
        assert engine.aborted == [engine.submits[0].request_id]
        assert not service.in_flight
        assert not service.waiting
        (record,) = service.records.values()
        assert record.finishes == ["disconnect"]

    run(test)


@EVERY_ROUTE
def test_a_client_that_goes_away_in_the_middle_gets_nothing_more(service, engine, route) -> None:
    async def test() -> None:
        engine.words = ["a"] * 1000
        engine.pause = 0.005
        several = {} if route == GENERATE else {"n": 2}
        call = exchange(service, route, stream=True, **several)
        running = asyncio.create_task(call.run())
        await call.until(lambda: call.text.count("data: ") > 4)
        call.gone.set()
        await asyncio.wait_for(running, 0.5)
        assert engine.aborted
        assert engine.sent < 500
        assert "[DONE]" not in call.text

    run(test)


@pytest.mark.parametrize(("route", "key"), [(COMPLETIONS, "prompt"), (GENERATE, "text")])
def test_a_batch_is_aborted_whole(service, engine, route, key) -> None:
    async def test() -> None:
        engine.hold = asyncio.Event()
        call = exchange(service, route, stream=True, **{key: ["a", "b", "c"]})
        running = asyncio.create_task(call.run())
        await call.until(lambda: len(engine.submits) == 3)
        await asyncio.sleep(0.02)
        call.gone.set()
        await asyncio.wait_for(running, 0.5)
        assert len(engine.aborted) == 3

    run(test)


def test_silence_is_broken_by_comments(service, engine, monkeypatch) -> None:
    async def test() -> None:
        # The config is frozen and takes whole seconds: its class is what can be patched.
        monkeypatch.setattr(type(service.config), "ping_seconds", 0.02)
        engine.hold = asyncio.Event()
        call = exchange(service, CHAT, stream=True)
        running = asyncio.create_task(call.run())
        await call.until(lambda: call.text.count(": ping\n\n") >= 3)
        engine.hold.set()
        await running
        assert call.headers["content-type"].startswith("text/event-stream")
        assert call.headers["cache-control"] == "no-cache"
        assert call.headers["x-accel-buffering"] == "no"
        assert "content-length" not in call.headers
        assert len(events_of(call.text)) == 4  # comments are between events, not in them

    run(test)


def test_a_stream_that_talks_gets_no_comments(service, engine) -> None:
    async def test() -> None:
        call = exchange(service, CHAT, stream=True)
        await call.run()
        assert ":" + " ping" not in call.text

    run(test)


def test_a_slow_reader_holds_nobody_up(service, engine) -> None:
    async def test() -> None:
        slow = exchange(service, CHAT, stream=True)
        slow.slow.clear()
        reading = asyncio.create_task(slow.run())
        await slow.until(lambda: len(engine.submits) == 1)
        quick = exchange(service, CHAT, stream=True)
        await asyncio.wait_for(quick.run(), 1)
        assert not slow.sent
        slow.slow.set()
        await reading
        assert len(events_of(slow.text)) == len(events_of(quick.text)) == 4

    run(test)


@EVERY_ROUTE
def test_a_step_that_fails_is_told_in_the_stream(service, engine, route) -> None:
    async def test() -> None:
        engine.fail_after = 1
        call = exchange(service, route, stream=True)
        await call.run()
        *_, made, last = events_of(call.text)
        assert any(f'"{text}"' in json.dumps(made) for text in ("lo", "Hello"))  # came with it
        assert last["error"]["message"] == "A step failed: the step broke"
        assert last["error"]["type"] == "server_error"
        whole = exchange(service, route)
        await whole.run()
        assert whole.status == 500
        assert '"engine_error"' in whole.text
        assert [r.finishes for r in service.records.values()] == [["error"], ["error"]]

    run(test)


@EVERY_ROUTE
def test_the_engines_death_is_told(service, engine, route) -> None:
    async def test() -> None:
        engine.die_after = 1
        call = exchange(service, route, stream=True)
        await call.run()
        assert call.status == 200
        *_, last = events_of(call.text)
        assert last["error"]["code"] == "engine_dead"
        whole = exchange(service, route)
        await whole.run()
        assert whole.status == 503
        assert "retry-after" in whole.headers

    run(test)


@EVERY_ROUTE
def test_a_bug_in_the_middle_ends_the_stream_and_shows_nothing_of_itself(
    service, engine, route, caplog
) -> None:
    async def test() -> None:
        engine.words = ["a", None]  # type: ignore[list-item]
        call = exchange(service, route, stream=True)
        await call.run()
        *_, last = events_of(call.text)
        assert last["error"]["message"] == "The server failed; its log says why"

    run(test)
    assert "A stream failed" in caplog.text


@EVERY_ROUTE
def test_a_refusal_comes_before_the_stream(service, engine, route) -> None:
    async def test() -> None:
        engine.refuse = lambda submit: RequestError("n is 5", remedy="Allowed: 1")
        call = exchange(service, route, stream=True)
        await call.run()
        assert call.status == 400
        assert not service.in_flight

    run(test)


def test_one_refused_prompt_ends_the_others_and_is_named(service, engine) -> None:
    def refuse(submit):
        return RequestError("The prompt is odd") if len(submit.prompt_token_ids) == 2 else None

    async def test() -> None:
        engine.refuse = refuse
        call = exchange(service, COMPLETIONS, stream=True, prompt=["a", "bb", "c"])
        await call.run()
        assert call.status == 400
        assert "Prompt 1: The prompt is odd" in call.text
        assert not service.in_flight
        assert sorted(engine.aborted) == sorted(each.request_id for each in engine.submits)

    run(test)


def test_the_queue_is_bounded(make_service, engine) -> None:
    async def test() -> None:
        service = make_service(max_queued_requests=2)
        engine.hold = asyncio.Event()
        calls = [exchange(service, CHAT, stream=True) for _ in range(2)]
        running = [asyncio.create_task(call.run()) for call in calls]
        await calls[0].until(lambda: len(service.waiting) == 2)
        refused = exchange(service, CHAT)
        await refused.run()
        assert refused.status == 503
        assert refused.headers["retry-after"] == "1"
        assert '"queue_full"' in refused.text
        engine.hold.set()
        await asyncio.gather(*running)
        again = exchange(service, CHAT)
        await again.run()
        assert again.status == 200

    run(test)


def test_a_dead_engine_is_told_before_anything_runs(service, engine) -> None:
    async def test() -> None:
        engine.state, engine.death = "dead", "killed by signal 9"
        call = exchange(service, CHAT)
        await call.run()
        assert call.status == 503
        assert "killed by signal 9" in call.text

    run(test)


def test_an_event_is_one_line_however_lines_are_told_apart() -> None:
    every = "".join(map(chr, range(0x3000)))
    sent = event_stream.event(msgspec.json.encode({"a": every})).decode()
    first, *rest = sent.splitlines()
    assert rest == [""]
    assert json.loads(first.removeprefix("data: ")) == {"a": every}


def test_an_id_in_flight_is_not_taken_twice(service, engine) -> None:
    async def test() -> None:
        engine.hold = asyncio.Event()
        first = exchange(service, CHAT, rid="mine", stream=True)
        running = asyncio.create_task(first.run())
        await first.until(lambda: "mine" in service.in_flight)
        second = exchange(service, CHAT, rid="mine")
        await second.run()
        assert second.status == 400
        engine.hold.set()
        await running
        assert "[DONE]" in first.text

    run(test)


def test_a_refusal_of_the_dying_engine_is_503(service, engine) -> None:
    async def test() -> None:
        engine.refuse = lambda submit: EngineDeadError("The engine is dead")
        call = exchange(service, CHAT)
        await call.run()
        assert call.status == 503

    run(test)


@EVERY_ROUTE
def test_what_was_recorded_is_there_with_the_last_words(service, route) -> None:
    """Who asked for the paths of an answer as soon as it had all of it heard of no such answer."""
    known: list[bool] = []

    class Reader(Exchange):
        async def _send(self, message: dict[str, Any]) -> None:
            if b"[DONE]" in message.get("body", b""):
                known.append("mine" in service.records and not service.in_flight)
            await super()._send(message)

    run(Reader(make_app(service), route, BODIES[route] | {"stream": True, "rid": "mine"}).run)
    assert known == [True]
    assert service.records["mine"].finishes == ["stop"]
