"""JSON schemas drawn at random whose answers are all short."""

import random
from typing import Any

PATTERNS = [
    "^[A-Z]{2}-[0-9]{1,3}$",
    "^(red|green|blue)$",
    "^[a-f0-9]{4}$",
    "^.{1,3}$",
    "^x?y{0,2}$",
]
FORMATS = ["uuid", "date", "ipv4", "time"]
CONSTANTS: list[Any] = ["", "yes", 'q"uo\\te', "é😀", 0, -7, 2.5, None, True, {"k": [1]}, []]
NAMES = ["a", "id", "name", "kind", "é", 'odd"name', "x y"]


def bounded_schema(seed: int) -> dict[str, Any]:
    """A schema of which every answer is shorter than about 400 bytes."""
    draw = random.Random(seed)
    schema = _schema(draw, levels=2)
    if draw.random() < 0.3:
        inner = _object(draw, levels=1)
        return {
            "type": "object",
            "properties": {"first": {"$ref": "#/$defs/part"}, "second": {"$ref": "#/$defs/part"}},
            "required": draw.choice([[], ["first"], ["second", "first"]]),
            "$defs": {"part": inner},
        }
    return schema


def _schema(draw: random.Random, levels: int) -> dict[str, Any]:
    if levels and draw.random() < 0.7:
        return draw.choice([_object, _object, _array, _tuple, _any_of])(draw, levels)
    return draw.choice([_string, _integer, _enum, _plain, _mixed])(draw)


def _object(draw: random.Random, levels: int) -> dict[str, Any]:
    names = draw.sample(NAMES, draw.randint(1, 3))
    schema: dict[str, Any] = {
        "type": "object",
        "title": "an object",
        "properties": {name: _schema(draw, levels - 1) for name in names},
    }
    if draw.random() < 0.7:
        schema["required"] = draw.sample(names, draw.randint(1, len(names)))
    if draw.random() < 0.5:
        schema["additionalProperties"] = False
    if draw.random() < 0.2:
        schema["minProperties"] = 1
    return schema


def _array(draw: random.Random, levels: int) -> dict[str, Any]:
    most = draw.randint(0, 2)
    items = _schema(draw, levels - 1)
    return {"type": "array", "items": items, "minItems": draw.randint(0, most), "maxItems": most}


def _tuple(draw: random.Random, levels: int) -> dict[str, Any]:
    prefix = [_schema(draw, levels - 1) for _ in range(2)]
    return {"type": "array", "prefixItems": prefix, "items": False, "minItems": draw.randint(0, 2)}


def _any_of(draw: random.Random, levels: int) -> dict[str, Any]:
    return {"anyOf": [_schema(draw, levels - 1) for _ in range(2)]}


def _string(draw: random.Random) -> dict[str, Any]:
    shape = draw.randrange(3)
    if shape == 0:
        low = draw.randint(0, 4)
        return {"type": "string", "minLength": low, "maxLength": low + draw.randint(0, 4)}
    if shape == 1:
        return {"type": "string", "pattern": draw.choice(PATTERNS)}
    return {"type": "string", "format": draw.choice(FORMATS)}


def _integer(draw: random.Random) -> dict[str, Any]:
    low = draw.randint(-1000, 1000)
    schema = {"type": "integer", "minimum": low, "maximum": low + draw.randint(6, 500)}
    if draw.random() < 0.3:
        schema["multipleOf"] = draw.randint(2, 5)
    return schema


def _enum(draw: random.Random) -> dict[str, Any]:
    if draw.random() < 0.3:
        return {"const": draw.choice(CONSTANTS)}
    return {"enum": draw.sample(CONSTANTS, draw.randint(1, 4))}


def _plain(draw: random.Random) -> dict[str, Any]:
    return {"type": draw.choice(["boolean", "null"])}


def _mixed(draw: random.Random) -> dict[str, Any]:
    return {"type": ["string", "null"], "maxLength": draw.randint(0, 4)}
