"""/generate: SGLang's native form."""

import pytest
from sse import events_of
from starlette.testclient import TestClient

from headrace.request.outcome import Finished
from headrace.serving.app import make_app

ROUTE = "/generate"
HELLO = [39, 68, 75]


def post(http, **body):
    answer = http.post(ROUTE, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_one_text(http, engine) -> None:
    reply = post(http, text="Hel")
    assert reply["text"] == "Hello you"
    assert reply["output_ids"][:3] == HELLO
    meta = reply["meta_info"]
    assert meta.pop("e2e_latency") >= 0
    assert len(meta.pop("id")) == 32
    assert meta == {
        "finish_reason": {"type": "stop", "matched": reply["output_ids"][-1]},
        "prompt_tokens": 3,
        "completion_tokens": 9,
        "cached_tokens": 1,
        "weight_version": "default",
    }
    (submit,) = engine.submits
    assert (submit.prompt_token_ids, submit.default_max_tokens) == (HELLO, 128)
    assert submit.params == engine.info.default_params


@pytest.mark.parametrize("value", [["a", "b"], ["a"]])
def test_a_batch_is_a_list(http, value) -> None:
    reply = post(http, text=value)
    assert [each["text"] for each in reply] == ["Hello you"] * len(value)
    assert [each["meta_info"]["prompt_tokens"] for each in reply] == [1] * len(value)


def test_a_field_that_is_null_is_not_there(http, engine) -> None:
    names = ("stream", "sampling_params", "return_logprob", "return_text_in_logprobs", "rid")
    assert post(http, text="a", **dict.fromkeys(names))["text"] == "Hello you"


def test_token_ids(http, engine) -> None:
    assert isinstance(post(http, input_ids=[5, 6]), dict)
    assert len(post(http, input_ids=[[5, 6], [7]])) == 2
    assert [each.prompt_token_ids for each in engine.submits] == [[5, 6], [5, 6], [7]]


def test_prefixes_are_kept_apart_by_a_key(http, engine) -> None:
    """It was an unknown field, and a tenant's prefixes were shared with all."""
    post(http, text="a", extra_key="mine", priority=2)
    post(http, text=["a", "b"], extra_key=["x", "y"])
    post(http, text="a")
    assert [each.cache_salt for each in engine.submits] == ["mine", "x", "y", ""]
    assert engine.submits[0].priority == 2


def test_sampling_params_have_sglangs_names(http, engine) -> None:
    params = {
        "max_new_tokens": 5,
        "min_new_tokens": 2,
        "sampling_seed": 3,
        "no_stop_trim": True,
        "stop": ["x"],
        "top_k": 4,
        "logit_bias": {"5": 1},
        "json_schema": None,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": True,
    }
    post(http, text="a", sampling_params=params)
    got = engine.params
    assert (got.max_tokens, got.min_tokens, got.seed, got.top_k) == (5, 2, 3, 4)
    assert (got.include_stop_str_in_output, got.skip_special_tokens) == (True, False)
    assert (got.stop, got.logit_bias, got.temperature) == (("x",), {5: 1.0}, 0.5)
    post(http, text=["a", "b"], sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2}])
    assert [each.params.max_tokens for each in engine.submits[-2:]] == [1, 2]


def test_several_continuations_are_a_list(http) -> None:
    assert len(post(http, text="a", sampling_params={"n": 3})) == 3
    assert len(post(http, text=["a", "b"], sampling_params={"n": 3})) == 6


