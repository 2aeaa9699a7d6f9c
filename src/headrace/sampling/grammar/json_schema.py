"""JSON schemas: what xgrammar would pass over is refused, so that answers validate.

Each keyword was tried against xgrammar 0.2.9: those here hold in the combinations let through.
What is let through may be held to more strictly than the schema says: properties come in their
order, objects with `properties` have no others, patterns match the whole string.
"""

import json
from difflib import get_close_matches
from typing import Any
from urllib.parse import unquote

from headrace.base.shown import shown
from headrace.sampling.grammar.json_schema_values import (
    KEYWORDS,
    Pointer,
    are_disjoint,
    check_counts,
    check_numbers,
    checked_pattern,
    kind_of,
    refused,
    string_in_their_terms,
)

MAX_DEPTH = 64
MAX_NODES = 5_000
MAX_ENUM_VALUES = 10_000

_DEFINITIONS = ("$defs", "definitions")
_ANNOTATIONS = frozenset(
    {
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "$schema",
        "discriminator",
    }
)
_WHOLE = {  # these say all about a value; the keywords that may stand beside each
    "$ref": frozenset[str](),
    "const": frozenset({"type"}),
    "enum": frozenset({"type"}),
    "anyOf": frozenset[str](),
    "oneOf": frozenset[str](),
    "allOf": frozenset[str](),
}


def checked_schema(text: str, *, within_text: bool = False) -> str:
    """The schema in xgrammar's terms.

    Args:
        within_text: it describes a part of an answer, whose strings nobody else looks after.

    Raises:
        RequestError: a keyword, a combination or a size that is not supported, and where it is.
    """
    root = json.loads(text)
    return json.dumps(_Checker(root, within_text).checked(), ensure_ascii=False)


