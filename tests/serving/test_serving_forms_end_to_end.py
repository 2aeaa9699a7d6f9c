"""Random weights behind `headrace serve`: what ends with "stop" has the form that was asked.

Thinking is switched off where an answer must end: nothing bounds what a model thinks.
"""

import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import httpx2
import jsonschema
import openai
import pytest
from chat_checkpoint import write_chat_checkpoint
from pydantic import BaseModel, Field
from running_server import RunningServer

sys.path.insert(0, str(Path(__file__).parent.parent / "llm"))  # the schemas live there

from structured_schemas import bounded_schema

MESSAGES: Any = [{"role": "user", "content": "Hello"}]
NOT_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=8)
    unit: Literal["C", "F"]


class Move(BaseModel):
    """Where a piece goes."""

    piece: Literal["king", "queen"]
    row: int = Field(ge=1, le=8)
    takes: bool


class Answer(BaseModel):
    moves: list[Move] = Field(max_length=2)
    comment: str | None = Field(max_length=6)


TOOLS: Any = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Move)]
KINDS = {"Weather": Weather, "Move": Move}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Its markers are special tokens, which a grammar lets through only where a tag names them."""
    folder = tmp_path_factory.mktemp("forms") / "tiny"
    write_chat_checkpoint(folder, "hermes", all_special=True)
    running = RunningServer(folder, *("--context-length", "2048", "--max-num-seqs", "16"))
    yield running
    running.kill()


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def asked_with(seed: int, **body: Any) -> dict[str, Any]:
    return {
        "model": "default", "messages": MESSAGES, "seed": seed, "temperature": 1,
        "max_tokens": 600, "extra_body": NOT_THINKING, **body,
    }  # fmt: skip


def streamed(client: openai.OpenAI, **body: Any) -> tuple[str, list[dict[str, Any]], str]:
    """Content, calls and ending of a stream, joined by the field index as clients do."""
    content, calls, reasons = "", [], []
    for chunk in client.chat.completions.create(stream=True, **body):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for piece in choice.delta.tool_calls or []:
                assert piece.function is not None
                if piece.id is not None:
                    assert piece.index == len(calls)
                    calls.append({"name": piece.function.name, "arguments": ""})
                calls[piece.index]["arguments"] += piece.function.arguments or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    (reason,) = reasons
    return content, calls, reason


def check_schema(client: openai.OpenAI, seed: int) -> None:
    schema = bounded_schema(seed)
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    body = asked_with(seed, response_format=form)
    (choice,) = client.chat.completions.create(**body).choices
    content = choice.message.content
    assert (choice.finish_reason, streamed(client, **body)) == ("stop", (content, [], "stop"))
    jsonschema.validate(json.loads(content), schema)


def check_schemas(client: openai.OpenAI, seeds: range) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: check_schema(client, seed), seeds))


def test_answers_validate_and_stop(client: openai.OpenAI) -> None:
    check_schemas(client, range(12))


@pytest.mark.slow
def test_two_hundred_schemas(client: openai.OpenAI) -> None:
    check_schemas(client, range(200))


def test_the_other_routes(server: RunningServer) -> None:
    with httpx2.Client(base_url=server.url, timeout=30) as http:
        body = {
            "prompt": "Hello",
            "seed": 1,
            "max_tokens": 50,
            "structured_outputs": {"regex": "[ab]{3}c"},
        }
        (choice,) = http.post("/v1/completions", json=body).json()["choices"]
        assert (choice["finish_reason"], bool(re.fullmatch("[ab]{3}c", choice["text"]))) == (
            "stop",
            True,
        )
        params = {"ebnf": 'root ::= "yes" | "no"', "max_new_tokens": 20}
        reply = http.post("/generate", json={"text": "Hello", "sampling_params": params}).json()
        assert reply["text"] in ("yes", "no")
        assert reply["meta_info"]["finish_reason"]["type"] == "stop"


def test_forms_that_cannot_be_are_refused_before_a_stream(client: openai.OpenAI) -> None:
    for asks, told in (
        ({"regex": "(ab"}, "not closed"),
        ({"ebnf": "root ::= other"}, "not a grammar"),
        ({"json_schema": {"type": "string", "not": {}}}, "not is not supported"),
        ({"structural_tag": {"type": "structural_tag", "format": {"type": "x"}}}, "structural_tag"),
    ):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match=told):
                client.chat.completions.create(
                    model="default",
                    messages=MESSAGES,
                    stream=stream,
                    extra_body=NOT_THINKING | asks,
                )


def test_required_calls(client: openai.OpenAI) -> None:
    def check(seed: int) -> set[str]:
        body = asked_with(seed, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
        (choice,) = client.chat.completions.create(**body).choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        (call,) = choice.message.tool_calls
        KINDS[call.function.name].model_validate_json(call.function.arguments)
        content, calls, reason = streamed(client, **body)
        assert (content, reason) == ("", "tool_calls")
        assert calls == [{"name": call.function.name, "arguments": call.function.arguments}]
        return {call.function.name}

    with ThreadPoolExecutor(8) as pool:
        names = set().union(*pool.map(check, range(8)))
    assert names == set(KINDS)  # each is called by some seed


def test_several_calls_and_a_named_one(client: openai.OpenAI) -> None:
    body = asked_with(3, tools=TOOLS, tool_choice="required", n=2)
    choices = client.chat.completions.create(**body).choices
    ended = [choice for choice in choices if choice.finish_reason == "tool_calls"]
    assert ended  # others may go on to call until max_tokens
    for call in [each for choice in ended for each in choice.message.tool_calls]:
        KINDS[call.function.name].model_validate_json(call.function.arguments)
    named = {"type": "function", "function": {"name": "Move"}}
    (choice,) = client.chat.completions.create(
        **asked_with(4, tools=TOOLS, tool_choice=named)
    ).choices
    assert choice.finish_reason == "tool_calls"
    assert [call.function.name for call in choice.message.tool_calls] == ["Move"]


def test_parse_with_models_of_pydantic(client: openai.OpenAI) -> None:
    for seed in range(3):
        (choice,) = client.chat.completions.parse(
            **asked_with(seed, response_format=Answer)
        ).choices
        assert isinstance(choice.message.parsed, Answer)
        body = asked_with(seed, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
        (choice,) = client.chat.completions.parse(**body).choices
        (call,) = choice.message.tool_calls
        assert isinstance(call.function.parsed_arguments, (Weather, Move))


def test_a_form_beside_tools(client: openai.OpenAI) -> None:
    """An answer is calls or content of the form; random weights come to both."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [1, 2]}}}

    def check(seed: int) -> str:
        body = asked_with(seed, tools=TOOLS, parallel_tool_calls=False, response_format=form)
        (choice,) = client.chat.completions.create(**body).choices
        if choice.message.tool_calls:
            assert choice.message.content is None
        else:
            assert json.loads(choice.message.content) in (1, 2)
        return choice.finish_reason

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(check, range(12))) == {"stop", "tool_calls"}


