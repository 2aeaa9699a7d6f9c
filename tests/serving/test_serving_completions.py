"""/v1/completions: what comes out for what is asked."""

import pytest
from fake_engine import FakeEngine
from sse import events_of
from starlette.testclient import TestClient

from headrace.request.outcome import Finished
from headrace.request.sampling_params import SamplingParams

ROUTE = "/v1/completions"
HELLO = [39, 68, 75]  # "Hel"


def post(http: TestClient, **body):
    answer = http.post(ROUTE, json={"prompt": "Hel", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(http: TestClient, **body):
    answer = http.post(ROUTE, json={"prompt": "Hel", "stream": True, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events_of(answer.text)


def test_a_text_is_continued(http: TestClient, engine: FakeEngine) -> None:
    reply = post(http)
    (choice,) = reply["choices"]
    assert reply["object"] == "text_completion"
    assert reply["id"].startswith("cmpl-")
    assert reply["model"] == "tiny"
    assert (choice["index"], choice["text"], choice["finish_reason"]) == (0, "Hello you", "stop")
    assert choice["logprobs"] is None
    assert reply["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 9,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    (submit,) = engine.submits
    assert (submit.prompt_token_ids, submit.prompt_text) == (HELLO, "Hel")
    assert submit.default_max_tokens == 16
    assert submit.params == engine.info.default_params


def test_the_model_states_defaults_and_the_request_wins(http, engine) -> None:
    post(http, temperature=0, max_tokens=5, seed=3, stop=["x"], logit_bias={"5": -1}, n=2, top_k=-1)
    assert engine.params == SamplingParams(
        temperature=0.0, max_tokens=5, seed=3, stop=["x"], logit_bias={5: -1.0}, n=2, top_k=-1
    )


@pytest.mark.parametrize(
    ("prompt", "ids", "texts"),
    [
        (HELLO, [HELLO], [None]),
        (["He", "l"], [HELLO[:2], HELLO[2:]], ["He", "l"]),
        ([HELLO, [5]], [HELLO, [5]], [None, None]),
        ([HELLO, "l"], [HELLO, [75]], [None, "l"]),
    ],
)
def test_prompts_come_in_four_forms(http, engine, prompt, ids, texts) -> None:
    reply = post(http, prompt=prompt)
    assert [submit.prompt_token_ids for submit in engine.submits] == ids
    assert [submit.prompt_text for submit in engine.submits] == texts
    assert [choice["index"] for choice in reply["choices"]] == list(range(len(ids)))
    assert reply["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert reply["usage"]["completion_tokens"] == 9 * len(ids)


def test_several_continuations_of_several_prompts_are_numbered(http, engine) -> None:
    reply = post(http, prompt=["a", "b", "c"], n=2)
    assert [choice["index"] for choice in reply["choices"]] == list(range(6))
    assert {choice["text"] for choice in reply["choices"]} == {"Hello you"}
    texts, endings = [""] * 6, [0] * 6
    for chunk in stream(http, prompt=["a", "b", "c"], n=2):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        endings[choice["index"]] += choice["finish_reason"] is not None
    assert texts == ["Hello you"] * 6
    assert endings == [1] * 6


def test_a_stream_shows_what_comes_and_ends_once(http) -> None:
    chunks = stream(http)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Hel", "lo", " you"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


def test_usage_in_a_stream_comes_when_asked(http) -> None:
    *chunks, last = stream(http, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 12
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(http, stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [3, 5, 9, 9]


def test_logprobs(http) -> None:
    told = post(http, logprobs=1)["choices"][0]["logprobs"]
    assert told["tokens"] == list("Hello you")
    assert told["token_logprobs"] == [-1.5] * 9
    assert told["text_offset"] == list(range(9))
    # The likeliest, and the chosen one, which is less likely.
    assert told["top_logprobs"][0] == {'"': -1.5, "H": -1.5}


def test_logprobs_of_a_stream_joined_are_those_of_the_whole(http) -> None:
    whole = post(http, logprobs=2, echo=True)["choices"][0]["logprobs"]
    joined = {name: [] for name in whole}
    for chunk in stream(http, logprobs=2, echo=True):
        told = chunk["choices"][0]["logprobs"]
        for name, entries in told.items():
            joined[name] += entries
    assert joined == whole
    assert len(whole["tokens"]) == 12


def test_echo(http, engine) -> None:
    choice = post(http, echo=True)["choices"][0]
    assert choice["text"] == "HelHello you"
    assert engine.params.prompt_logprobs is None
    assert post(http, prompt=HELLO, echo=True)["choices"][0]["text"] == "HelHello you"
    assert stream(http, echo=True)[0]["choices"][0]["text"] == "HelHel"


def test_echo_with_logprobs_begins_with_null(http) -> None:
    told = post(http, prompt=[HELLO], echo=True, logprobs=1, max_tokens=1)["choices"][0]["logprobs"]
    assert told["tokens"][:4] == ["H", "e", "l", "H"]
    assert told["token_logprobs"][:3] == [None, -1.5, -1.5]
    assert told["top_logprobs"][0] is None
    assert told["text_offset"] == sorted(told["text_offset"])


def test_the_prompt_alone_with_echo_and_no_tokens(http, engine) -> None:
    reply = post(http, echo=True, max_tokens=0, logprobs=0)
    (choice,) = reply["choices"]
    assert engine.params.max_tokens == 1
    assert choice["text"] == "Hel"
    assert choice["logprobs"]["tokens"] == ["H", "e", "l"]
    assert reply["usage"]["completion_tokens"] == 0


def test_the_best_of_several_are_shown(http, engine) -> None:
    reply = post(http, n=1, best_of=3)
    assert engine.params.n == 3
    assert engine.params.logprobs == 0
    assert len(reply["choices"]) == 1
    assert reply["choices"][0]["logprobs"] is None


def test_what_stopped_it_is_told_under_both_names(http, engine) -> None:
    engine.finished = Finished("stop", stop_reason="you")
    choice = post(http)["choices"][0]
    assert choice["stop_reason"] == choice["matched_stop"] == "you"
    engine.finished = Finished("length")
    choice = post(http)["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)


def test_token_ids_when_asked(http) -> None:
    choice = post(http, return_token_ids=True)["choices"][0]
    assert choice["prompt_token_ids"] == HELLO
    assert choice["token_ids"][:3] == HELLO
    assert len(choice["token_ids"]) == 9
    chunks = [chunk["choices"][0] for chunk in stream(http, return_token_ids=True)]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [HELLO, None, None]
    assert [token for chunk in chunks for token in chunk["token_ids"]] == choice["token_ids"]


def test_tokens_as_ids(http) -> None:
    told = post(http, logprobs=0, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert told["tokens"][0] == "token_id:39"


def test_prompt_logprobs_as_vllm_shows_them(http) -> None:
    choice = post(http, prompt_logprobs=1)["choices"][0]
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1]["68"] == {
        "logprob": -1.5,
        "rank": 2,
        "decoded_token": "e",
    }


def test_the_id_is_the_callers_when_it_brings_one(http, engine) -> None:
    assert post(http, rid="mine")["id"] == "mine"
    assert engine.submits[-1].request_id == "mine"
    assert post(http, request_id="yours", prompt=["a", "b"])["id"] == "yours"
    assert [submit.request_id for submit in engine.submits[-2:]] == ["yours/0", "yours/1"]


def test_options_of_scheduling_reach_the_engine(http, engine) -> None:
    post(http, priority=3, cache_salt="s")
    assert (engine.submits[0].priority, engine.submits[0].cache_salt) == (3, "s")