class _Checker:
    def __init__(self, root: Any, within_text: bool) -> None:
        self._root, self._within_text = root, within_text
        self._seen: set[Pointer] = set()  # every place that holds a schema
        self._refs: list[tuple[Pointer, str]] = []
        self._one_ofs: list[tuple[Pointer, list[Any]]] = []
        self._values = 0

    def checked(self) -> Any:
        schema = self._node(self._root, ())
        for at, ref in self._refs:
            if _pointer(ref) not in self._seen:
                raise refused(at, f"$ref {shown(ref)} names no schema of this one")
        for at, branches in self._one_ofs:
            for place, one in enumerate(branches):
                if not all(are_disjoint(one, other, self._resolve) for other in branches[:place]):
                    raise refused(
                        at, "oneOf is supported where no value can meet two of its schemas"
                    )
        return schema

    def _node(self, schema: Any, at: Pointer) -> dict[str, Any]:
        self._seen.add(at)
        if len(self._seen) > MAX_NODES or len(at) > 2 * MAX_DEPTH:
            raise refused(at, f"the schema has more than {MAX_NODES} parts or {MAX_DEPTH} levels")
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            raise refused(at, f"{shown(schema)} is no schema that an answer can meet")
        stated = {
            key: value
            for key, value in schema.items()
            if key not in _ANNOTATIONS and not key.startswith("x-") and (key != "$id" or at)
        }
        out: dict[str, Any] = {}
        for name in _DEFINITIONS:
            if name in stated:
                out[name] = self._map(stated.pop(name), (*at, name))
        whole = next((name for name in _WHOLE if name in stated), None)
        if whole is not None:
            extra = sorted(set(stated) - {whole} - _WHOLE[whole])
            if extra:
                raise refused(at, f"{whole} cannot be combined with {', '.join(extra)}")
            return out | self._whole(whole, stated, at)
        return out | self._typed(stated, at)

    def _whole(self, name: str, stated: dict[str, Any], at: Pointer) -> dict[str, Any]:
        value = stated[name]
        if name == "$ref":
            if not isinstance(value, str):
                raise refused(at, "$ref is no string")
            self._refs.append((at, value))
            return {"$ref": value}
        if name in ("const", "enum"):
            return {name: self._constants(name, stated, at)}
        if not isinstance(value, list) or not value:
            raise refused(at, f"{name} is no list of schemas")
        if name == "allOf" and len(value) > 1:
            raise refused(at, "allOf with several schemas is not supported")
        if name == "oneOf":
            self._one_ofs.append((at, value))
        return {name: [self._node(each, (*at, name, str(i))) for i, each in enumerate(value)]}

    def _constants(self, name: str, stated: dict[str, Any], at: Pointer) -> Any:
        values = [stated[name]] if name == "const" else stated[name]
        if not isinstance(values, list) or not values:
            raise refused(at, "enum is no list of values")
        self._values += len(values)
        if self._values > MAX_ENUM_VALUES:
            raise refused(at, f"the schema names more than {MAX_ENUM_VALUES} values")
        kinds = _types(stated, at)
        for value in values:
            kind = kind_of(value)
            if kinds and kind not in kinds and not (kind == "integer" and "number" in kinds):
                raise refused(at, f"{name} holds {shown(value)}, which type forbids")
            if kind in ("integer", "number") and abs(value) > 2**53:
                raise refused(at, f"{name} holds {shown(value)}: numbers go up to 2**53")
        return stated[name]

    def _typed(self, stated: dict[str, Any], at: Pointer) -> dict[str, Any]:
        kinds = _types(stated, at)
        if not kinds and stated:
            kinds = [
                kind for kind in ("object", "array", "string") if set(stated) <= KEYWORDS[kind]
            ]
        keywords = {key: value for key, value in stated.items() if key != "type"}
        known = frozenset[str]().union(*(KEYWORDS[kind] for kind in kinds))
        for key in keywords:
            if key not in known:
                raise refused(at, _why_not(key, kinds))
        if not kinds:
            return {}
        out: dict[str, Any] = {"type": kinds[0] if len(kinds) == 1 else kinds}
        if "string" in kinds:
            string_in_their_terms(keywords, self._within_text, at)
        if "integer" in kinds or "number" in kinds:
            check_numbers(keywords, kinds, at)
        out |= {key: value for key, value in keywords.items() if not isinstance(value, dict | list)}
        out.pop("uniqueItems", None)
        if "array" in kinds:
            out |= self._array(keywords, at)
        if "object" in kinds:
            out |= self._object(keywords, at)
        return out

    def _array(self, keywords: dict[str, Any], at: Pointer) -> dict[str, Any]:
        if keywords.get("uniqueItems", False) is not False:
            raise refused(at, "uniqueItems is not supported")
        check_counts(keywords, ("minItems", "maxItems"), at)
        out: dict[str, Any] = {}
        for name in ("items", "unevaluatedItems"):
            if name in keywords:
                value = keywords[name]
                out[name] = value is not False and self._node(value, (*at, name))
        if len(out) > 1:
            raise refused(at, "items and unevaluatedItems do not go together")
        if "prefixItems" in keywords:
            prefix = keywords["prefixItems"]
            if not isinstance(prefix, list) or not prefix:
                raise refused(at, "prefixItems is no list of schemas")
            out["prefixItems"] = [
                self._node(each, (*at, "prefixItems", str(i))) for i, each in enumerate(prefix)
            ]
        return out

    def _object(self, keywords: dict[str, Any], at: Pointer) -> dict[str, Any]:
        check_counts(keywords, ("minProperties", "maxProperties"), at)
        out: dict[str, Any] = {}
        properties = self._map(keywords.get("properties", {}), (*at, "properties"))
        further: list[str] = [
            name for name in ("additionalProperties", "unevaluatedProperties") if name in keywords
        ]
        if len(further) > 1:
            raise refused(at, f"{' and '.join(further)} do not go together")
        if properties:
            out["properties"] = properties
            self._check_closed(keywords, further, at)
            out |= dict.fromkeys(further, False)
            if len(properties) > 32 and {"minProperties", "maxProperties"} & set(keywords):
                raise refused(at, "minProperties and maxProperties take at most 32 properties")
        else:
            if keywords.get("minProperties"):
                raise refused(at, "minProperties is supported beside properties only")
            for name in further:
                value = keywords[name]
                out[name] = value is not False and self._node(value, (*at, name))
            out |= self._names(keywords, further, at)
        required = keywords.get("required", [])
        if not isinstance(required, list) or any(name not in properties for name in required):
            raise refused(at, "required is no list of names that properties has")
        if required:
            out["required"] = required
        return out

    def _check_closed(self, keywords: dict[str, Any], further: list[str], at: Pointer) -> None:
        """Objects with named properties have no others: a further one could spell the name of a
        named one in another way."""
        for name in ("patternProperties", "propertyNames"):
            if name in keywords:
                raise refused(at, f"{name} cannot be combined with properties")
        for name in further:
            if not isinstance(keywords[name], bool) and keywords[name] != {}:
                raise refused(at, f"{name} with a schema cannot be combined with properties")

    def _names(self, keywords: dict[str, Any], further: list[str], at: Pointer) -> dict[str, Any]:
        """`patternProperties` or `propertyNames` of an object without `properties`."""
        out: dict[str, Any] = {}
        if "patternProperties" in keywords:
            patterns = keywords["patternProperties"]
            if not isinstance(patterns, dict) or len(patterns) != 1:
                raise refused(at, "patternProperties is supported with one pattern")
            if "propertyNames" in keywords or any(keywords[name] is not False for name in further):
                raise refused(at, "patternProperties cannot be combined with other names")
            ((pattern, schema),) = patterns.items()
            checked = checked_pattern(pattern, at)
            node = self._node(schema, (*at, "patternProperties", pattern))
            out["patternProperties"] = {checked: node}
        if "propertyNames" in keywords:
            names = self._node(keywords["propertyNames"], (*at, "propertyNames"))
            if not set(names) <= {"type", "pattern", "minLength", "maxLength", "enum"}:
                raise refused(at, "propertyNames is supported with pattern, lengths or enum")
            if names.get("type", "string") != "string" or any(
                not isinstance(name, str) for name in names.get("enum", [])
            ):
                raise refused(at, "propertyNames are strings")
            out["propertyNames"] = names
        return out

    def _map(self, schemas: Any, at: Pointer) -> dict[str, Any]:
        if not isinstance(schemas, dict):
            raise refused(at, "it is no object of schemas")
        return {name: self._node(schema, (*at, name)) for name, schema in schemas.items()}

    def _resolve(self, schema: Any) -> Any:
        """The schema that a chain of `$ref`s leads to; `{}` when it leads nowhere."""
        for _ in range(MAX_DEPTH):
            if not (isinstance(schema, dict) and isinstance(schema.get("$ref"), str)):
                return schema
            target: Any = self._root
            for part in _pointer(schema["$ref"]) or ():
                target = _part(target, part)
            schema = target
        return {}


