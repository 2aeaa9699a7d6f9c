"""How a sequence ends, and what is known about a token's probability."""

from dataclasses import dataclass
from typing import Literal

OF_REQUEST = "request"
_LOWEST = -9999.0

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Finished:
    """The one ending of a sequence.

    `stop_reason` is the stop string or stop token id that ended it (None for the model's own end
    token), and of an "error" `OF_REQUEST` where the request's own options left no token to go on
    with. `message` says what went wrong for "error", who asked for "abort".
    """

    reason: FinishReason
    stop_reason: int | str | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural logarithm of a token's probability, its rank (1 is the likeliest), its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None

    @property
    def finite(self) -> float:
        """The logarithm for JSON, which has no infinity; what OpenAI's servers show for it."""
        return max(self.logprob, _LOWEST)
