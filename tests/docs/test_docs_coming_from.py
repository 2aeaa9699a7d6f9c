"""docs/coming-from.md says what the code says of other engines' words."""

import re
from pathlib import Path

from headrace import LLM, RequestOutput, SamplingParams
from headrace.cli.other_flags import ALIASES, SWITCHES
from headrace.config.other_words import ENGINE_WORDS
from headrace.request.other_words import SGLANG_NAMES

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text()
ROWS = [row.strip("| ").split(" | ", 1) for row in PAGE.splitlines() if row.startswith("| ")]


def said(theirs: str) -> str:
    """What stands beside one of their words."""
    (ours,) = (right for left, right in ROWS if f"`{theirs}`" in left)
    return ours


def test_options_of_the_engine_are_those_of_the_table_in_code() -> None:
    for theirs, ours in ENGINE_WORDS.renamed.items():
        assert f"`{ours}`" in said(theirs)
    for theirs, options in ENGINE_WORDS.switches.items():
        for ours in options:
            assert f"`{ours}" in said(theirs)


def test_every_flag_that_is_taken_is_on_the_page() -> None:
    for flag in (*ALIASES, *SWITCHES):
        option = flag.removeprefix("--").replace("-", "_")
        assert f"`{flag}`" in PAGE or f"`{option}`" in PAGE


def test_what_is_named_of_ours_exists() -> None:
    methods = re.findall(r"`llm\.(\w+)\(", " ".join(right for _, right in ROWS))
    assert {"stream", "embed", "flush_cache", "close"} <= set(methods)
    assert all(hasattr(LLM, name) for name in methods)
    for ours in SGLANG_NAMES.values():
        assert hasattr(SamplingParams, ours)
        assert f"`{ours}`" in PAGE
    assert said("num_cached_tokens") == "`cached_tokens`"
    assert hasattr(RequestOutput, "cached_tokens")
