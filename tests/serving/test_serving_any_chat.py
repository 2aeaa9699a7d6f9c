"""Whatever a model writes and a client asks for: streams add up, and no request is a fault."""

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tool_chat import (
    BOTH,
    FAMILIES,
    HELLO,
    ONE,
    OSLO,
    ROUTE,
    TOOLS,
    at_random,
    collected,
    without_ids,
)

# ---- any answer


FRAGMENTS = (
    *ONE.values(), *BOTH.values(), "<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>",
    "</tool_call>", "[TOOL_CALLS]", "[ARGS]", '{"name": "weather"', '"arguments": ', "{", "}",
    "Hello", " ", "\n", "é", "雨", OSLO, "<|python_tag|>", "weather", "<", "[",
)  # fmt: skip


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    family=st.sampled_from(FAMILIES),
    parts=st.lists(st.sampled_from(FRAGMENTS), max_size=8),
    seed=st.integers(0, 99),
    live=st.booleans(),
    asks=st.sampled_from(
        [{}, {"separate_reasoning": False}, {"stream_reasoning": False},
         {"include_reasoning": False}, {"parallel_tool_calls": False}, {"tool_choice": "none"},
         {"n": 2}]
    ),
    reason=st.sampled_from(["stop", "length"]),
)  # fmt: skip
def test_the_stream_adds_up_to_the_whole(
    chat, family: str, parts: list[str], seed: int, live: bool, asks: Any, reason: str
) -> None:
    asked = chat(family, stream_tool_arguments=live)
    asked.says(*at_random("".join(parts), seed), "", reason=reason)
    choices = asked.choices(tools=TOOLS, **asks)
    asked.says(*at_random("".join(parts), seed + 1), "", reason=reason)
    chunks = asked.chunks(tools=TOOLS, **asks)
    for index, choice in enumerate(choices):
        own = [chunk for chunk in chunks if chunk["index"] == index]
        assert without_ids(collected(own)) == without_ids(choice["message"])
        reasons = [chunk["finish_reason"] for chunk in own if chunk["finish_reason"]]
        assert reasons == [choice["finish_reason"]]
        assert own[-1]["finish_reason"] == choice["finish_reason"]


# ---- any request


ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 2**70)
    | st.sampled_from(["", "a", "\ud800", "none"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "function", "name", "parameters", "schema", "json_schema", "format",
                 "arguments", "structures", "begin", "properties", "json", "choice", "x"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)  # fmt: skip
FIELDS = (
    "tools", "tool_choice", "parallel_tool_calls", "response_format", "structured_outputs",
    "json_schema", "structural_tag", "guided_choice", "reasoning_effort", "separate_reasoning",
    "chat_template_kwargs",
)  # fmt: skip


@settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    body=st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=3),
    kind=st.sampled_from(["text", "json_object", "json_schema", "structural_tag", "function"]),
    calls=ODD,
    continues=st.booleans(),
)
def test_no_request_is_a_fault_of_the_server(chat, body, kind, calls, continues) -> None:
    for name in ("response_format", "tool_choice"):
        if isinstance(body.get(name), dict):
            body[name]["type"] = kind
    message = {"role": "assistant", "content": "<think>", "tool_calls": calls, "reasoning": calls}
    sent = {"messages": [*HELLO, message], "continue_final_message": continues, **body}
    answer = chat("hermes").http.post(
        ROUTE, content=json.dumps(sent), headers={"content-type": "application/json"}
    )
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert len(answer.json()["error"]["message"]) <= 1000
