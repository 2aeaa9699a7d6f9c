"""Reading event streams in tests."""

import json
from typing import Any


def events_of(text: str) -> list[Any]:
    """The JSON of each event; checks that the stream is whole: `data: ` lines, [DONE] last."""
    assert text.endswith("\n\n")
    parts = text.removesuffix("\n\n").split("\n\n")
    data = [part for part in parts if not part.startswith(":")]
    assert all(part.startswith("data: ") and "\n" not in part for part in data)
    assert data[-1] == "data: [DONE]"
    assert data.count("data: [DONE]") == 1
    return [json.loads(part.removeprefix("data: ")) for part in data[:-1]]
