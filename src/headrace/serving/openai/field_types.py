"""Types of request fields that may hold very many entries.

Of a list whose every entry is wrong the first one is told, and the rest is not looked at: else a
body of 16 MB made millions of faults, which took minutes and gigabytes.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, Field, WithJsonSchema

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
