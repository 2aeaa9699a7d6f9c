"""The recorded outputs of the package canitoolcall through our parsers, by its own checks.

Needs an environment with canitoolcall, and headrace on PYTHONPATH (its parsers import no torch):

    python -m venv build/canitoolcall && build/canitoolcall/bin/pip install canitoolcall
    PYTHONPATH=src build/canitoolcall/bin/python tests/external/canitoolcall_fixtures.py

Prints a line for each family and each fixture that is not a strict pass; exits with 1 if more than
the expected ones fail. `--json FILE` also writes the status of each fixture.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from canitoolcall import checks
from canitoolcall.chunking import ChunkStrategy, split
from canitoolcall.fixtures import Family, Fixture, load_families, load_fixtures
from canitoolcall.results import Observation, ParsedToolCall, ParseResult, Status, worst_status

from headrace.serving.parsers import Reading, ToolRequest, collect

STRATEGIES = ("one", "rand:1:8", "rand:2:8", "char:0", "char:1")
# Families of the package that no parser here covers.
LEFT_OUT = ("deepseek", "gemma4", "glm", "gpt-oss", "kimi")
EXPECTED_FAILURES = {
    "qwen3-hermes/truncated-second-parallel-call": (
        "a call that was cut off after a complete one is given out as content, not thrown away"
    )
}


def parsers_of(fixture: Fixture) -> tuple[str, str]:
    """Names of our parsers of calls and of reasoning for the model of a fixture."""
    model = fixture.reference_model
    if fixture.family == "llama":
        return ("llama3_json" if "Llama-3" in model else "pythonic"), "none"
    if fixture.family == "mistral":
        return ("mistral_v3" if "v0.3" in model else "mistral"), "mistral"
    return ("qwen3_coder" if fixture.family == "qwen3-xml" else "hermes"), "think"


def read(fixture: Fixture, pieces: Iterable[str], *, live: bool) -> ParseResult:
    """What a client has after these pieces of text."""
    tool_parser, reasoning_parser = parsers_of(fixture)
    request = ToolRequest.of(list(fixture.tools) or None)
    interpreter = Reading.of(
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        request=request,
        prompt=fixture.generation_prompt or "",
        stream_arguments=live,
    ).interpreter()
    events = [event for piece in pieces for event in interpreter.feed(piece)]
    answer = collect([*events, *interpreter.finish()])
    return ParseResult(
        content=answer.content or None,
        reasoning_content=answer.reasoning or None,
        tool_calls=tuple(ParsedToolCall(call.name, call.arguments) for call in answer.calls),
    )


def cut(text: str, strategy: str) -> list[str]:
    groups: list[Sequence[str]] = split(list(text), ChunkStrategy.parse(strategy))
    return ["".join(group) for group in groups]


def judge(fixture: Fixture, family: Family, *, live: bool) -> tuple[Status, list[str]]:
    """The worst of all checks, and what they complain about."""
    text = fixture.raw_output
    observation = Observation(
        nonstream=read(fixture, [text], live=live),
        streams={each: read(fixture, cut(text, each), live=live) for each in STRATEGIES},
    )
    rows = checks.run_checks(fixture, family, observation)
    complaints = [
        f"{row.check} {row.strategy}: {row.detail}" for row in rows if row.status != Status.PASS
    ]
    return worst_status(row.status for row in rows), complaints


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--live", action="store_true", help="show calls as they come")
    arguments.add_argument("--json", type=Path, help="where to write the statuses")
    asked = arguments.parse_args()
    live = asked.live
    families = load_families()
    counts: dict[str, Counter[str]] = {}
    statuses: dict[str, str] = {}
    unexpected = 0
    for fixture in load_fixtures():
        if fixture.family in LEFT_OUT:
            continue
        status, complaints = judge(fixture, families[fixture.family], live=live)
        statuses[fixture.id] = status.value
        counts.setdefault(fixture.family, Counter())[status.value] += 1
        if status != Status.PASS:
            reason = EXPECTED_FAILURES.get(fixture.id)
            unexpected += status == Status.FAIL and reason is None
            print(f"{status.value}: {fixture.id}{f' (expected: {reason})' if reason else ''}")
            print("".join(f"    {each}\n" for each in complaints[:3]), end="")
    for family, count in counts.items():
        print(f"{family}: {', '.join(f'{number} {name}' for name, number in count.items())}")
    if asked.json is not None:
        asked.json.write_text(json.dumps(statuses))
    return int(unexpected > 0)


if __name__ == "__main__":
    sys.exit(main())
