"""What explain shows, as text and as plain data."""

import json
from dataclasses import dataclass, field, replace
from typing import Any

from plan_cases import CPU, GEMMA3, H100, persona, plan

from headrace.base.decision import Decision, Refusal
from headrace.config.hardware import Hardware
from headrace.config.persona import Persona
from headrace.config.plan import Plan
from headrace.runner.memory_table import MemoryTable, memory_table
from headrace.runner.report import as_dict, decision_line, decision_lines, render, summary


@dataclass(frozen=True)
class Shown:
    persona: Persona
    hardware: Hardware
    plan: Plan
    memory: MemoryTable = field(init=False)
    measured: tuple[Decision[int], ...] = ()

    def __post_init__(self) -> None:
        table = memory_table(self.persona, self.hardware, self.plan)
        object.__setattr__(self, "memory", table)


def shown(hardware: Hardware = CPU, **asked: object) -> Shown:
    model = persona(GEMMA3)
    return Shown(model, hardware, plan(model, hardware, **asked))


MEASURED = (Decision(name="kv_tokens", value=777, reason="measured: here"),)


def test_text_shows_every_decision_reason_and_refusal() -> None:
    explained = shown()
    text = " ".join(render(explained, width=100).split())
    for decision in explained.plan:
        assert decision.name in text
        assert " ".join(decision.reason.split()) in text
        for refusal in decision.refused:
            assert f"not {refusal}" in text
    assert "kv_tokens - auto decided at start" in text
    for word in (
        "gemma3",
        "5 window 512, 1 full",
        "qk norm",
        "test cpu (detected)",
        "KV per token",
    ):
        assert word in text


def test_lines_keep_to_the_width() -> None:
    for width in (80, 140):
        decisions = render(shown(), width=width).split("Plan\n")[1].split("\n\n")[0]
        assert max(map(len, decisions.splitlines())) <= max(width, 90)


def test_a_long_list_of_sizes_does_not_widen_the_column() -> None:
    text = render(shown(H100), width=100)
    assert "1..256 (23 sizes)" in text
    decisions = text.split("Plan\n")[1].split("\n\n")[0].splitlines()
    assert max(map(len, decisions)) <= 100
    assert "2,8 " in render(shown(H100, decode_graph=(2, 8)))
    assert "set by mem_fraction" in text


def test_asked_is_told_from_auto() -> None:
    lines = render(shown(page_size=32)).splitlines()
    assert any(line.split()[:3] == ["page_size", "32", "asked"] for line in lines)
    lines = render(shown()).splitlines()
    assert any(line.split()[:3] == ["page_size", "16", "auto"] for line in lines)


def test_data_is_complete_and_json() -> None:
    explained = shown(H100)
    data = json.loads(json.dumps(as_dict(explained), allow_nan=False))
    assert set(data) == {
        "schema",
        "headrace",
        "persona",
        "hardware",
        "decisions",
        "measured",
        "decided_at_start",
        "memory",
    }
    assert [entry["name"] for entry in data["decisions"]] == [d.name for d in explained.plan]
    for entry in data["decisions"]:
        assert set(entry) == {"name", "value", "asked", "reason", "refused"}
    assert data["decided_at_start"] == ["weight_format", "operators", "kv_tokens"]
    assert data["memory"]["kv_tokens"] == explained.memory.tokens
    assert data["memory"]["weight_bytes"] == sum(data["memory"]["weights"].values())
    assert data["hardware"]["packages"] == ["triton"]
    ropes = next(entry for entry in data["decisions"] if entry["name"] == "ropes")
    assert ropes["value"]["local"]["length"] == 16384


def test_what_was_measured_replaces_decided_at_start() -> None:
    before = shown()
    after = Shown(before.persona, before.hardware, before.plan, MEASURED)
    assert "measured: here" in render(after)
    assert "decided at start, from" not in render(after)
    assert as_dict(after)["decided_at_start"] == []
    assert as_dict(after)["measured"][0]["value"] == 777
    assert summary(after) == "cpu (test cpu), float32, context 8,192, KV tokens 777"
    assert summary(before).endswith(f"KV tokens {before.memory.tokens:,}")


def test_what_nobody_asked_for_is_one_line_of_the_log() -> None:
    def made(name: str, value: object, **more: Any) -> Decision[Any]:
        return Decision(name=name, value=value, reason="why", **more)

    refused = (Refusal(subject="on", reason="no device", remedy="buy one"),)
    lines = decision_lines(
        [
            made("canary", False),
            made("graph", "off", refused=refused),
            made("salt", (), asked=True),
            made("layers", ()),
            made("size", 7),
            made("interval", 0),
        ]
    )
    assert list(lines) == [
        "graph = off [auto] why",
        "graph: not on: no device (buy one)",
        "salt = none [asked] why",
        "size = 7 [auto] why",
        "not asked for, so off (headrace explain says more): canary, layers, interval",
    ]
    assert list(decision_lines([made("size", 7)])) == ["size = 7 [auto] why"]


def test_a_decision_as_a_line_of_the_log() -> None:
    lines = [decision_line(decision) for decision in shown().plan]
    assert "ropes = global, local [auto] no rule depends on the length" in lines
    assert not any("RopePlan" in line for line in lines)
    asked = Decision(name="sampling_defaults", value={"top_k": 7}, reason="given", asked=True)
    assert decision_line(asked) == "sampling_defaults = top_k 7 [asked] given"
    assert decision_line(replace(asked, value={})) == "sampling_defaults = none [asked] given"
