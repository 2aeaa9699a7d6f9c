"""The work of an offline benchmark: prompts of random token ids, made anew for every repeat."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy

from headrace.base.errors import ConfigError

Prompts = list[list[int]]
Tokens = list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One piece of work.

    Attributes:
        num_prompts: prompts in all. batch: how many are handed over at a time.
        input_len: tokens of a prompt, the shared prefix included. output_len: tokens made for it.
        shared_prefix_len: leading tokens that all prompts of a repeat have in common.
    """

    num_prompts: int
    input_len: int
    output_len: int
    shared_prefix_len: int = 0
    batch: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.shared_prefix_len < self.input_len:
            raise ConfigError(
                f"shared_prefix_len is {self.shared_prefix_len}",
                why="the rest of a prompt is its own",
                remedy=f"Give a number from 0 to {self.input_len - 1}",
            )

    def check_fits(self, context: int) -> None:
        """Raise `ConfigError` when a prompt and its output exceed a context of so many tokens."""
        if self.input_len + self.output_len > context:
            raise ConfigError(
                f"--input-len {self.input_len} and --output-len {self.output_len} together exceed "
                f"the context of {context} tokens",
                remedy="Lower the one or the other, or raise --max-model-len where the model "
                "is made for more",
            )

    def __str__(self) -> str:
        shared = f" ({self.shared_prefix_len} shared)" if self.shared_prefix_len else ""
        batch = "" if self.batch is None else f", {self.batch} at a time"
        return f"{self.num_prompts} x {self.input_len} in{shared}, {self.output_len} out{batch}"

    @property
    def output_tokens(self) -> int:
        return self.num_prompts * self.output_len

    @property
    def total_tokens(self) -> int:
        """In and out."""
        return self.num_prompts * (self.input_len + self.output_len)

    def prompts(self, repeat: int, vocab_size: int) -> Prompts:
        """The prompts of a repeat; other repeats have others, so that no cache has seen them."""
        random = numpy.random.default_rng((self.seed, repeat))
        prefix = random.integers(0, vocab_size, self.shared_prefix_len).tolist()
        own = random.integers(
            0, vocab_size, (self.num_prompts, self.input_len - self.shared_prefix_len)
        )
        return [prefix + row for row in own.tolist()]

    def batches(self, prompts: Prompts) -> Iterator[Prompts]:
        size = self.batch or len(prompts)
        for start in range(0, len(prompts), size):
            yield prompts[start : start + size]