def test_logprobs(http, engine) -> None:
    meta = post(http, text="Hel", return_logprob=True)["meta_info"]
    assert meta["output_token_logprobs"][0] == [-1.5, 39, None]
    assert len(meta["output_token_logprobs"]) == 9
    assert meta["input_token_logprobs"] == []
    assert engine.params.prompt_logprobs is None
    asked = {"logprob_start_len": 0, "top_logprobs_num": 1, "return_text_in_logprobs": True}
    meta = post(http, text="Hel", return_logprob=True, **asked)["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 39, None], [-1.5, 68, "e"], [-1.5, 75, "l"]]
    assert meta["input_top_logprobs"] == [None, [[-1.5, 1, '"']], [[-1.5, 1, '"']]]
    assert meta["output_top_logprobs"][0] == [[-1.5, 1, '"']]
    meta = post(http, text="Hel", return_logprob=True, logprob_start_len=2)["meta_info"]
    assert meta["input_token_logprobs"] == [[-1.5, 75, None]]
    meta = post(http, text="Hel", return_logprob=True, token_ids_logprob=[39])["meta_info"]
    assert engine.params.logprob_token_ids == (39,)
    assert meta["output_token_ids_logprobs"][0] == [[-1.5, 39, None]]


def test_logprobs_of_a_part_of_a_batch(http) -> None:
    first, second = post(http, text=["a", "b"], return_logprob=[True, False])
    assert "output_token_logprobs" in first["meta_info"]
    assert "output_token_logprobs" not in second["meta_info"]


def test_a_stream_grows(http) -> None:
    answer = http.post(ROUTE, json={"text": "a", "stream": True})
    events = events_of(answer.text)
    assert [each["text"] for each in events] == ["Hel", "Hello", "Hello you"]
    assert [len(each["output_ids"]) for each in events] == [3, 5, 9]
    assert [bool(each["meta_info"]["finish_reason"]) for each in events] == [False, False, True]
    assert "index" not in events[0]
    answer = http.post(ROUTE, json={"text": ["a", "b"], "stream": True})
    assert {each["index"] for each in events_of(answer.text)} == {0, 1}


@pytest.mark.parametrize(
    ("ending", "told"),
    [
        (Finished("stop", stop_reason="you"), {"type": "stop", "matched": "you"}),
        (Finished("length"), {"type": "length", "length": 9}),
        (Finished("abort", message="by the client"), {"type": "abort", "message": "by the client"}),
    ],
)
def test_endings(http, engine, ending, told) -> None:
    engine.finished = ending
    assert post(http, text="a")["meta_info"]["finish_reason"] == told


def test_ids_of_the_caller(http, engine) -> None:
    assert post(http, text="a", rid="mine")["meta_info"]["id"] == "mine"
    replies = post(http, text=["a", "b"], rid=["x", "y"])
    assert [each["meta_info"]["id"] for each in replies] == ["x", "y"]
    replies = post(http, text=["a", "b"], rid="z")
    assert [each["meta_info"]["id"] for each in replies] == ["z/0", "z/1"]
    assert [each.request_id for each in engine.submits] == ["mine", "x", "y", "z/0", "z/1"]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({}, "text or input_ids"),
        ({"text": "a", "input_ids": [1]}, "text or input_ids"),
        ({"text": []}, "text"),
        ({"input_ids": "a"}, "list of token ids"),
        ({"input_ids": ["a"]}, "list of token ids"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "max_tokens is -1"),
        ({"text": "a", "sampling_params": {"nope": 1}}, "nope"),
        ({"text": "a", "sampling_params": {"regex": 5}}, "regex: structured: regex is 5"),
        ({"text": "a", "sampling_params": [{}, {}]}, "2 entries for 1 prompts"),
        ({"text": ["a", "b"], "rid": ["x"]}, "2 different texts"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "2 different texts"),
        ({"text": "a", "rid": "x" * 200}, "rid must be 1 to 128"),
        ({"text": "a", "rid": "x\n2026 ERROR"}, "rid must be 1 to 128 printable"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 100}, "top_logprobs_num is 100"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len is -2"),
        ({"text": "a", "lora_path": "x"}, "lora_path is not supported"),
        ({"text": "a", "max_new_tokens": 5}, "it belongs in sampling_params"),
        ({"text": "a", "temperature": 0}, "it belongs in sampling_params"),
        ({"text": ["a"] * 2000}, "at most 1024 go together"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"n": -1}]}, "Prompt 1: n is -1"),
    ],
)
def test_what_cannot_be_honoured_is_refused(http, engine, body, told) -> None:
    answer = http.post(ROUTE, json=body)
    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]
    assert not engine.submits


@pytest.mark.parametrize("stream", [False, True])
def test_the_prompt_alone(http, engine, stream: bool) -> None:
    """SGLang's way of scoring a text: no new token."""
    engine.words, engine.finished = ["x"], Finished("stop")
    body = {"text": ["Hel", "lo"], "return_logprob": True, "logprob_start_len": 0, "stream": stream}
    body["sampling_params"] = [{"max_new_tokens": 0}, {"max_new_tokens": 1}]
    answer = http.post(ROUTE, json=body)
    assert answer.status_code == 200, answer.text
    told = events_of(answer.text) if stream else answer.json()
    first, second = sorted(told, key=lambda each: len(each["output_ids"]))
    meta = first["meta_info"]
    assert (first["text"], first["output_ids"], meta["completion_tokens"]) == ("", [], 0)
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert meta["output_token_logprobs"] == []
    assert [token for _, token, _ in meta["input_token_logprobs"]] == HELLO
    assert second["text"] == "x"
    assert [submit.params.max_tokens for submit in engine.submits] == [1, 1]


def test_experts_of_so_many_tokens_as_an_answer_may_hold(make_service, engine) -> None:
    """The rows of all prompts and continuations, in one body."""
    asked = {"input_ids": [HELLO] * 2, "return_routed_experts": True}
    with TestClient(make_app(make_service(max_routed_tokens=40))) as http:
        post(http, **asked, sampling_params={"max_new_tokens": 7, "n": 2})
        refused = http.post(ROUTE, json=asked | {"sampling_params": {"max_new_tokens": 18}})
        assert post(http, text="Hel")["text"] == "Hello you"
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "return_routed_experts")
    assert "42 tokens" in error["message"]
    assert len(engine.submits) == 3
