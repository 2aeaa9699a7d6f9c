"""An engine in its own process gives what one in this process gives, and bears what users do."""

import asyncio
import gzip
import json
import os
import random
import signal
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from children import FAULTY, SETTINGS, SHORT, Answer, answer, request, running, tiny_config
from faulty_engine import RAISES

from headrace.base.errors import HeadraceError, RequestError, TooLongError
from headrace.engine.client import EngineClient
from headrace.engine.token_states import TokenStates
from headrace.llm import LLM
from headrace.request.sampling_params import SamplingParams
from headrace.request.structured_output import StructuredOutput

WAIT = 20  # seconds after which something is stuck


class Shared:
    """One child for the tests of this file, and the event loop that its client belongs to."""

    def __init__(self, folder: Path) -> None:
        self._runner = asyncio.Runner()
        self.client = self.run(EngineClient.start(tiny_config(folder), program=FAULTY))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(asyncio.wait_for(work, WAIT))

    def close(self) -> None:
        self.run(self.client.stop())
        self._runner.close()


@pytest.fixture(scope="module")
def shared(llama_folder: Path) -> Iterator[Shared]:
    shared = Shared(llama_folder)
    yield shared
    shared.close()


async def when_idle(client: EngineClient) -> dict[str, Any]:
    """Statistics once nothing runs; every page must be free or cached then."""
    while (stats := await client.control("stats"))["running"] + stats["waiting"]:
        await asyncio.sleep(0.01)
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]
    return stats


# ---- what comes


PARAMS = {
    "greedy": SHORT,
    "seeded": SamplingParams(max_tokens=20, seed=5, temperature=1.3, top_p=0.9),
    "several": SamplingParams(max_tokens=12, seed=1, n=3),
    "logprobs": SamplingParams(max_tokens=6, temperature=0.0, logprobs=2, prompt_logprobs=1),
    "text": SamplingParams(max_tokens=60, temperature=0.0, stop="@"),
    "default_length": SamplingParams(temperature=0.0, ignore_eos=True),
    "states": SamplingParams(max_tokens=5, n=2, return_hidden_states="all", seed=2),
    "layers": SamplingParams(
        max_tokens=5, seed=3, return_hidden_states=True, hidden_state_layers=[0, -1]
    ),
}


@pytest.mark.parametrize("name", PARAMS)
def test_a_stream_is_the_output_of_an_llm(shared: Shared, llama_folder: Path, name: str) -> None:
    prompt, params = [9, 8, 7, 100, 200, 30], PARAMS[name]
    with LLM(llama_folder, **SETTINGS) as llm:
        (expected,) = llm.generate(prompt, params, use_tqdm=False)
    submit = request(prompt, params, default_max_tokens=128)
    came: Answer = shared.run(answer(shared.client, submit))
    for output in expected.outputs:
        (ending,) = came.endings(output.index)
        parts = came.of(output.index)
        assert came.token_ids(output.index) == output.token_ids
        assert came.text(output.index) == output.text
        assert (ending.reason, ending.stop_reason) == (output.finish_reason, output.stop_reason)
        assert parts[-1].paths == output.paths
        assert all(part.hidden_states is None for part in parts[:-1])
        if output.hidden_states is None:
            assert parts[-1].hidden_states is None
        else:
            assert TokenStates(parts[-1].hidden_states).states.equal(output.hidden_states.states)
        if output.logprobs is not None:
            logprobs = [entry for part in parts for entry in part.logprobs or ()]
            assert [list(entry) for entry in logprobs] == [list(e) for e in output.logprobs]
            assert logprobs == output.logprobs
    scored = [d.prompt_logprobs for d in came.deltas if d.prompt_logprobs is not None]
    assert scored == ([] if expected.prompt_logprobs is None else [expected.prompt_logprobs])


def test_what_the_engine_is_goes_to_its_client(shared: Shared, llama_folder: Path) -> None:
    info = shared.client.info
    assert (info.model, info.vocab_size, info.max_model_len) == (str(llama_folder), 272, 256)
    assert info.eos_token_ids == [257]
    assert info.has_tokenizer
    assert info.kv_tokens >= 256
    assert shared.client.state == "ready"
    assert os.getsid(info.pid) != os.getsid(0)  # Ctrl-C in a terminal is for the parent alone


# ---- refusals


