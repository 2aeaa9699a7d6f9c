"""Tokenizers that only transformers can read, loaded without ever running a checkpoint's code."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.base.errors import CheckpointError, UnsupportedError
from headrace.text.fast_backend import SPECIAL_NAMES, FastBackend
from headrace.text.pieces import Pieces
from headrace.text.tokenizer import Backend


class TransformersBackend:
    """A tokenizer written in Python; its decoding is taken as it is."""

    pieces: Pieces | None = None

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.vocab_size: int = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))
        self.special_ids = frozenset(tokenizer.all_special_ids)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def token_id(self, token: str) -> int | None:
        token_id: int | None = self._tokenizer.convert_tokens_to_ids(token)
        return token_id


def load_with_transformers(
    folder: Path, settings: Mapping[str, Any]
) -> tuple[Backend, dict[str, str]]:
    """The backend and its special tokens by name.

    Raises:
        UnsupportedError: transformers is missing, or the tokenizer is remote code.
        CheckpointError: transformers cannot read the folder.
    """
    if "AutoTokenizer" in (settings.get("auto_map") or {}):
        raise UnsupportedError(
            f"the tokenizer in {folder} is code that comes with the checkpoint",
            why="Remote code is never run",
            remedy="Use a checkpoint with a tokenizer.json, or name another tokenizer",
        )
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise UnsupportedError(
            f"the tokenizer in {folder} has no tokenizer.json",
            why="Only transformers can read it, and it is not installed",
            remedy="pip install transformers",
        ) from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # whatever a checkpoint's files can cause there
        raise CheckpointError(
            f"transformers cannot read the tokenizer in {folder}",
            why=str(error)[:300],
            remedy="Use a checkpoint with a tokenizer.json, or name another tokenizer",
        ) from error
    names = {
        name: str(token)
        for name in SPECIAL_NAMES
        if (token := getattr(tokenizer, name, None)) is not None
    }
    fast = getattr(tokenizer, "backend_tokenizer", None)
    backend: Backend = TransformersBackend(tokenizer) if fast is None else FastBackend(fast)
    return backend, names
