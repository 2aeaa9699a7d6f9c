"""Structural tags: the schemas and expressions inside are held to the same rules as any other."""

import json
from typing import Any

from headrace.base.errors import RequestError
from headrace.base.shown import shown
from headrace.sampling.grammar.json_schema import MAX_DEPTH, checked_schema
from headrace.sampling.grammar.regex_text import checked_regex

MAX_BLANKS = 1  # at a place within JSON, which else could fill up with them


def checked_structural_tag(text: str) -> str:
    """The tag in xgrammar's terms.

    Raises:
        RequestError: something in it would be passed over.
    """
    return json.dumps(_checked(json.loads(text), 0, ""), ensure_ascii=False)


def _checked(part: Any, depth: int, begin: str) -> Any:
    """`begin`: of the tag that the part is in."""
    if depth > 2 * MAX_DEPTH:
        raise RequestError(
            "The structural tag cannot be used", why=f"it has more than {2 * MAX_DEPTH} levels"
        )
    if isinstance(part, list):
        return [_checked(each, depth + 1, begin) for each in part]
    if not isinstance(part, dict):
        return part
    out: dict[str, Any] = {}
    if part.get("type") == "tag":
        begin = str(part.get("begin"))
    for key, value in part.items():
        is_schema = key == "json_schema" or (key == "schema" and "begin" in part)
        if is_schema and isinstance(value, dict | bool):
            out[key] = _schema(value, begin)
        elif key == "pattern" and part.get("type") == "regex" and isinstance(value, str):
            out[key] = checked_regex(value)
        else:
            out[key] = _checked(value, depth + 1, begin)
    if part.get("type") == "json_schema" and part.get("style", "json") == "json":
        out.setdefault("max_whitespace_cnt", MAX_BLANKS)
    return out


def _schema(value: Any, begin: str) -> Any:
    """The schema in xgrammar's terms; a refusal tells where it stands, as there may be many."""
    try:
        return json.loads(checked_schema(json.dumps(value), within_text=True))
    except RequestError as error:
        place = f"in the tag {shown(begin)} " if begin else ""
        raise RequestError(error.what, why=place + error.why, remedy=error.remedy) from error
