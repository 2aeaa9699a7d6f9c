"""The whole way: `headrace serve` with an engine in its own process, asked by OpenAI's client.

The tests run in their order on one server, the last ones against its life.
"""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
from running_server import RunningServer, is_alive

from headrace import LLM, PoolingParams, SamplingParams

MESSAGES: Any = [{"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {"temperature": 0, "seed": 1}


@pytest.fixture(scope="module")
def server(tiny_folder: Path) -> Iterator[RunningServer]:
    running = RunningServer(
        tiny_folder,
        *("--context-length", "512", "--max-num-seqs", "16", "--served-model-name", "tiny"),
        *("--on-engine-death", "restart", "--api-key", "right", "--admin-api-key", "admin"),
        "--log-requests",
    )
    yield running
    running.kill()


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="right", max_retries=0) as made:
        yield made


def told(server: RunningServer, path: str) -> Any:
    answer = httpx2.get(server.url + path, headers={"authorization": "Bearer right"})
    assert answer.status_code == 200, answer.text
    return answer.json()


def wait_until(server: RunningServer, *, running: int) -> dict[str, Any]:
    """The engine's load, when so many requests run; they have a minute to get there."""
    deadline = time.monotonic() + 60.0
    while True:
        info = told(server, "/server_info")
        load = info["internal_states"][0]
        if load["running"] == info["requests_in_flight"] == running and not load["waiting"]:
            return load
        assert time.monotonic() < deadline, load
        time.sleep(0.02)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "headrace"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_wrong_key_is_refused(server: RunningServer) -> None:
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong") as other,
        pytest.raises(openai.AuthenticationError),
    ):
        other.models.list()


