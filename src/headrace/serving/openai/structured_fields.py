"""Fields that ask for a form of the answer, in the ways of OpenAI, SGLang and vLLM, and the one
`StructuredOutput` they come to.

What a form may hold is checked by `StructuredOutput` and by the grammar engine, whose words come
back as 400 before a reply begins.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from headrace.base.errors import RequestError
from headrace.base.shown import shown
from headrace.request.other_words import FORMS
from headrace.request.structured_output import StructuredOutput
from headrace.serving.errors import ApiError, invalid
from headrace.serving.openai.field_types import Texts

Form = tuple[str, dict[str, Any]]  # the field that asks for it, arguments of `StructuredOutput`

# What vLLM's structured_outputs holds -> ours.
_VLLM = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "grammar": "grammar",
    "choice": "choice",
    "structural_tag": "structural_tag",
}
# Switches of it that change nothing here: there is no other grammar engine to fall back to, and
# objects with properties never have others.
_WITHOUT_EFFECT = ("disable_fallback", "disable_additional_properties")


class StructuredFields(BaseModel):
    """Of a request one at most may ask for a form."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    json_schema: str | bool | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    guided_json: str | bool | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: Texts | None = None


def structured_output(fields: StructuredFields) -> StructuredOutput | None:
    """The form a request asks for.

    Raises:
        ApiError: 400; several forms, or one that cannot be.
    """
    forms = list(of_plain_fields({name: getattr(fields, name) for name in FORMS}))
    if fields.response_format is not None:
        forms += _of_response_format(fields.response_format)
    if fields.structured_outputs is not None:
        forms += _of_structured_outputs(fields.structured_outputs)
    return one_form(forms)


def of_plain_fields(fields: Mapping[str, Any]) -> Iterator[Form]:
    """Forms that are asked for by a field of their own; empty texts ask for none."""
    for name, value in fields.items():
        if value is not None and value != "":
            yield name, {FORMS[name]: legacy_as_tag(value) if "tag" in name else value}


def one_form(forms: list[Form]) -> StructuredOutput | None:
    """The form, if there is one.

    Raises:
        ApiError: 400; several forms, or one that cannot be.
    """
    if not forms:
        return None
    if len(forms) > 1:
        asked = " and ".join(name for name, _ in forms)
        raise invalid(f"{asked} ask for different forms of one answer; send one", forms[1][0])
    name, arguments = forms[0]
    try:
        return StructuredOutput(**arguments)
    except RequestError as error:
        raise ApiError(400, f"{name}: {error}", param=name) from error


def _of_response_format(value: Mapping[str, Any]) -> list[Form]:
    name, kind = "response_format", value.get("type")
    match kind:
        case "text":
            return []
        case "json_object" if value.get("schema") is not None:  # llama.cpp's way
            return [(name, {"json_schema": value["schema"]})]
        case "json_object":
            return [(name, {"json_object": True})]
        case "json_schema":
            return [(name, {"json_schema": _schema_of(value)})]
        case "structural_tag":
            return [(name, {"structural_tag": legacy_as_tag(value)})]
    raise invalid(
        f"response_format.type is {shown(kind)}. Allowed: text, json_object, json_schema, "
        "structural_tag",
        name,
    )


def _schema_of(value: Mapping[str, Any]) -> Any:
    described = value.get("json_schema")
    if not isinstance(described, Mapping):
        raise invalid(
            "response_format of type json_schema needs json_schema, an object with name and schema",
            "response_format",
        )
    for key in ("name", "description"):
        if not isinstance(described.get(key, ""), str | None):
            raise invalid(
                f"response_format.json_schema.{key} is {shown(described[key])}, not a text",
                "response_format",
            )
    if not isinstance(described.get("strict"), bool | None):
        raise invalid("response_format.json_schema.strict is not true or false", "response_format")
    if described.get("schema") is None:
        raise invalid("response_format.json_schema has no schema", "response_format")
    return described["schema"]


def _of_structured_outputs(value: Mapping[str, Any]) -> list[Form]:
    name = "structured_outputs"
    layout: dict[str, Any] = {}
    forms: list[Form] = []
    for key, part in value.items():
        if part is None or (key == "json_object" and part is False):
            continue
        if key in _VLLM:
            made = legacy_as_tag(part) if key == "structural_tag" else part
            forms.append((f"{name}.{key}", {_VLLM[key]: made}))
        elif key == "disable_any_whitespace":
            layout = {"any_whitespace": part is False}
        elif key not in _WITHOUT_EFFECT:
            raise invalid(f"{name}.{shown(key)} is {shown(part)}, which is not supported", name)
    if not forms:
        raise invalid(f"{name} has no form. Allowed: one of {', '.join(_VLLM)}", name)
    if layout.get("any_whitespace") and set(forms[0][1]) & {"json_schema", "json_object"}:
        forms[0][1].update(layout)
    return forms


def as_part(structured: StructuredOutput) -> dict[str, Any]:
    """The form as a part of a structural tag, in which other parts may come before it."""
    text = structured.text
    match structured.kind:
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "json_schema":
            return {"type": "json_schema", "json_schema": json.loads(text)}
        case "choice":
            values = [{"type": "const_string", "value": each} for each in json.loads(text)]
            return {"type": "or", "elements": values}
        case "regex":
            return {"type": "regex", "pattern": text}
        case "grammar":
            return {"type": "grammar", "grammar": text}
    tag: dict[str, Any] = json.loads(text)
    part = tag.get("format")
    if not isinstance(part, dict):
        raise invalid("structural_tag has no format, an object", "structural_tag")
    return part


def legacy_as_tag(value: Any) -> Any:
    """SGLang's older structural tags, {structures: [{begin, schema, end}], triggers}, in the terms
    of the newer ones; anything else as it is, for others to judge."""
    if isinstance(value, str) and '"structures"' in value:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return value
    if not isinstance(value, Mapping) or "structures" not in value:
        return value
    structures = value["structures"]
    if not isinstance(structures, list) or not all(
        isinstance(each, Mapping) for each in structures
    ):
        raise invalid("structural_tag: structures is no list of objects", "structural_tag")
    return {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": value.get("triggers", []),
            "tags": [
                {
                    "type": "tag",
                    "begin": each.get("begin"),
                    "content": {"type": "json_schema", "json_schema": each.get("schema", {})},
                    "end": each.get("end"),
                }
                for each in structures
            ],
        },
    }
