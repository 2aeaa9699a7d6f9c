"""`headrace verify MODEL`: a table of configurations against the reference; exit status 0 or 1."""

import argparse
import json
import sys
from typing import TYPE_CHECKING

from headrace.cli.engine_flags import engine_config
from headrace.cli.prompt_file import prompt_lines

if TYPE_CHECKING:
    from headrace.testing.verify_report import Result

FAILED = 1
Prompt = str | list[int]


def run(arguments: argparse.Namespace) -> int:
    config = engine_config(arguments)
    prompts = None if arguments.prompts is None else read_prompts(arguments.prompts)
    # imports torch, so only after the arguments were checked
    from headrace.testing.verify import verify

    report = verify(
        config,
        prompts=prompts,
        every_combination=arguments.assume == "nothing",
        on_result=_tell,
    )
    print(json.dumps(report.as_dict(), indent=2) if arguments.json else report)
    return 0 if report.passed else FAILED


def read_prompts(file: str) -> list[Prompt]:
    """One prompt per line: token ids as a JSON list, or a text.

    Raises:
        ConfigError: the file cannot be read or holds no prompt.
    """
    return [_ids(line) or line for line in prompt_lines(file)]


def _ids(line: str) -> list[int] | None:
    if not line.startswith("["):
        return None
    try:
        values = json.loads(line)
    except ValueError:
        return None  # a text that happens to begin so
    return values if values and all(type(value) is int for value in values) else None


def _tell(result: "Result", number: int, total: int) -> None:
    """Progress on stderr: the table comes at the end."""
    verdict = "ok" if result.passed else f"FAILED: {'; '.join(result.problems[:3])}"
    print(f"{number}/{total} {result.configuration}: {verdict}", file=sys.stderr, flush=True)
