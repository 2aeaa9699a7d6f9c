"""Chats with a fake model that calls tools or reasons, in the forms of several families."""

import random
from typing import Any

from fake_engine import FakeEngine
from sse import events_of
from starlette.testclient import TestClient

from headrace.request.outcome import Finished

ROUTE = "/v1/chat/completions"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
NAMED = {"type": "function", "function": {"name": "clock"}}
OSLO = '{"city": "Oslo"}'
ONE = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>',
    "mistral": f"[TOOL_CALLS]weather[ARGS]{OSLO}",
    "llama3_json": f'{{"name": "weather", "parameters": {OSLO}}}',
}
BOTH = {
    "hermes": ONE["hermes"] + '\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    "mistral": ONE["mistral"] + "[TOOL_CALLS]clock[ARGS]{}",
    "llama3_json": ONE["llama3_json"] + '; {"name": "clock", "parameters": {}}',
}
FAMILIES = sorted(ONE)


class Chat:
    """Asks the server, which has a model that says `words`."""

    def __init__(self, http: TestClient, engine: FakeEngine) -> None:
        self.http, self.engine = http, engine

    def says(self, *words: str, reason: str = "stop") -> None:
        self.engine.words, self.engine.finished = list(words), Finished(reason)

    def choices(self, **body: Any) -> list[dict[str, Any]]:
        return self.reply(**body)["choices"]

    def message(self, **body: Any) -> dict[str, Any]:
        return self.choices(**body)[0]["message"]

    def reply(self, **body: Any) -> dict[str, Any]:
        answer = self.http.post(ROUTE, json={"messages": HELLO, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, **body: Any) -> dict[str, Any]:
        answer = self.http.post(ROUTE, json={"messages": HELLO, **body})
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]

    def chunks(self, **body: Any) -> list[dict[str, Any]]:
        answer = self.http.post(ROUTE, json={"messages": HELLO, "stream": True, **body})
        assert answer.status_code == 200, answer.text
        return [choice for each in events_of(answer.text) for choice in each["choices"]]


def collected(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that chunks of one choice add up to, as strict clients add."""
    message: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        delta = chunk["delta"]
        for name in ("role", "content", "reasoning_content", "reasoning"):
            if delta.get(name) is not None:
                message[name] = message.get(name, "") + delta[name]
        assert len(delta.get("tool_calls", [])) <= 1  # clients look at the first one only
        for piece in delta.get("tool_calls", []):
            if "id" in piece:
                assert (piece["index"], piece["type"]) == (len(calls), "function")
                assert piece["function"]["arguments"] == ""
                calls.append({"id": piece["id"], "type": "function", "function": piece["function"]})
            else:
                assert set(piece) == {"index", "function"}
                assert set(piece["function"]) == {"arguments"}
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return message | ({"tool_calls": calls} if calls else {})


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    told = {name: value for name, value in message.items() if name != "refusal"}
    told["content"] = told.get("content") or ""
    if "tool_calls" in told:
        told["tool_calls"] = [each["function"] for each in told["tool_calls"]]
    return told


def at_random(text: str, seed: int) -> list[str]:
    """The text in pieces of one to seven characters."""
    draw, words = random.Random(seed), []
    while text:
        size = draw.randint(1, 7)
        words.append(text[:size])
        text = text[size:]
    return words
