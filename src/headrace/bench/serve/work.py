"""The work of a serving benchmark: requests with prompts of token ids, of words, or of one's own.

Prompts of token ids need no tokenizer on either side. A random text has as many common words as
tokens were asked: most tokenizers make one token of each, and what a server counted is what is
reported.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy

from headrace.base.errors import ConfigError

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]

WARM_UP = 2**32 - 1  # the run whose prompts no measured run has
WORDS = tuple(
    """
    the of and to in is that for it as was with be by on not he his but at are this have from or
    had an they which one you were all her she there would their we him been has when who will
    no more if out so up said what its about than into them can only other time new some could
    these two may first then do any like my now over such our man me even most made after also
    did many off before must well back through years where much your way down should because
    long each just state those people too how little good world make very year still see own
    work men day
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request.

    Attributes:
        prompt: a text, token ids or chat messages.
        input_len: tokens of the prompt where they are known without a tokenizer, else `None`.
        output_len: most tokens to make.
    """

    prompt: Prompt
    input_len: int | None
    output_len: int

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.prompt, str) and isinstance(self.prompt[0], Mapping)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Every length from `least` to `most` is equally likely."""

    least: int
    most: int

    def draw(self, random: numpy.random.Generator, count: int) -> list[int]:
        lengths: list[int] = random.integers(self.least, self.most + 1, count).tolist()
        return lengths

    def __str__(self) -> str:
        return str(self.most) if self.least == self.most else f"{self.least}-{self.most}"


class ServeLoad(Protocol):
    """Where requests come from; its text form says what they are."""

    def jobs(self, run: int) -> list[Job]:
        """The requests of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomLoad:
    """Random prompts. Another run has other prompts of the same lengths, so no cache has seen them.

    Attributes:
        input_len: tokens of a prompt, the shared prefix included.
        shared_prefix_len: leading tokens that the prompts of a group have in common.
        prefix_groups: so many prefixes, shared in turn.
        form: ids or text.
        vocab_size: token ids are below it.
    """

    num_prompts: int
    input_len: Lengths
    output_len: Lengths
    shared_prefix_len: int = 0
    prefix_groups: int = 1
    form: str = "ids"
    vocab_size: int
    seed: int

    def __post_init__(self) -> None:
        if not 0 <= self.shared_prefix_len < self.input_len.least:
            raise ConfigError(
                f"--shared-prefix-len is {self.shared_prefix_len}",
                why="the rest of a prompt is its own",
                remedy=f"Give a number from 0 to {self.input_len.least - 1}, or raise --input-len",
            )

    def jobs(self, run: int) -> list[Job]:
        lengths = numpy.random.default_rng(self.seed)
        inputs = self.input_len.draw(lengths, self.num_prompts)
        outputs = self.output_len.draw(lengths, self.num_prompts)
        random = numpy.random.default_rng((self.seed, run))
        prefixes = [self._tokens(random, self.shared_prefix_len) for _ in range(self.prefix_groups)]
        jobs = []
        for number, (input_len, output_len) in enumerate(zip(inputs, outputs, strict=True)):
            own = self._tokens(random, input_len - self.shared_prefix_len)
            tokens = prefixes[number % self.prefix_groups] + own
            jobs.append(self._job(tokens, output_len))
        return jobs

    def _tokens(self, random: numpy.random.Generator, count: int) -> list[int]:
        below = self.vocab_size if self.form == "ids" else len(WORDS)
        tokens: list[int] = random.integers(0, below, count).tolist()
        return tokens

    def _job(self, tokens: list[int], output_len: int) -> Job:
        if self.form == "ids":
            return Job(prompt=tokens, input_len=len(tokens), output_len=output_len)
        text = " ".join(WORDS[token] for token in tokens)
        return Job(prompt=text, input_len=None, output_len=output_len)

    def __str__(self) -> str:
        shared = ""
        if self.shared_prefix_len:
            groups = "" if self.prefix_groups == 1 else f" in {self.prefix_groups} groups"
            shared = f" ({self.shared_prefix_len} shared{groups})"
        words = f"ids below {self.vocab_size}" if self.form == "ids" else "words"
        return (
            f"{self.num_prompts} x {self.input_len} in{shared}, {self.output_len} out, "
            f"random {words}, seed {self.seed}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLoad:
    """Prompts of one's own, the same in every run.

    Attributes:
        file: where they came from. given: one job per line.
    """

    file: str
    given: tuple[Job, ...]

    def jobs(self, run: int) -> list[Job]:
        """`run` changes nothing."""
        return list(self.given)

    def __str__(self) -> str:
        return f"{len(self.given)} prompts of {self.file}"


def read_load(file: Path, *, output_len: int, most: int | None) -> FileLoad:
    """Prompts from JSON lines: {"prompt": TEXT or [ID, ...]} or {"messages": [...]}, and
    "max_tokens" where a prompt has its own.

    Args:
        output_len: most tokens where a line states none.
        most: take so many lines from the start; all by default.

    Raises:
        ConfigError: the file cannot be read, is empty, or a line is something else.
    """
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read", why=str(error)) from None
    jobs = [
        _job_of(line, f"{file}, line {number}", output_len)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not jobs:
        raise ConfigError(f"{file} has no prompt", remedy='Write lines like {"prompt": "Hello"}')
    return FileLoad(file=file.name, given=tuple(jobs[:most]))


def _job_of(line: str, place: str, output_len: int) -> Job:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place} is no JSON", why=str(error)) from None
    prompt = None
    if isinstance(entry, dict):
        prompt = entry.get("prompt", entry.get("messages"))
        output_len = entry.get("max_tokens", output_len)
    if not _is_prompt(prompt):
        raise ConfigError(
            f'{place} has neither a "prompt" (a text or token ids) nor "messages"',
            remedy='Write lines like {"prompt": "Hello", "max_tokens": 16}',
        )
    if type(output_len) is not int or output_len < 1:
        raise ConfigError(f"{place}: max_tokens is {output_len!r}", remedy="Give a number above 0")
    assert prompt is not None
    is_ids = isinstance(prompt, list) and isinstance(prompt[0], int)
    return Job(prompt=prompt, input_len=len(prompt) if is_ids else None, output_len=output_len)


def _is_prompt(value: object) -> bool:
    if isinstance(value, list) and value:
        return all(type(part) is int for part in value) or all(
            isinstance(part, dict) for part in value
        )
    return isinstance(value, str) and bool(value)
