"""Logprobs as both OpenAI routes spell them, from the engine's dicts of token id -> Logprob."""

from collections.abc import Mapping, Sequence

from headrace.request.outcome import Logprob
from headrace.serving.openai.replies import (
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from headrace.text.tokenizer import Tokenizer

Entries = Mapping[int, Logprob]


class TokenNames:
    """How a token is written in replies.

    Args:
        tokenizer: `None` for a checkpoint without one; then tokens are written as ids.
        as_ids: write "token_id:5", so that each token has a name of its own.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool) -> None:
        self._tokenizer, self._as_ids = tokenizer, as_ids or tokenizer is None

    def text(self, token_id: int, entry: Logprob | None = None) -> str:
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        known = None if entry is None else entry.decoded_token
        return self._tokenizer.token_text(token_id) if known is None else known

    def key(self, token_id: int, entry: Logprob | None = None) -> str:
        """Like `text`; bytes that are no character of their own as `bytes:\\xe2\\x82`, so that
        different tokens stay different."""
        text = self.text(token_id, entry)
        if "\ufffd" not in text:
            return text
        raw = self.bytes(token_id, text)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw or ())

    def bytes(self, token_id: int, text: str) -> list[int] | None:
        """The bytes the token stands for, `None` where they are not known."""
        if self._tokenizer is None:
            return None
        pieces = self._tokenizer.pieces
        if pieces is not None:
            return list(pieces[token_id])
        return list(self._tokenizer.token_text(token_id).encode())


def chat_entries(
    token_ids: Sequence[int], entries: Sequence[Entries], top: int, names: TokenNames
) -> list[TokenLogprob]:
    """One entry per token with its `top` likeliest, likeliest first."""
    told = []
    for token_id, known in zip(token_ids, entries, strict=True):
        chosen = known[token_id]
        text = names.text(token_id, chosen)
        told.append(
            TokenLogprob(
                token=text,
                logprob=chosen.finite,
                bytes=names.bytes(token_id, text),
                top_logprobs=[
                    TopLogprob(
                        token=(spelled := names.text(other, entry)),
                        logprob=entry.finite,
                        bytes=names.bytes(other, spelled),
                    )
                    for other, entry in likeliest(known, top)
                ],
            )
        )
    return told


def completion_entries(
    token_ids: Sequence[int],
    entries: Sequence[Entries | None],
    top: int,
    names: TokenNames,
    offset: int,
) -> tuple[CompletionLogprobs, int]:
    """Four lists with an entry per token, and the offset of the token after them.

    `entries` holds `None` for the first token of a prompt, about which nothing is known. The chosen
    token is among the top ones, as OpenAI has it: up to `top` + 1 of them.
    """
    told = CompletionLogprobs([], [], [], [])
    for token_id, known in zip(token_ids, entries, strict=True):
        chosen = None if known is None else known[token_id]
        told.tokens.append(names.key(token_id, chosen))
        told.token_logprobs.append(None if chosen is None else chosen.finite)
        told.top_logprobs.append(
            None if known is None else _top_by_name(known, token_id, top, names)
        )
        told.text_offset.append(offset)
        offset += len(names.text(token_id, chosen))
    return told, offset


def prompt_entries(entries: Sequence[Entries | None]) -> PromptLogprobs:
    """As vLLM shows them: an object per token, token id -> logprob, rank, text."""
    return [
        None
        if known is None
        else {
            str(token_id): PromptLogprob(entry.finite, entry.rank, entry.decoded_token)
            for token_id, entry in known.items()
        }
        for known in entries
    ]


def likeliest(known: Entries, top: int) -> list[tuple[int, Logprob]]:
    """The first `top` by rank; ids that were asked by name and rank lower are not among them."""
    ranked = sorted(known.items(), key=lambda item: (item[1].rank, item[0]))
    return [item for item in ranked[:top] if item[1].rank <= top]


def _top_by_name(known: Entries, chosen: int, top: int, names: TokenNames) -> dict[str, float]:
    shown = likeliest(known, top)
    if all(token_id != chosen for token_id, _ in shown):
        shown.append((chosen, known[chosen]))
    return {names.key(token_id, entry): entry.finite for token_id, entry in shown}