def test_a_stream_says_what_the_whole_reply_says(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 40, "n": 2, **GREEDY}
    options = {"include_usage": True}
    whole = client.chat.completions.create(
        messages=MESSAGES, logprobs=True, top_logprobs=2, **asked
    )
    texts, entries, reasons = ["", ""], [[], []], [[], []]
    usage = None
    for chunk in client.chat.completions.create(
        messages=MESSAGES,
        logprobs=True,
        top_logprobs=2,
        stream=True,
        stream_options=options,
        **asked,
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            entries[choice.index] += (choice.logprobs and choice.logprobs.content) or []
            reasons[choice.index] += [choice.finish_reason] if choice.finish_reason else []
    assert texts == [choice.message.content for choice in whole.choices]
    assert entries == [choice.logprobs.content for choice in whole.choices]
    assert reasons == [[choice.finish_reason] for choice in whole.choices]
    assert whole.usage is not None
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == sum(map(len, entries))


def test_completions_with_echo_and_logprobs(client: openai.OpenAI) -> None:
    prompts = [[39, 68, 75, 75, 78], [1, 2, 3]]
    asked: dict[str, Any] = {"model": "tiny", "prompt": prompts, "max_tokens": 1, **GREEDY}
    reply = client.completions.create(echo=True, logprobs=1, **asked)
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == 8
    for choice, prompt in zip(reply.choices, prompts, strict=True):
        assert choice.logprobs is not None
        values = choice.logprobs.token_logprobs
        assert values is not None
        assert len(values) == len(prompt) + 1
        assert values[0] is None
        assert all(value < 0 for value in values[1:])
    assert reply.choices[0].text.startswith("Hello")
    # The same a second time, when the prompt lies in the cache.
    again = client.completions.create(echo=True, logprobs=1, **asked)
    for first, second in zip(reply.choices, again.choices, strict=True):
        assert first.logprobs.token_logprobs[1:] == pytest.approx(
            second.logprobs.token_logprobs[1:], abs=1e-4
        )


def test_a_stop_text_is_never_shown(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "Hello", "max_tokens": 60, **GREEDY}
    text = client.completions.create(**asked).choices[0].text
    stop = text[20:24]
    expected = text[: text.index(stop)]
    whole = client.completions.create(stop=[stop], **asked).choices[0]
    assert (whole.text, whole.finish_reason) == (expected, "stop")
    pieces = [
        chunk.choices[0] for chunk in client.completions.create(stop=[stop], stream=True, **asked)
    ]
    assert "".join(piece.text for piece in pieces) == expected
    assert pieces[-1].finish_reason == "stop"
    almost = stop[:2] + "\x00\x00"
    pieces = [
        chunk.choices[0] for chunk in client.completions.create(stop=[almost], stream=True, **asked)
    ]
    assert "".join(piece.text for piece in pieces) == text


def test_embeddings_are_those_of_the_engine(
    client: openai.OpenAI, server: RunningServer, tiny_folder: Path
) -> None:
    texts = ["Hello", "a longer text " * 20, "!"]
    with LLM(str(tiny_folder), load_format="dummy", device="cpu", dtype="float32") as llm:
        last = [each.embedding for each in llm.embed(texts, use_tqdm=False)]
        params = PoolingParams(pooling="mean", dimensions=8)
        mean = [each.embedding for each in llm.embed(texts, params, use_tqdm=False)]
    reply = client.embeddings.create(model="tiny", input=texts)  # base64 on the wire
    assert [each.index for each in reply.data] == [0, 1, 2]
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(map(len, texts))
    numbers = client.embeddings.create(model="tiny", input=texts, encoding_format="float")
    for place, expected in enumerate(last):
        np.testing.assert_allclose(reply.data[place].embedding, expected, atol=2e-5)
        np.testing.assert_allclose(numbers.data[place].embedding, expected, atol=2e-5)
    cut = client.embeddings.create(
        model="tiny", input=texts, dimensions=8, extra_body={"pooling": "mean"}
    )
    for entry, expected in zip(cut.data, mean, strict=True):
        np.testing.assert_allclose(entry.embedding, expected, atol=2e-5)
    with pytest.raises(openai.BadRequestError, match=r"dimensions is 65.*\[1, 64\]"):
        client.embeddings.create(model="tiny", input="x", dimensions=65)
    with pytest.raises(openai.BadRequestError, match="The prompt has 513 tokens"):
        client.embeddings.create(model="tiny", input=["x", "x" * 513])
    wait_until(server, running=0)


def test_hidden_states_are_those_of_the_engine(
    client: openai.OpenAI, server: RunningServer, tiny_folder: Path
) -> None:
    params = SamplingParams(
        max_tokens=4,
        temperature=0,
        ignore_eos=True,
        return_hidden_states="all",
        hidden_state_layers=[0, -1],
    )
    with LLM(str(tiny_folder), load_format="dummy", device="cpu", dtype="float32") as llm:
        (output,) = llm.generate("Hello", params, use_tqdm=False)
    expected = output.hidden_states.states.flatten(1).numpy()  # [5 + 3, 2 x 64]
    body = {
        "text": "Hello",
        "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True},
        "return_hidden_states": True,
        "hidden_state_layers": [0, -1],
    }
    headers = {"authorization": "Bearer right"}
    answer = httpx2.post(server.url + "/generate", json=body, headers=headers)
    prompt, *outputs = answer.json()["meta_info"]["hidden_states"]
    np.testing.assert_allclose([*prompt, *outputs], expected, atol=2e-5)
    assert len(prompt) == 5
    reply = client.completions.create(
        model="tiny",
        prompt="Hello",
        max_tokens=4,
        temperature=0,
        extra_body={"ignore_eos": True, "return_hidden_states": True},
    )
    np.testing.assert_allclose(reply.choices[0].hidden_states, expected[-1, 64:], atol=2e-5)
    wait_until(server, running=0)


def test_what_never_fits_is_refused_at_once(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=[5] * 2000)
    assert caught.value.code == "context_length_exceeded"
    assert "2000" in str(caught.value)
    assert "512" in str(caught.value)


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_goes_away_frees_its_memory(server: RunningServer, streams: bool) -> None:
    # A request without a stream went on, and held its memory
    body = {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "stream": streams}
    headers = {"authorization": "Bearer right"}
    before = wait_until(server, running=0)
    with httpx2.Client() as http:
        if streams:
            with http.stream(
                "POST", f"{server.url}/v1/completions", json=body, headers=headers
            ) as answer:
                lines = answer.iter_lines()
                next(lines)
                wait_until(server, running=1)
        else:
            with pytest.raises(httpx2.ReadTimeout):
                http.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=0.3)
    load = wait_until(server, running=0)
    assert load["pages_free"] + load["pages_cached"] == before["pages_total"]
    assert "finish=disconnect" in server.wait_for(r"output=\d+ .*finish=disconnect").string


def test_many_at_once_each_get_their_own(client: openai.OpenAI) -> None:
    def ask(number: int) -> tuple[int, int]:
        prompt = [number % 200 + 1] * (number % 7 + 1)
        reply = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=number % 5 + 1, extra_body={"ignore_eos": True}
        )
        assert reply.usage is not None
        return reply.usage.prompt_tokens, reply.usage.completion_tokens

    with ThreadPoolExecutor(16) as threads:
        counts = list(threads.map(ask, range(48)))
    assert counts == [(number % 7 + 1, number % 5 + 1) for number in range(48)]


