"""Values that a model wrote as plain text or in Python's manner, as JSON text."""

import ast
import json
import warnings
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from headrace.serving.parsers.json_text import is_object, is_value

_LITERALS = {"True": "true", "False": "false", "None": "null"}
_IMPLIED = {"properties": "object", "additionalProperties": "object", "items": "array"}
_DEEPEST = 20


def json_of(text: str, schema: Any, root: Mapping[str, Any]) -> str:
    """The text as the schema of its parameter means it.

    JSON where the schema allows its type: numbers keep their digits, and True, False and None are
    taken too. Anything else is a string, also where the schema says nothing.

    Args:
        root: the schema that this one is a part of.
    """
    types = allowed_types(schema, root)
    candidate = text.strip()
    candidate = _LITERALS.get(candidate, candidate)
    kind = _type_of(candidate)
    if kind is None and types & {"object", "array"}:
        candidate = _from_python(candidate)
        kind = _type_of(candidate)
    if kind is not None and (kind in types or (kind == "integer" and "number" in types)):
        return candidate
    return json.dumps(text, ensure_ascii=False)


def allowed_types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The JSON types that a schema lets a value have, as far as it names them."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return frozenset()
    if isinstance(schema.get("$ref"), str):
        return allowed_types(_referred(schema["$ref"], root), root, depth + 1)
    named = schema.get("type")
    found = {named} if isinstance(named, str) else set()
    if isinstance(named, list | tuple):
        found.update(each for each in named if isinstance(each, str))
    for key in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(key)
        for part in parts if isinstance(parts, list | tuple) else ():
            found |= allowed_types(part, root, depth + 1)
    if not found:
        found.update(kind for word, kind in _IMPLIED.items() if word in schema)
    if not found:
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        for value in values if isinstance(values, list | tuple) else ():
            found.add(_type_of(json.dumps(value, default=str)) or "string")
    if schema.get("nullable") is True:
        found.add("null")
    return frozenset(found)


def _referred(ref: str, root: Mapping[str, Any]) -> Any:
    """The schema at a place like `#/$defs/a`; `None` where there is none."""
    found: Any = root
    for part in unquote(ref).removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def python_to_json(tree: ast.expr, depth: int = 0) -> str:
    """A literal of Python as JSON text.

    Raises:
        ValueError: it is no literal, or JSON has no such value.
    """
    if depth > _DEEPEST:
        raise ValueError("too deep")
    match tree:
        case ast.Constant(value=str() as value):
            value.encode()  # half of a surrogate pair is a ValueError too
            return json.dumps(value, ensure_ascii=False)
        case ast.Constant(value=bool() | int() | float() | None as value):
            return json.dumps(value, allow_nan=False)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return json.dumps(-value, allow_nan=False)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return "[" + ", ".join(python_to_json(each, depth + 1) for each in items) + "]"
        case ast.Dict(keys=keys, values=members):
            pairs = []
            for key, member in zip(keys, members, strict=True):
                if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
                    raise ValueError("a key that is no string")
                pairs.append(f"{python_to_json(key)}: {python_to_json(member, depth + 1)}")
            return "{" + ", ".join(pairs) + "}"
        case ast.Name(id="true" | "false" | "null" as name):
            return name
        case _:
            raise ValueError("no literal")


def parsed_python(text: str) -> ast.expr | None:
    """The expression, or `None`: whatever a model writes must stop nobody."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd escapes are the model's business
            return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _from_python(text: str) -> str:
    tree = parsed_python(text)
    if tree is None:
        return text
    try:
        return python_to_json(tree)
    except ValueError:
        return text


def _type_of(text: str) -> str | None:
    """The JSON type of a JSON text; `None` if it is no JSON."""
    if not is_value(text):
        return None
    first = text[:1]
    if first == "{":
        return "object" if is_object(text) else None
    if first in '["':
        return "array" if first == "[" else "string"
    if first in "tf":
        return "boolean"
    if first == "n":
        return "null"
    return "number" if set(text) & set(".eE") else "integer"