@pytest.mark.parametrize(
    ("tokens", "params", "kind", "says"),
    [
        ([1], SamplingParams(max_tokens=400), TooLongError, "maximum context length is 256 tokens"),
        ([], SHORT, RequestError, "prompt is empty"),
        ([272], SHORT, RequestError, "token id 272"),
        ([-1], SHORT, RequestError, "token id -1"),
        ([2**70], SHORT, RequestError, "cannot be sent on"),
        ([1.5], SHORT, RequestError, "cannot be read"),
        ([1], SamplingParams(logit_bias={300: 1.0}), RequestError, "logit_bias"),
        ([1], SamplingParams(stop="half \ud83d"), RequestError, "surrogates"),
        ([1], SamplingParams(return_routed_experts=True), RequestError, "has no experts"),
    ],
)
def test_a_bad_request_is_refused_and_no_other(
    shared: Shared, tokens: list[Any], params: SamplingParams, kind: type[Exception], says: str
) -> None:
    async def both() -> Answer:
        good = asyncio.create_task(answer(shared.client, request(params=SHORT)))
        with pytest.raises(kind, match=says) as caught:
            await answer(shared.client, request(tokens, params))
        assert type(caught.value) is kind
        return await good

    assert shared.run(both()).endings()[0].reason == "length"


def test_structured_output_is_held_to_its_form_or_refused(shared: Shared) -> None:
    pytest.importorskip("xgrammar")

    def of(**form: Any) -> SamplingParams:
        return SamplingParams(structured=StructuredOutput(**form), max_tokens=30, temperature=0.0)

    async def three() -> Answer:
        with pytest.raises(RequestError, match="regex"):
            await answer(shared.client, request(params=of(regex="(")))
        left = request(params=of(regex="[ab]{30}"))
        stream = asyncio.create_task(answer(shared.client, left))
        await asyncio.sleep(0)
        await shared.client.abort([left.request_id])
        assert [ending.reason for ending in (await stream).endings()] == ["abort"]
        return await answer(shared.client, request(params=of(choice=["yes", "no"])))

    assert shared.run(three()).text() in ("yes", "no")


def test_an_id_in_flight_is_refused(shared: Shared) -> None:
    async def twice() -> None:
        async with running(shared.client, request(request_id="same")):
            with pytest.raises(RequestError, match="'same' is in flight"):
                await answer(shared.client, request(request_id="same", params=SHORT))
        await when_idle(shared.client)
        await answer(shared.client, request(request_id="same", params=SHORT))

    shared.run(twice())


# ---- endings


def test_an_abort_ends_a_stream_once(shared: Shared) -> None:
    async def aborted() -> Answer:
        first = request()
        stream = asyncio.create_task(answer(shared.client, first))
        while not shared.client.load.running:
            await asyncio.sleep(0.001)
        await shared.client.abort([first.request_id, "unknown"])
        await shared.client.abort([first.request_id])
        return await stream

    (ending,) = shared.run(aborted()).endings()
    assert (ending.reason, ending.message) == ("abort", "aborted by the caller")
    shared.run(when_idle(shared.client))


@pytest.mark.parametrize("how", ["closed", "cancelled"])
def test_a_consumer_that_goes_away_frees_the_engine(shared: Shared, how: str) -> None:
    async def go_away() -> dict[str, Any]:
        before = (await when_idle(shared.client))["finished_abort"]
        if how == "closed":
            async with running(shared.client, request()):
                pass
        else:
            task = asyncio.create_task(answer(shared.client, request()))
            while not shared.client.load.running:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        after = await when_idle(shared.client)
        assert not shared.client._streams
        return {"aborted": after["finished_abort"] - before}

    assert shared.run(go_away()) == {"aborted": 1}


def test_fifty_streams_with_random_aborts_end_once_each(shared: Shared) -> None:
    chance = random.Random(0)

    async def one(number: int) -> str:
        submit = request(
            [chance.randrange(256) for _ in range(chance.randrange(1, 60))],
            SamplingParams(max_tokens=chance.randrange(1, 60), ignore_eos=True, n=1 + number % 2),
        )
        stop_after, how = chance.randrange(1, 30), chance.choice(["no", "abort", "leave"])
        seen: dict[int, int] = dict.fromkeys(range(submit.params.n), 0)
        async for delta in shared.client.generate(submit):
            seen[delta.index] += delta.finished is not None
            stop_after -= 1
            if stop_after == 0 and how == "leave":
                return "left"
            if stop_after == 0 and how == "abort":
                await shared.client.abort([submit.request_id])
        assert set(seen.values()) == {1}
        return "ended"

    async def all_of_them() -> list[str]:
        ways = await asyncio.gather(*map(one, range(50)))
        await when_idle(shared.client)
        assert not shared.client._streams
        return ways

    ways = shared.run(all_of_them())
    assert ways.count("ended") > 20
    assert ways.count("left") > 5


