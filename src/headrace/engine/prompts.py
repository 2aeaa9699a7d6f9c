"""From the prompt that a caller sends to token ids, with every check."""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from headrace.base.errors import RequestError
from headrace.base.shown import shown
from headrace.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]

NO_TOKENIZER = "This checkpoint has no tokenizer"


def prompt_token_ids(prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int) -> list[int]:
    """Ids of a prompt given as text or as ids.

    Raises:
        RequestError: neither text nor ids, text without a tokenizer, an id outside
            [0, vocab_size), or nothing at all.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError(NO_TOKENIZER, remedy="Send the prompt as a list of token ids")
        ids = tokenizer.encode(prompt)
    else:
        ids = _plain_ids(prompt)
    if not ids:
        raise RequestError("The prompt is empty", remedy="Send at least one token")
    for token in (min(ids), max(ids)):
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"The prompt holds token id {token}",
                why=f"the vocabulary has ids 0 to {vocab_size - 1}",
            )
    return ids


def plain(value: Any) -> Any:
    """What an array or a tensor holds, in lists and numbers of Python; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def _plain_ids(prompt: object) -> list[int]:
    """The ids as Python's own integers; those of other libraries count, True and False do not."""
    prompt = plain(prompt)
    if isinstance(prompt, bytes | bytearray | memoryview | Mapping | set | frozenset):
        raise _no_prompt(prompt)  # they can be read as a list of numbers, and nobody means that
    try:
        tokens: list[Any] = list(prompt)  # type: ignore[call-overload]
    except TypeError:
        raise _no_prompt(prompt) from None
    if set(map(type, tokens)) <= {int}:  # a third of the time that a look at each takes
        return tokens
    for token in tokens:
        if not isinstance(token, Integral) or isinstance(token, bool):
            raise RequestError(
                f"The prompt holds {shown(token)}", why="token ids are whole numbers"
            )
    return [int(token) for token in tokens]


def _no_prompt(prompt: object) -> RequestError:
    remedy = "Send a text or a list of token ids"
    for key in ("prompt", "prompt_token_ids"):  # as vLLM takes them
        if isinstance(prompt, Mapping) and key in prompt:
            remedy = f"Send what stands under {key!r}, by itself"
    return RequestError(f"The prompt is {shown(prompt)}", remedy=remedy)
