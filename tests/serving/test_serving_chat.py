"""/v1/chat/completions: what comes out for what is asked."""

import sys
import time

import pytest
from sse import events_of
from starlette.testclient import TestClient

from headrace.base.errors import RequestError
from headrace.request.outcome import Finished
from headrace.serving.ignored_fields import MOST_TOLD
from headrace.serving.openai.refused_fields import REFUSED

ROUTE = "/v1/chat/completions"
TEXT_PART = {"type": "text", "text": "a"}
HELLO = [{"role": "user", "content": "Hello"}]


def post(http: TestClient, **body):
    answer = http.post(ROUTE, json={"messages": HELLO, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(http: TestClient, **body) -> str:
    answer = http.post(ROUTE, json={"messages": HELLO, **body})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["message"]


def stream(http: TestClient, **body):
    answer = http.post(ROUTE, json={"messages": HELLO, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    return events_of(answer.text)


def test_a_conversation_is_answered(http, engine) -> None:
    reply = post(http)
    (choice,) = reply["choices"]
    assert reply["object"] == "chat.completion"
    assert choice["message"] == {"role": "assistant", "content": "Hello you", "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    assert reply["usage"]["completion_tokens"] == 9
    (submit,) = engine.submits
    assert submit.prompt_text == "<user>Hello</s><assistant>"
    assert submit.default_max_tokens is None  # the rest of the context
    assert submit.params == engine.info.default_params


def test_a_stream_begins_with_the_role_and_ends_once(http) -> None:
    first, *rest = stream(http)
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["delta"] for chunk in rest] == [
        {"content": "Hel"},
        {"content": "lo"},
        {"content": " you"},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in rest] == [None, None, "stop"]
    assert len({(chunk["id"], chunk["created"]) for chunk in (first, *rest)}) == 1
    assert all("usage" not in chunk for chunk in (first, *rest))


def test_an_ending_without_text_is_an_empty_delta(http, engine) -> None:
    engine.words = ["Hi", ""]
    *_, last = stream(http)
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "stop"


def test_each_choice_has_its_role_and_its_end(http) -> None:
    chunks = stream(http, n=3)
    for index in range(3):
        own = [each["choices"][0] for each in chunks if each["choices"][0]["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(each["delta"].get("content", "") for each in own) == "Hello you"
        assert [each["finish_reason"] for each in own].count("stop") == 1
    reply = post(http, n=3)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert reply["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": len("<user>Hello") + 1 + len("<assistant>"),
        "completion_tokens": 27,
        "total_tokens": 50,
        "prompt_tokens_details": None,
    }


def test_usage_in_a_stream_comes_when_asked(http) -> None:
    *chunks, last = stream(http, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 9)
    options = {"include_usage": True, "continuous_usage_stats": True}
    assert all(chunk["usage"] for chunk in stream(http, stream_options=options))


def test_logprobs(http) -> None:
    content = post(http, logprobs=True, top_logprobs=1)["choices"][0]["logprobs"]["content"]
    assert len(content) == 9
    assert content[0] == {
        "token": "H",
        "logprob": -1.5,
        "bytes": [72],
        "top_logprobs": [{"token": '"', "logprob": -1.5, "bytes": [34]}],
    }
    joined = []
    for chunk in stream(http, logprobs=True, top_logprobs=1):
        told = chunk["choices"][0]["logprobs"]
        joined += told["content"] if told else []
    assert joined == content
    assert post(http, logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_max_completion_tokens_goes_before_max_tokens(http, engine) -> None:
    post(http, max_tokens=5)
    assert engine.params.max_tokens == 5
    post(http, max_tokens=5, max_completion_tokens=7)
    assert engine.params.max_tokens == 7


@pytest.mark.parametrize(
    ("messages", "options", "prompt"),
    [
        (
            [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                }
            ],
            {},
            "<user>a\nb</s><assistant>",
        ),
        ([{"role": "developer", "content": "d"}], {}, "<system>d</s><assistant>"),
        ([{"role": "critic", "content": "d"}], {}, "<critic>d</s><assistant>"),
        (HELLO, {"add_generation_prompt": False}, "<user>Hello</s>"),
        (
            [*HELLO, {"role": "assistant", "content": "Hi"}],
            {"continue_final_message": True, "add_generation_prompt": False},
            "<user>Hello</s><assistant>Hi",
        ),
        (
            [*HELLO, {"role": "assistant", "content": "Hi"}],
            {"continue_final_message": True},
            "<user>Hello</s><assistant>Hi",
        ),
    ],
)
def test_the_template_writes_the_prompt(http, engine, messages, options, prompt) -> None:
    post(http, messages=messages, **options)
    assert engine.submits[0].prompt_text == prompt


def test_variables_and_tools_reach_the_template(http, engine, service, monkeypatch) -> None:
    seen = {}

    def template(messages, **options):
        seen.update(options, messages=messages)
        return "x"

    monkeypatch.setattr(service.tokenizer, "apply_chat_template", template)
    tools = [{"type": "function", "function": {"name": "f"}}]
    post(http, chat_template_kwargs={"enable_thinking": False}, tools=tools, tool_choice="none")
    assert seen["enable_thinking"] is False
    assert seen["tools"] == tools
    assert seen["messages"] == HELLO


def test_what_stopped_it_is_told_under_both_names(http, engine) -> None:
    engine.finished = Finished("stop", stop_reason=77)
    choice = post(http)["choices"][0]
    assert choice["stop_reason"] == choice["matched_stop"] == 77
    assert stream(http)[-1]["choices"][0]["stop_reason"] == 77


def test_token_ids_when_asked(http) -> None:
    reply = post(http, return_token_ids=True)
    assert len(reply["prompt_token_ids"]) == 23
    assert len(reply["choices"][0]["token_ids"]) == 9
    first, *rest = stream(http, return_token_ids=True)
    assert first["prompt_token_ids"] == reply["prompt_token_ids"]
    ids = [token for chunk in rest for token in chunk["choices"][0]["token_ids"]]
    assert ids == reply["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages.0.role"),
        ({"messages": [*HELLO, {"role": "assistent", "content": "a"}]}, "did you mean assistant?"),
        ({"messages": [{"role": "USER", "content": "a"}]}, "did you mean user?"),
        ({"messages": [{"role": "usr", "content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "reads text only"),
        ({"top_logprobs": 3}, "needs logprobs: true"),
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs is 21; this server gives at most"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "needs stream: true"),
        ({"prompt_logprobs": 1, "stream": True}, "cannot be streamed"),
        ({"tools": []}, "tools is []"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "no parser for the way"),
        ({"tool_choice": "auto"}, "no tools"),
        ({"chat_template": "{{ 1 }}"}, "templates of requests are not run"),
        ({"chat_template_kwargs": {"messages": []}}, "has a field of its own"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_completion_tokens": -1}, "max_completion_tokens is -1"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "both true"),
        ({"temperature": -1}, "temperature is -1"),
        ({"max_new_tokens": 5}, "use max_tokens"),
        ({"repeat_penalty": 1.1}, "use repetition_penalty"),
        ({"stop_sequences": ["."]}, "use stop"),
        ({"do_sample": False}, "temperature=0 takes the likeliest token"),
        ({"max_length": 50}, "max_tokens counts the output alone"),
        ({"mirostat": 2}, "are the filters there are"),
        ({"enable_thinking": False}, "chat_template_kwargs"),
        ({"extra_body": {"top_k": 5}}, "beside the others"),
        ({"grammar": 'root ::= "a"'}, "use ebnf"),
        ({"best_of": 2}, "/v1/completions has it"),
    ],
)
def test_what_cannot_be_honoured_is_refused(http, engine, body, told) -> None:
    assert told in refused(http, **body)
    assert not engine.submits


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"functions": [], "audio": None, "logit_bias": {}},
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        {"seed": -5, "parallel_tool_calls": True},
        {"repeat_penalty": 1.0, "typical_p": 1, "mirostat": 0, "top_n_sigma": -1, "best_of": 1},
        {"verbosity": "medium", "echo": False, "enable_thinking": None, "do_sample": True},
    ],
)
def test_what_asks_for_nothing_is_taken(http, body) -> None:
    post(http, **body)


@pytest.mark.parametrize("streams", [False, True])
def test_an_unknown_field_is_taken_and_every_answer_names_it(http, caplog, streams) -> None:
    body = {"messages": HELLO, "no_such_field": 1, "Größe\n": 2, "user": "u", "cache_prompt": False}
    for _ in range(2):
        answer = http.post(ROUTE, json={**body, "stream": streams})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-ignored-fields"] == "no_such_field, Gr%C3%B6%C3%9Fe%0A"
    told = [r.message for r in caplog.records if r.message.startswith("A request brings")]
    assert len(told) == 2
    assert told[0] == (
        "A request brings the field 'no_such_field', which has no effect: nobody here knows it"
    )
    assert "x-ignored-fields" not in http.post(ROUTE, json={"messages": HELLO}).headers


def test_an_answer_names_so_many_ignored_fields_and_no_more(http) -> None:
    fields = {f"no_such_field_{number}": 1 for number in range(500)}
    answer = http.post(ROUTE, json={"messages": HELLO, **fields})
    assert answer.headers["x-ignored-fields"].count(",") == MOST_TOLD - 1


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "temperature"),
        ("maxTokens", "max_tokens"),
        ("max-completion-tokens", "max_completion_tokens"),
        ("min_token", "min_tokens"),
        ("stop_token_id", "stop_token_ids"),
        ("response_fromat", "response_format"),
    ],
)
def test_a_misspelt_field_is_refused_with_the_one_that_was_meant(http, engine, name, meant) -> None:
    assert refused(http, **{name: 1}) == f"{name} is not supported: did you mean {meant}?"
    assert not engine.submits


def test_fields_of_other_servers_are_no_misspelt_ones(http) -> None:
    theirs = ("repetition_penalty_range", "temperature_last", "truncation_length", "keep_alive")
    assert not REFUSED.keys() & theirs
    answer = http.post(ROUTE, json={"messages": HELLO, **dict.fromkeys(theirs, 5)})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-ignored-fields"] == ", ".join(theirs)


def test_a_template_that_takes_too_long_is_ended(make_service, engine) -> None:
    from headrace.serving.app import make_app
    from headrace.text.chat_template import ChatTemplate

    service = make_service(template_seconds=1)
    endless = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
    tokenizer = service.tokenizer
    before = tokenizer._chat_template
    tokenizer._chat_template = ChatTemplate({"default": endless})
    try:
        with TestClient(make_app(service)) as http:
            before_it = set(sys._current_frames())
            assert "took more than 1 s" in refused(http)
            _assert_no_thread_is_left(before_it)
    finally:
        tokenizer._chat_template = before


def _assert_no_thread_is_left(before: set[int]) -> None:
    deadline = time.monotonic() + 60
    while set(sys._current_frames()) - before:
        assert time.monotonic() < deadline, "the template is still running"
        time.sleep(0.01)


def test_a_model_without_template_says_how_to_give_one(http, service, monkeypatch) -> None:
    monkeypatch.setattr(service.tokenizer, "_chat_template", None)
    assert "(option chat_template)" in refused(http)


def test_a_checkpoint_without_tokenizer_chats_not(http, service) -> None:
    service.tokenizer = None
    assert "no tokenizer" in refused(http)


def test_what_the_engine_refuses_is_a_400(http, engine) -> None:
    engine.refuse = lambda submit: RequestError("top_p is 5", remedy="Allowed: less")
    answer = http.post(ROUTE, json={"messages": HELLO, "stream": True})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "top_p"