def _types(stated: dict[str, Any], at: Pointer) -> list[str]:
    value = stated.get("type", [])
    kinds = [value] if isinstance(value, str) else value
    if not isinstance(kinds, list) or ("type" in stated and not kinds):
        raise refused(at, "type is neither a name nor a list of names")
    for kind in kinds:
        if not isinstance(kind, str) or kind not in KEYWORDS:
            raise refused(at, f"type {shown(kind)} is unknown")
    return list(dict.fromkeys(kinds))


def _why_not(key: str, kinds: list[str]) -> str:
    every = frozenset[str]().union(*KEYWORDS.values(), _WHOLE, _DEFINITIONS)
    if key in every:
        return f"{key} says nothing about type {', '.join(kinds)}" if kinds else f"{key} needs type"
    close = get_close_matches(key, every, n=1)
    return f"{key} is not supported" + (f" ({close[0]}?)" if close else "")


def _part(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return value.get(name, {})
    is_index = isinstance(value, list) and name.isdecimal() and int(name) < len(value)
    return value[int(name)] if is_index else {}


def _pointer(ref: str) -> Pointer | None:
    """`#/$defs/a~1b` as ("$defs", "a/b"); `None` for what leads out of the schema."""
    if ref == "#":
        return ()
    if not ref.startswith("#/"):
        return None
    return tuple(unquote(part).replace("~1", "/").replace("~0", "~") for part in ref[2:].split("/"))
