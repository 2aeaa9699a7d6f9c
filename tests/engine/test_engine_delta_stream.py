"""Deltas between the socket's reader and a consumer: nothing lost, nobody waits."""

import asyncio

import pytest

from headrace.base.errors import EngineDeadError, RequestError
from headrace.engine.delta_stream import MERGE_EVERY, DeltaStream, merged
from headrace.request.messages import Delta
from headrace.request.outcome import Finished, Logprob

END = Finished("stop")


def deltas(count: int, index: int = 0) -> list[Delta]:
    made = [Delta("r", index, f"{i} ", [i], [{i: Logprob(-1.0, 1)}]) for i in range(count)]
    made[-1].finished, made[-1].paths = END, [("eager", count)]
    return made


def test_merging_keeps_text_tokens_logprobs_and_the_ending() -> None:
    parts = [Delta("r", prompt_tokens=3), *deltas(5)]
    parts[1].prompt_logprobs = [None]
    whole = merged(parts)
    assert whole.text == "0 1 2 3 4 "
    assert whole.token_ids == [0, 1, 2, 3, 4]
    assert [*whole.logprobs] == [{i: Logprob(-1.0, 1)} for i in range(5)]
    assert (whole.prompt_logprobs, whole.finished, whole.paths) == ([None], END, [("eager", 5)])


def test_without_logprobs_the_merged_one_has_none() -> None:
    assert merged([Delta("r", text="a"), Delta("r", text="b")]).logprobs is None


def test_what_piles_up_is_one_delta_for_each_continuation() -> None:
    async def run() -> None:
        stream = DeltaStream("r", 2)
        count = 10 * MERGE_EVERY + 3
        for pair in zip(deltas(count), deltas(count, 1), strict=True):
            for delta in pair:
                stream.put(delta)
                assert all(len(waiting) < MERGE_EVERY for waiting in stream._pending.values())
        assert stream.is_complete
        taken = await stream.take()
        assert [delta.index for delta in taken] == [0, 1]
        for delta in taken:
            assert delta.token_ids == list(range(count))
            assert delta.finished == END
        assert await stream.take() == []

    asyncio.run(run())


def test_an_error_comes_after_what_came_before_it() -> None:
    async def run() -> None:
        stream = DeltaStream("r", 1)
        stream.put(Delta("r", text="a"))
        stream.fail(EngineDeadError("gone"))
        assert [delta.text for delta in await stream.take()] == ["a"]
        with pytest.raises(EngineDeadError, match="gone"):
            await stream.take()

    asyncio.run(run())


def test_a_failure_that_came_with_tokens_comes_after_them() -> None:
    async def run() -> None:
        stream = DeltaStream("r", 2)
        stream.put(Delta("r", 0, "a", [1], finished=END))
        for delta in (Delta("r", 1, "b", [2]), Delta("r", 1, "c", [3])):
            stream.put(delta)
        failure = Finished("error", message="broke")
        stream.put(Delta("r", 1, prompt_tokens=3, finished=failure))
        whole, made, failed = await stream.take()
        assert (whole.text, whole.finished) == ("a", END)
        assert (made.text, made.token_ids, made.finished) == ("bc", [2, 3], None)
        assert (failed.text, failed.token_ids, failed.finished) == ("", [], failure)
        assert failed.prompt_tokens == 3

    asyncio.run(run())


def test_a_waiting_consumer_wakes_for_deltas_and_errors() -> None:
    async def run() -> None:
        stream = DeltaStream("r", 1)
        waiting = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        stream.put(Delta("r", text="a"))
        stream.put(Delta("r", text="b"))
        assert [delta.text for delta in await waiting] == ["ab"]
        waiting = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        stream.fail(RequestError("no"))
        with pytest.raises(RequestError):
            await waiting

    asyncio.run(run())


def test_a_consumer_that_is_cancelled_breaks_nothing_for_the_reader() -> None:
    async def run() -> None:
        stream = DeltaStream("r", 1)
        waiting = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        stream.put(Delta("r", text="a"))
        stream.leave()
        stream.put(Delta("r", text="b", finished=END))
        assert stream.is_complete
        assert not stream._pending

    asyncio.run(run())
