"""Tool calls of earlier messages, as chat templates want them.

OpenAI's clients send arguments as JSON text; templates, written against transformers, mostly want
the object.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.base.errors import RequestError
from headrace.base.shown import shown


def with_arguments(calls: Any, index: int, *, as_text: bool) -> list[dict[str, Any]]:
    """A copy of the calls of message `index`, arguments as JSON text or as objects.

    Raises:
        RequestError: they are no calls, or the arguments are no JSON object.
    """
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise RequestError(f"tool_calls of message {index} is {shown(calls)}, not a list")
    return [
        _call(call, f"tool call {place} of message {index}", as_text)
        for place, call in enumerate(calls)
    ]


def _call(call: Any, place: str, as_text: bool) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(
            f"{place} is {shown(call)}",
            remedy="Send an object with function, an object with name and arguments",
        )
    arguments = function.get("arguments")
    if as_text:
        made: Any = arguments if isinstance(arguments, str) else _text(arguments)
    else:
        made = _object(arguments, place)
    return {**call, "function": {**function, "arguments": made}}


def _text(arguments: Any) -> str:
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False)


def _object(arguments: Any, place: str) -> Mapping[str, Any]:
    if arguments is None or arguments == "":
        return {}
    value = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, Mapping):
        raise RequestError(
            f"{place} has the arguments {shown(arguments)}", remedy="Send a JSON object as text"
        )
    return value
