"""Fields that all requests have, and types of fields that may hold very many entries.

Of a list whose every entry is wrong the first one is told, and the rest is not looked at: else a
body of 16 MB made millions of faults, which took minutes and gigabytes.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

Texts = Annotated[list[str], Field(fail_fast=True)]
Integers = Annotated[list[int], Field(fail_fast=True)]
IntegerLists = Annotated[list[Integers], Field(fail_fast=True)]
Switches = Annotated[list[bool], Field(fail_fast=True)]
SwitchesOrTexts = Annotated[list[bool | str], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


def _numbers(value: dict[str, Any]) -> dict[str, float]:
    for key, number in value.items():
        if type(number) not in (int, float):
            raise ValueError(f"holds something under {key[:40]!r} that is no number")
    return value


Numbers = Annotated[
    dict[str, Any],
    AfterValidator(_numbers),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}}),
]

_LONGEST_ID = 128


def check_id(name: str) -> str:
    """Ids of requests stand in logs, where a line break would begin a line of the sender's own.

    Raises:
        ValueError: an id that cannot be one.
    """
    if not (0 < len(name) <= _LONGEST_ID and name.isprintable()):
        raise ValueError(f"must be 1 to {_LONGEST_ID} printable characters")
    return name


RequestId = Annotated[str, AfterValidator(check_id)]

Prompt = str | list[int]

_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {
            "type": "array",
            "items": {
                "type": "array",
                "items": {"type": "integer", "minimum": 0},
                "minItems": 1,
            },
            "minItems": 1,
        },
    ],
    "description": "a text, token ids, or a list of either",
}


def listed_prompts(value: Any) -> list[Prompt]:
    """The prompts of a request, each a text or token ids.

    One look at each part: a union type would try every branch on every token of a long prompt and
    report the faults of all.

    Raises:
        ValueError: what is neither; pydantic makes it a fault of the field.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a text, a list of token ids, or a list of these, and not empty")
    if set(map(type, value)) == {int}:
        return [value]
    for part in value:
        if isinstance(part, str):
            continue
        if not isinstance(part, list) or not set(map(type, part)) <= {int}:
            raise ValueError("holds something that is neither a text nor token ids")
        if not part:
            raise ValueError("holds an empty prompt")
    return value


PromptField = Annotated[Any, AfterValidator(listed_prompts), WithJsonSchema(_PROMPT_SCHEMA)]


class RequestFields(BaseModel):
    """Fields of all requests in OpenAI's manner."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    add_special_tokens: bool | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(None, max_length=256)
