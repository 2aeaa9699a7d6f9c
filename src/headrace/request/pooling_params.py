"""How the states of a prompt become one vector. Validated when made."""

from dataclasses import dataclass
from numbers import Integral

from headrace.base.errors import RequestError, UnknownFieldError
from headrace.base.shown import shown
from headrace.base.unknown_names import names_answered
from headrace.request.other_words import POOLING_WORDS

POOLINGS = ("last", "mean")
_MAX_DIMENSIONS = 2**31 - 1  # a model's own limit is checked where it is known


@names_answered(POOLING_WORDS, "field of PoolingParams", UnknownFieldError)
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """Options of one embedding.

    The vector is made of the hidden states after the model's last norm and before its head, what
    transformers calls `last_hidden_state`.

    Attributes:
        pooling: "last" takes the state of the last token, "mean" the mean over all tokens of the
            prompt, special tokens included (as sentence-transformers' Pooling does).
        normalize: the vector has Euclidean length 1.
        dimensions: keep the first so many numbers only, before normalising, as models trained for
            it allow (Matryoshka representations, Kusupati et al. 2022); `None`: all.

    Raises:
        RequestError: (a ValueError) naming field, value and what is allowed.
    """

    pooling: str = "last"
    normalize: bool = True
    dimensions: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.pooling, str) or self.pooling not in POOLINGS:
            raise _bad("pooling", self.pooling, " or ".join(POOLINGS))
        if not isinstance(self.normalize, bool):
            raise _bad("normalize", self.normalize, "True or False")
        if self.dimensions is not None:
            self._check_dimensions(_MAX_DIMENSIONS)
            object.__setattr__(self, "dimensions", int(self.dimensions))

    def check_size(self, hidden_size: int) -> None:
        """Raise `RequestError` when more dimensions are asked than the model's states have."""
        if self.dimensions is not None:
            self._check_dimensions(hidden_size)

    def _check_dimensions(self, most: int) -> None:
        value = self.dimensions
        is_whole = isinstance(value, Integral) and not isinstance(value, bool)
        if not is_whole or not 1 <= int(value) <= most:  # type: ignore[arg-type]
            raise _bad("dimensions", value, f"integers in [1, {most}]")


def _bad(name: str, value: object, allowed: str) -> RequestError:
    return RequestError(f"{name} is {shown(value)}", remedy=f"Allowed: {allowed}")
