"""What the host forbids for one step: bad words, grammars, or several of them together."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

BITS = 32  # tokens that one word of a mask speaks of


def mask_words(vocab_size: int) -> int:
    """Words of a line of a mask: bit `t % 32` of word `t // 32` says whether token t is allowed."""
    return -(-vocab_size // BITS)


def set_bits(line: Tensor, token_ids: Sequence[int], *, allowed: bool) -> None:
    """Allow or forbid tokens in a line [W] int32 on the CPU."""
    words = line.numpy().view("uint32")
    for token in token_ids:
        bit = 1 << (token % BITS)
        if allowed:
            words[token // BITS] |= bit
        else:
            words[token // BITS] &= 0xFFFFFFFF ^ bit


def mask_line(forbidden: Sequence[int], vocab_size: int) -> Tensor:
    """[W] int32 that allows all tokens but these."""
    line = torch.full((mask_words(vocab_size),), -1, dtype=torch.int32)
    set_bits(line, forbidden, allowed=False)
    return line


class HostMask(Protocol):
    """What may not come next, decided on the host from the output so far.

    Attributes:
        needs_last_token: the answer depends on the output, so a step must wait for the token of
            the step before; otherwise it is the same at every step.
        failure: why nothing is allowed any more; "" while all is well.
    """

    @property
    def needs_last_token(self) -> bool: ...

    @property
    def failure(self) -> str: ...

    def is_ready(self, wait: float = 0.0) -> bool:
        """Whether the sequence may run; waits for it at most so many seconds.

        Raises:
            RequestError: it never can.
        """

    def narrow(self, output_ids: Sequence[int], allowed: Tensor) -> None:
        """Clear, in `allowed` [W] int32, tokens that must not follow `output_ids` (the output
        alone, no prompt). Must not raise: one sequence never breaks the step of the others."""


class HostMasks:
    """Several masks on one sequence: what one of them forbids is forbidden."""

    def __init__(self, masks: Sequence[HostMask]) -> None:
        self._masks = tuple(masks)

    @property
    def needs_last_token(self) -> bool:
        return any(mask.needs_last_token for mask in self._masks)

    @property
    def failure(self) -> str:
        return next((mask.failure for mask in self._masks if mask.failure), "")

    def is_ready(self, wait: float = 0.0) -> bool:
        return all(mask.is_ready(wait) for mask in self._masks)

    def narrow(self, output_ids: Sequence[int], allowed: Tensor) -> None:
        for mask in self._masks:
            mask.narrow(output_ids, allowed)


def together(*masks: HostMask | None) -> HostMask | None:
    """The masks of a sequence as one."""
    present = [mask for mask in masks if mask is not None]
    if len(present) < 2:
        return present[0] if present else None
    return HostMasks(present)


def allowed_line(mask: HostMask, output_ids: Sequence[int], vocab_size: int) -> Tensor:
    """[W] int32: what `mask` allows after `output_ids`."""
    line = mask_line((), vocab_size)
    mask.narrow(output_ids, line)
    return line
