"""The field of a request that holds its prompts: texts, or token ids."""

from typing import Annotated, Any

from pydantic import AfterValidator, WithJsonSchema

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