def test_health_answers_while_a_long_prompt_is_read(server, client) -> None:
    # It waited for the engine
    with ThreadPoolExecutor(1) as threads:
        long = threads.submit(
            client.completions.create, model="tiny", prompt=[7] * 480, max_tokens=20
        )
        slowest = 0.0
        while not long.done():
            began = time.monotonic()
            assert httpx2.get(f"{server.url}/health").status_code == 200
            slowest = max(slowest, time.monotonic() - began)
        assert long.result().usage.prompt_tokens == 480
    assert slowest < 1.0


def test_explain_tells_the_paths_of_a_request(server, client) -> None:
    reply = client.completions.create(model="tiny", prompt="a", max_tokens=3, **GREEDY)
    runs = told(server, f"/explain?request={reply.id}")["paths"][0]["runs"]
    assert sum(steps for _, steps in runs) == 3
    plan = told(server, "/explain")
    assert "text" in plan
    assert plan["paths"]


def test_metrics_and_status_tell_what_this_server_did(server, client) -> None:
    before = metrics(server)
    client.completions.create(model="tiny", prompt="twice " * 9, n=2, max_tokens=7, **GREEDY)
    after = metrics(server)

    def grown(name: str) -> float:
        lines = [name_of for name_of in after if name_of.startswith(f"headrace:{name}{{")]
        assert lines, name
        return sum(after[each] - before.get(each, 0.0) for each in lines)

    assert grown("generation_tokens_total") == 14
    assert grown("prompt_tokens_total") == 2 * 54
    assert grown("prefix_cache_hits_total") >= 48  # the second choice reads the first one's prompt
    assert grown("request_success_total") == 2
    assert 0 < grown("inter_token_latency_seconds_count") <= 12  # tokens that come together are one
    assert grown("request_queue_time_seconds_count") == 1
    assert grown("forward_total") >= 7
    assert 0 < grown("forward_seconds_total") < 10
    (forward,) = [each for each in after if each.startswith("headrace:forward_total{")]
    assert "cpu_graph: " in forward  # why no better path was taken
    status = told(server, "/status.json")
    assert status["steps"]["are_new"]
    assert status["steps"]["rows"][-1][0] == sum(each["steps"] for each in paths(server))
    assert len(status["samples"]["rows"]) >= 1


def paths(server: RunningServer) -> Any:
    return told(server, "/explain")["paths"]


def metrics(server: RunningServer) -> dict[str, float]:
    """Without a key, as Prometheus comes."""
    answer = httpx2.get(f"{server.url}/metrics")
    assert answer.status_code == 200
    lines = [each for each in answer.text.splitlines() if not each.startswith("#")]
    return {name: float(value) for name, _, value in (each.rpartition(" ") for each in lines)}


def test_the_engines_death_is_told_and_it_comes_back(server, client) -> None:
    pid = told(server, "/server_info")["engine"]["pid"]
    stream = client.completions.create(
        model="tiny", prompt="a", max_tokens=500, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(openai.APIError, match="The engine ended"):
        for _ in stream:
            pass
    assert httpx2.get(f"{server.url}/health").status_code == 503
    dead = metrics(server)
    assert dead['headrace:up{model_name="tiny"}'] == 0
    assert dead['headrace:num_requests_running{model_name="tiny"}'] == 0
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model="tiny", prompt="a")
    server.wait_for("The engine was started again")
    assert httpx2.get(f"{server.url}/health").status_code == 200
    assert client.completions.create(model="tiny", prompt="a", max_tokens=2).choices
    alive = metrics(server)
    assert alive['headrace:up{model_name="tiny"}'] == 1
    assert alive['headrace:engine_restarts_total{model_name="tiny"}'] == 1
    assert told(server, "/status.json")["steps"]["rows"][-1][0] <= 2  # numbers of the new engine


def test_sigterm_lets_a_stream_end(server, client) -> None:
    pid = told(server, "/server_info")["engine"]["pid"]
    stream = client.completions.create(
        model="tiny", prompt="a", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    server.process.send_signal(signal.SIGTERM)
    reasons = [chunk.choices[0].finish_reason for chunk in stream]
    assert reasons[-1] == "length"
    assert server.status() == 0
    assert not is_alive(pid)
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{server.url}/health")
