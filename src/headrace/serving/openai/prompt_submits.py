"""The prompts of a request as requests of the engine, texts tokenised."""

import asyncio
from collections.abc import Sequence
from typing import Any

from headrace.request.messages import Submit
from headrace.serving.errors import of_prompt
from headrace.serving.openai.field_types import Prompt, RequestFields
from headrace.serving.prompts import encode
from headrace.serving.service import Service


async def submits_of(
    service: Service,
    body: RequestFields,
    name: str,
    prompts: Sequence[Prompt],
    *,
    field: str,
    **options: Any,
) -> list[Submit]:
    """One for each prompt.

    Args:
        body: the request. name: id of the answer; of several prompts each has its place behind it.
        field: that brings them, for what is told of errors.
        options: other fields of every `Submit`.

    Raises:
        ApiError: 400; no tokenizer, no valid Unicode, or too long.
    """
    is_one, submits = len(prompts) == 1, []
    special = body.add_special_tokens is not False
    for place, prompt in enumerate(prompts):
        if place:
            await asyncio.sleep(0)  # a thousand prompts leave room for what others ask
        with of_prompt(None if is_one else place, field):
            ids = (
                await encode(service, prompt, add_special_tokens=special)
                if isinstance(prompt, str)
                else prompt
            )
        submits.append(
            Submit(
                request_id=name if is_one else f"{name}/{place}",
                prompt_token_ids=ids,
                prompt_text=prompt if isinstance(prompt, str) else None,
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
                **options,
            )
        )
    return submits
