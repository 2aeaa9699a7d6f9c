"""Hidden states in answers: whole and streamed, OpenAI's and SGLang's forms, and not too many."""

import math

import msgspec
import numpy as np
import pytest
from sse import events_of
from starlette.testclient import TestClient

from headrace.request.messages import Submit
from headrace.request.packed_states import PackedStates
from headrace.request.sampling_params import SamplingParams
from headrace.serving.app import make_app
from headrace.serving.hidden_states import last_state, states_of

TOKENS = 9  # of "Hello you"
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"prompt": "Hel"}


def post(http, route, **body):
    answer = http.post(route, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(http, route, **body):
    answer = http.post(route, json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    return events_of(answer.text)


def row(number: int, *layers: int) -> list[float]:
    return [float(x) for layer in layers for x in (number, layer, layer, layer)]


# ---- SGLang's form


def test_true_gives_the_prompt_as_one_list_then_output_tokens(http, engine) -> None:
    meta = post(http, "/generate", text="Hel", return_hidden_states=True)["meta_info"]
    assert engine.params.return_hidden_states == "all"
    assert meta["hidden_states"] == [
        [row(place, 2) for place in range(3)],
        *(row(place, 2) for place in range(3, 3 + TOKENS - 1)),
    ]


def test_last_gives_one_for_each_output_token(http, engine) -> None:
    body = {"text": "Hel", "return_hidden_states": "last", "hidden_state_layers": [0, -1]}
    meta = post(http, "/generate", **body)["meta_info"]
    assert (engine.params.return_hidden_states, engine.params.hidden_state_layers) == (
        "last",
        (0, -1),
    )
    assert meta["hidden_states"] == [row(place, 0, 2) for place in range(TOKENS)]


def test_a_batch_and_sampling_params_ask_too(http, engine) -> None:
    replies = post(http, "/generate", text=["a", "b"], return_hidden_states=[False, True])
    assert ["hidden_states" in each["meta_info"] for each in replies] == [False, True]
    asked = {"return_hidden_states": True}
    (reply,) = [post(http, "/generate", text="a", sampling_params=asked)]
    assert reply["meta_info"]["hidden_states"][0] == [row(0, 2)]
    assert "hidden_states" not in post(http, "/generate", text="a")["meta_info"]


def test_a_stream_has_them_with_its_end(http) -> None:
    body = {"text": "Hel", "return_hidden_states": True}
    *before, last = streamed(http, "/generate", **body)
    assert not any("hidden_states" in each["meta_info"] for each in before)
    whole = post(http, "/generate", **body)["meta_info"]
    assert last["meta_info"]["hidden_states"] == whole["hidden_states"]


# ---- OpenAI's routes: the state of the last token


@pytest.mark.parametrize(
    ("route", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]
)
def test_choices_have_the_state_of_their_last_token(http, engine, route, body) -> None:
    reply = post(http, route, **body, return_hidden_states=True, n=2)
    assert engine.params.return_hidden_states == "final"
    assert [each["hidden_states"] for each in reply["choices"]] == [row(TOKENS - 1, 2)] * 2
    layers = post(http, route, **body, return_hidden_states=True, hidden_state_layers=[1, 0])
    assert layers["choices"][0]["hidden_states"] == row(TOKENS - 1, 1, 0)
    for off in ({}, {"return_hidden_states": False}, {"return_hidden_states": None}):
        assert "hidden_states" not in post(http, route, **body, **off)["choices"][0]


def test_a_streamed_completion_has_it_with_the_ending(http) -> None:
    *before, last = streamed(http, "/v1/completions", **COMPLETION, return_hidden_states=True)
    assert not any("hidden_states" in each["choices"][0] for each in before)
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["choices"][0]["hidden_states"] == row(TOKENS - 1, 2)


def test_a_streamed_chat_has_it_with_the_ending(http) -> None:
    *before, last = streamed(http, "/v1/chat/completions", **CHAT, return_hidden_states=True)
    assert not any("hidden_states" in each["choices"][0]["delta"] for each in before)
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["choices"][0]["delta"]["hidden_states"] == row(TOKENS - 1, 2)


# ---- refusals


@pytest.mark.parametrize(
    ("route", "body", "part"),
    [
        (
            "/generate",
            {"text": "a", "return_hidden_states": "some"},
            "Allowed: none, final, last, all",
        ),
        ("/generate", {"text": ["a", "b"], "return_hidden_states": [True]}, "1 entries"),
        ("/generate", {"text": "a", "hidden_state_layers": [0]}, "beside return_hidden_states"),
        (
            "/generate",
            {"text": "a", "return_hidden_states": True, "hidden_state_layers": [3]},
            "integers in [-3, 2]: this model has 2 layers",
        ),
        (
            "/v1/completions",
            COMPLETION | {"return_hidden_states": True, "hidden_state_layers": [-4]},
            "integers in [-3, 2]",
        ),
        ("/v1/chat/completions", CHAT | {"return_hidden_states": "x"}, "return_hidden_states"),
        (
            "/v1/embeddings",
            {"model": "tiny", "input": "a", "return_hidden_states": True},
            "/v1/chat/completions have it",
        ),
    ],
)
def test_what_cannot_be_is_refused(http, engine, route, body, part) -> None:
    answer = http.post(route, json=body)
    assert answer.status_code == 400, answer.text
    assert part in answer.json()["error"]["message"]
    assert not engine.submits


def test_too_large_an_answer_is_refused_beforehand(make_service, engine) -> None:
    with TestClient(make_app(make_service(max_hidden_state_values=80))) as http:
        asked = {"return_hidden_states": True, "sampling_params": {"max_new_tokens": 18}}
        post(http, "/generate", text="Hel", **asked)  # 20 positions of 4 numbers
        for more in ({"text": "Hell"}, {"text": "Hel", "hidden_state_layers": [0, 1]}):
            answer = http.post("/generate", json={"text": "Hel"} | asked | more)
            assert answer.status_code == 400
            message = answer.json()["error"]["message"]
            assert "at most 80 into an answer" in message
            assert answer.json()["error"]["param"] == "return_hidden_states"
        both = http.post("/generate", json=asked | {"text": ["Hel", "a"]})
        assert "up to 152 numbers" in both.json()["error"]["message"]
        default = http.post("/generate", json={"text": "a", "return_hidden_states": "last"})
        assert f"up to {128 * 4} numbers" in default.json()["error"]["message"]
        # one position of each continuation, however many tokens it makes
        post(http, "/v1/chat/completions", **CHAT, return_hidden_states=True, n=20)
        answer = http.post(
            "/v1/completions", json=COMPLETION | {"return_hidden_states": True, "n": 21}
        )
        assert "up to 84 numbers" in answer.json()["error"]["message"]
        assert "fewer positions or layers" in answer.json()["error"]["message"]
    assert len(engine.submits) == 2


# ---- numbers


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_numbers_of_every_dtype(dtype: str) -> None:
    numbers = np.array([1.0, -0.5, math.inf, math.nan, 3.0, 2.0**-14], np.float32)
    if dtype == "bfloat16":
        data = (numbers.view(np.uint32) >> 16).astype("<u2").tobytes()
    else:
        data = numbers.astype(dtype).tobytes()
    packed = PackedStates(bytearray(data), 3, 2, dtype, 0, (1,))
    assert states_of(packed) == [[1.0, -0.5], [None, None], [3.0, 2.0**-14]]
    assert last_state(packed) == [3.0, 2.0**-14]


def test_no_row_is_null() -> None:
    assert last_state(None) is None
    assert last_state(PackedStates(bytearray(), 0, 2, "float32", 0, (1,))) is None
    assert states_of(PackedStates(bytearray(), 0, 2, "float32", 0, (1,))) == []


def test_messages_carry_what_was_asked() -> None:
    params = SamplingParams(return_hidden_states="all", hidden_state_layers=[0, -1])
    sent = msgspec.msgpack.encode(Submit(request_id="r", prompt_token_ids=[1], params=params))
    assert msgspec.msgpack.decode(sent, type=Submit).params == params
