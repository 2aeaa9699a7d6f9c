"""What is stored of transformers' logits, and how it is read. No transformers needed.

Shapes: P checked positions, V vocabulary, O ids sampled from the whole of it, G continuations.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from headrace.base.errors import NotFoundError
from headrace.checkpoint.names import resolve_model

FOLDER = Path(__file__).parent
TOLERANCE = 2e-4
LENGTHS = (1, 15, 16, 17, 200)
PAST_THE_WINDOW = 700
"""Length of the one prompt that goes past Gemma's window of 512; only its last logits are kept."""
CONTINUED = (1, 2, 3, 4)
"""Prompts that are continued greedily, by their place in LENGTHS."""
NEW_TOKENS = 64
TOP = 50
STRIDE = 2053
"""Every so many tokens of the vocabulary are compared besides the likeliest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RealReference:
    """Logits and greedy continuations of one model.

    Attributes:
        file_bytes: size of the GGUF file they were made from.
        prompts: token ids of every prompt, each run alone.
        places: [P, 2] prompt and position that the rows below belong to.
        top_ids, top_logits: [P, TOP] the likeliest tokens.
        other_logits: [P, O] of the tokens 0, STRIDE, 2 STRIDE, ...
        logsumexp: [P] over the whole vocabulary: every logit matters to it.
        target_logprobs: [P] of the prompt's next token; NaN at its last position.
        greedy: [G, NEW_TOKENS] tokens; greedy_logprobs: theirs; gaps: between the two largest.
    """

    file_bytes: int
    prompts: list[list[int]]
    places: np.ndarray
    top_ids: np.ndarray
    top_logits: np.ndarray
    other_logits: np.ndarray
    logsumexp: np.ndarray
    target_logprobs: np.ndarray
    greedy: np.ndarray
    greedy_logprobs: np.ndarray
    gaps: np.ndarray

    def save(self, model: str) -> None:
        np.savez_compressed(
            _file(model),
            ids=np.array([token for prompt in self.prompts for token in prompt], np.int32),
            lengths=np.array([len(prompt) for prompt in self.prompts], np.int32),
            **{name: getattr(self, name) for name in _ARRAYS},
        )

    def rows_of(self, prompt: int) -> np.ndarray:
        """Rows of the arrays that belong to a prompt."""
        return np.flatnonzero(self.places[:, 0] == prompt)


_ARRAYS = (
    "file_bytes",
    "places",
    "top_ids",
    "top_logits",
    "other_logits",
    "logsumexp",
    "target_logprobs",
    "greedy",
    "greedy_logprobs",
    "gaps",
)


def checked_positions(length: int) -> list[int]:
    """Where the logits of a prompt are compared."""
    if length >= PAST_THE_WINDOW:
        return [length - 1]
    return list(range(length)) if length < 100 else [*range(0, length - 1, 8), length - 1]


def load_reference(model: str) -> RealReference:
    """The stored reference; skips the test where the model's package is missing."""
    path = model_file(model)
    stored = dict(np.load(_file(model)))
    ids, lengths = stored.pop("ids").tolist(), stored.pop("lengths").tolist()
    ends = np.cumsum(lengths)
    prompts = [ids[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    reference = RealReference(prompts=prompts, **stored)
    assert path.stat().st_size == reference.file_bytes, (
        f"{path.name} is not the file the reference was made from: run tests/real/make_reference.py"
    )
    return reference


def model_file(model: str) -> Path:
    try:
        return resolve_model(model)
    except NotFoundError as error:
        pytest.skip(str(error))


def _file(model: str) -> Path:
    return FOLDER / f"{model}.npz"
