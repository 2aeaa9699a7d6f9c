"""Structural tags: the schemas and expressions inside are held to the same rules as any other."""

import json
from typing import Any

from headrace.base.errors import RequestError
from headrace.sampling.json_schema import MAX_DEPTH, checked_schema
from headrace.sampling.regex_text import checked_regex

MAX_BLANKS = 1  # at a place within JSON, which else could fill up with them


def checked_structural_tag(text: str) -> str:
    """The tag in xgrammar's terms.

    Raises:
        RequestError: something in it would be passed over.
    """
    return json.dumps(_checked(json.loads(text), 0), ensure_ascii=False)


def _checked(part: Any, depth: int) -> Any:
    if depth > 2 * MAX_DEPTH:
        raise RequestError(
            "The structural tag cannot be used", why=f"it has more than {2 * MAX_DEPTH} levels"
        )
    if isinstance(part, list):
        return [_checked(each, depth + 1) for each in part]
    if not isinstance(part, dict):
        return part
    out: dict[str, Any] = {}
    for key, value in part.items():
        is_schema = key == "json_schema" or (key == "schema" and "begin" in part)
        if is_schema and isinstance(value, dict | bool):
            out[key] = json.loads(checked_schema(json.dumps(value), within_text=True))
        elif key == "pattern" and part.get("type") == "regex" and isinstance(value, str):
            out[key] = checked_regex(value)
        else:
            out[key] = _checked(value, depth + 1)
    if part.get("type") == "json_schema" and part.get("style", "json") == "json":
        out.setdefault("max_whitespace_cnt", MAX_BLANKS)
    return out