def test_a_slow_consumer_holds_nobody_up_and_loses_nothing(shared: Shared) -> None:
    async def slow_and_fast() -> tuple[Answer, Answer]:
        slow = shared.client.generate(request())
        first = await anext(slow)
        fast = await answer(shared.client, request())
        await when_idle(shared.client)
        return Answer([first, *[delta async for delta in slow]]), fast

    slow, fast = shared.run(slow_and_fast())
    assert slow.token_ids() == fast.token_ids()
    assert slow.text() == fast.text()
    assert len(slow.deltas) == 2  # the acceptance, and all that piled up
    assert len(fast.deltas) > 10


def test_a_step_that_raises_ends_its_own_sequences(shared: Shared) -> None:
    async def raised() -> tuple[Answer, Answer]:
        broken = await answer(shared.client, request([5, RAISES]))
        return broken, await answer(shared.client, request(params=SHORT))

    broken, after = shared.run(raised())
    (ending,) = broken.endings()
    assert (ending.reason, ending.message) == ("error", "ZeroDivisionError: a step that raises")
    assert after.endings()[0].reason == "length"
    assert shared.run(when_idle(shared.client))["failed_steps"] == 1


def test_silence_counts_while_the_engine_owes_an_answer(shared: Shared) -> None:
    """A process that is stopped, or hangs in a device, ends nothing and says nothing."""
    pid = shared.client.info.pid

    async def stopped() -> float:
        await when_idle(shared.client)
        os.kill(pid, signal.SIGSTOP)
        try:
            assert shared.client.silent_seconds == 0.0
            stream = shared.client.generate(request(params=SHORT))
            first = asyncio.ensure_future(anext(stream))
            while not shared.client.silent_seconds:
                await asyncio.sleep(0.01)
        finally:
            os.kill(pid, signal.SIGCONT)
        await first
        assert [delta async for delta in stream]
        return shared.client.silent_seconds

    assert shared.run(stopped()) == 0.0


# ---- controls


def test_stats_and_explain_tell_what_ran(shared: Shared) -> None:
    explained = shared.run(shared.client.control("explain"))
    assert "Plan" in explained["text"]
    names = {decision["name"] for decision in explained["decisions"]}
    assert {"dtype", "page_size", "decode_graph"} <= names
    assert sum(entry["steps"] for entry in explained["paths"]) > 0


def test_the_cache_is_flushed_only_when_idle(shared: Shared) -> None:
    async def flush() -> dict[str, Any]:
        await answer(shared.client, request(range(100), SHORT))
        async with running(shared.client, request()):
            with pytest.raises(RequestError, match="1 sequences run and 0 wait"):
                await shared.client.control("flush_cache")
        assert (await when_idle(shared.client))["pages_cached"] > 0
        return await shared.client.control("flush_cache")

    assert shared.run(flush())["pages"] >= 6
    assert shared.run(when_idle(shared.client))["pages_cached"] == 0


def test_a_profile_covers_the_steps_it_was_asked_for(shared: Shared, tmp_path: Path) -> None:
    async def profile() -> str:
        started = await shared.client.control("start_profile", folder=str(tmp_path), steps=2)
        with pytest.raises(RequestError, match="runs already"):
            await shared.client.control("start_profile", folder=str(tmp_path))
        await answer(shared.client, request(params=SHORT))
        with pytest.raises(RequestError, match="No profile runs"):
            await shared.client.control("stop_profile")
        return started["path"]

    trace = json.loads(gzip.decompress(Path(shared.run(profile())).read_bytes()))
    assert trace["traceEvents"]


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("nothing", {}, "no control 'nothing'"),
        ("start_profile", {"folder": "/proc/nowhere"}, "cannot be written"),
        ("start_profile", {"folder": "a\0b"}, "cannot be written"),
        ("start_profile", {"folder": "~nobody-has-this-name/a"}, "cannot be written"),
        ("start_profile", {"folder": ".", "steps": 0}, "steps is 0"),
        ("stats", {"unknown": 1}, "stats failed"),
    ],
)
def test_a_control_that_fails_says_why(
    shared: Shared, name: str, arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(HeadraceError, match=says):
        shared.run(shared.client.control(name, **arguments))
    assert shared.run(shared.client.control("stats"))["running"] == 0


def test_long_waits_use_no_processor(shared: Shared) -> None:
    def used() -> int:
        fields = Path(f"/proc/{shared.client.info.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])  # ticks of 10 ms, in the process and the kernel

    shared.run(when_idle(shared.client))
    before = used()
    time.sleep(0.5)
    assert used() - before <= 2
