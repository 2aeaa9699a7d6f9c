"""How the states of a prompt become one vector. Validated when made."""

from dataclasses import dataclass

from headrace.base.errors import UnknownFieldError
from headrace.base.unknown_names import names_answered
from headrace.request.checks import bad_value, integer, switch
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
            prompt, special tokens included (as sentence-transformers' Pooling does); `None`: what
            the checkpoint states for embeddings, "last" where it states nothing.
        normalize: the vector has Euclidean length 1.
        dimensions: keep the first so many numbers only, before normalising, as models trained for
            it allow (Matryoshka representations, Kusupati et al. 2022); `None`: all.

    Raises:
        RequestError: (a ValueError) naming field, value and what is allowed.
    """

    pooling: str | None = None
    normalize: bool = True
    dimensions: int | None = None

    def __post_init__(self) -> None:
        pooling = self.pooling  # an array must not be asked whether it equals a text
        if pooling is not None and (not isinstance(pooling, str) or pooling not in POOLINGS):
            raise bad_value("pooling", self.pooling, " or ".join(POOLINGS))
        switch("normalize", self.normalize)
        if self.dimensions is not None:
            dimensions = integer("dimensions", self.dimensions, 1, _MAX_DIMENSIONS)
            object.__setattr__(self, "dimensions", dimensions)

    def check_size(self, hidden_size: int) -> None:
        """Raise `RequestError` when more dimensions are asked than the model's states have."""
        if self.dimensions is not None:
            integer("dimensions", self.dimensions, 1, hidden_size)
