"""POST /tokenize and /detokenize, also under /v1. Many texts leave room for what others ask."""

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from headrace.serving.answer import json_response
from headrace.serving.body_route import BodyRoute
from headrace.serving.errors import check_count, invalid, of_fields
from headrace.serving.openai.chat_plan import chat_prompt
from headrace.serving.openai.chat_request import ChatRequest, Message
from headrace.serving.openai.field_types import IntegerLists, Integers, Objects, Texts
from headrace.serving.openai.refused_fields import check_extra_fields
from headrace.serving.openapi import replies
from headrace.serving.prompts import decode, encode, tokenizer_of
from headrace.serving.service import Service, service_of
from headrace.text.tokenizer import Tokenizer

router = APIRouter(tags=["tokens"], route_class=BodyRoute)


class TokenizeRequest(BaseModel):
    """A text, several texts, or a conversation."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    prompt: str | Texts | None = None
    messages: list[Message] | None = Field(None, min_length=1, fail_fast=True)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Objects | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    """Token ids of a text, or of several."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    tokens: Integers | IntegerLists
    skip_special_tokens: bool = False


@router.post("/tokenize", responses=replies())
@router.post("/v1/tokenize", responses=replies())
async def tokenize(
    body: TokenizeRequest, service: Annotated[Service, Depends(service_of)]
) -> Response:
    """Token ids, how many they are, and how many the context holds."""
    service.check_model(body.model)
    check_extra_fields(body, service)
    tokenizer = tokenizer_of(service)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("Send prompt or messages, one of them", "prompt")
    special = body.add_special_tokens
    if body.messages is not None:
        fields = body.model_dump(exclude={"prompt", "return_token_strs", "model"})
        with of_fields():
            chat = ChatRequest.model_validate(fields)
        text = await chat_prompt(service, chat)
        listed = [await _ids(service, text, bool(special))]
    else:
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt or []
        _check_parts(service, texts, "prompt")
        with_special = special is not False
        listed = [await _ids(service, text, with_special) for text in texts]
    is_one = not isinstance(body.prompt, list)
    reply: dict[str, Any] = {
        "tokens": listed[0] if is_one else listed,
        "count": len(listed[0]) if is_one else [len(ids) for ids in listed],
        "max_model_len": service.info.max_model_len,
    }
    if body.return_token_strs:
        words = await asyncio.to_thread(_words, tokenizer, listed)
        reply["token_strs"] = words[0] if is_one else words
    return json_response(reply)


@router.post("/detokenize", responses=replies())
@router.post("/v1/detokenize", responses=replies())
async def detokenize(
    body: DetokenizeRequest, service: Annotated[Service, Depends(service_of)]
) -> Response:
    """The text, under the two names that clients look for."""
    service.check_model(body.model)
    check_extra_fields(body, service)
    is_many = bool(body.tokens) and isinstance(body.tokens[0], list)
    listed: list[Any] = body.tokens if is_many else [body.tokens]
    _check_parts(service, listed, "tokens")
    skip = body.skip_special_tokens
    texts = [await _text(service, ids, skip) for ids in listed]
    text = texts if is_many else texts[0]
    return json_response({"text": text, "prompt": text})


def _words(tokenizer: Tokenizer, listed: Sequence[Sequence[int]]) -> list[list[str]]:
    return [[tokenizer.token_text(token) for token in ids] for ids in listed]


async def _ids(service: Service, text: str, add_special_tokens: bool) -> list[int]:
    await asyncio.sleep(0)
    return await encode(service, text, add_special_tokens=add_special_tokens, must_fit=False)


async def _text(service: Service, ids: Sequence[int], skip_special_tokens: bool) -> str:
    await asyncio.sleep(0)
    return await decode(service, ids, skip_special_tokens=skip_special_tokens)


def _check_parts(service: Service, listed: Sequence[Any], name: str) -> None:
    told = f"{name} has {len(listed)} parts"
    check_count(len(listed), service.config.max_prompts, told, name)