def test_reasoning_before_a_form(client: openai.OpenAI) -> None:
    """A model that likes to think may."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes"]}}}
    likes = {"266": 20, "64": 32, "267": 28}  # <think>, a, </think>
    thoughts = []
    for seed in range(4):
        body = asked_with(
            seed, response_format=form, extra_body={}, logit_bias=likes, frequency_penalty=2
        )
        reply = client.chat.completions.create(**body)
        (choice,) = reply.choices
        assert choice.finish_reason == "stop"
        assert json.loads(choice.message.content) == "yes"
        thoughts.append(choice.message.model_dump().get("reasoning", ""))
        details = reply.usage.completion_tokens_details
        rest = reply.usage.completion_tokens - details.reasoning_tokens
        assert len('"yes"') + 1 <= rest <= len('\n\n"yes"') + 1  # and the end token
    assert any(thoughts)


@pytest.mark.parametrize("likes", [30, -30], ids=["as tokens", "spelled out"])
def test_markers_that_are_special_tokens(client: openai.OpenAI, likes: int) -> None:
    body = asked_with(
        1,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        logit_bias={"264": likes, "265": likes},
        extra_body=NOT_THINKING | {"return_token_ids": True},
    )
    (choice,) = client.chat.completions.create(**body).choices
    (call,) = choice.message.tool_calls
    KINDS[call.function.name].model_validate_json(call.function.arguments)
    assert choice.message.content is None
    assert ({264, 265} <= set(choice.model_extra["token_ids"])) == (likes > 0)
    assert streamed(client, **body)[1][0]["name"] == call.function.name
