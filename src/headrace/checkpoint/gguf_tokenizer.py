"""The tokenizer of a GGUF file as plain data."""

from typing import Any

from headrace.base.errors import CheckpointError
from headrace.checkpoint.gguf_file import GgufFile
from headrace.config.tokenizer_source import GgufVocabulary, TokenizerSource

_PREFIX = "tokenizer.ggml."
# A file names one end token, where generation_config.json lists several (Llama 3: of a text, a turn
# and a call of a tool). So whatever is called one of these is one too, as in llama.cpp.
_ENDS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
)
_CONTROL, _USER_DEFINED = 3, 4


def gguf_tokenizer_source(file: GgufFile) -> TokenizerSource | None:
    """None when the file has no vocabulary (`tokenizer.ggml.model` "none" or absent)."""
    model = file.metadata.get(f"{_PREFIX}model")
    if model in (None, "none"):
        return None
    vocabulary = _vocabulary(file, model)
    return TokenizerSource(
        gguf=vocabulary,
        chat_template=file.metadata.get("tokenizer.chat_template"),
        eos_token_ids=_eos_token_ids(file, vocabulary),
        cache_key=file.metadata_hash(),
    )


def _vocabulary(file: GgufFile, model: str) -> GgufVocabulary:
    def value(name: str) -> Any:
        return file.metadata.get(_PREFIX + name)

    def numbers(name: str) -> tuple[Any, ...]:
        found = value(name)
        return () if found is None else tuple(found.tolist())

    tokens = value("tokens")
    if not isinstance(tokens, list):
        raise CheckpointError(f"{file.path} lacks the metadata key {_PREFIX}tokens")
    if model == "gpt2" and not value("merges"):
        raise CheckpointError(
            f"{file.path} lacks the metadata key {_PREFIX}merges",
            why="without merges every text is cut into single bytes",
            remedy="Convert the model again with a newer llama.cpp, or name a folder with its "
            "tokenizer.json as the tokenizer",
        )
    vocabulary = GgufVocabulary(
        model=model,
        pre=value("pre") or "",
        tokens=tuple(tokens),
        merges=tuple(value("merges") or ()),
        scores=numbers("scores"),
        token_types=numbers("token_type"),
        bos_token_id=value("bos_token_id"),
        eos_token_id=value("eos_token_id"),
        unknown_token_id=value("unknown_token_id"),
        padding_token_id=value("padding_token_id"),
        add_bos_token=value("add_bos_token"),
        add_eos_token=value("add_eos_token"),
        add_space_prefix=value("add_space_prefix"),
    )
    for name in ("scores", "token_types"):
        length = len(getattr(vocabulary, name))
        if length not in (0, len(tokens)):
            raise CheckpointError(f"{file.path} has {len(tokens)} tokens but {length} {name}")
    return vocabulary


def _eos_token_ids(file: GgufFile, vocabulary: GgufVocabulary) -> tuple[int, ...]:
    named = [file.metadata.get(f"{_PREFIX}{kind}_token_id") for kind in ("eos", "eot", "eom")]
    ids = {index for index in named if index is not None}
    pairs = zip(vocabulary.tokens, vocabulary.token_types, strict=False)
    ids.update(
        index
        for index, (token, kind) in enumerate(pairs)
        if kind in (_CONTROL, _USER_DEFINED) and token in _ENDS
    )
    return tuple(sorted(ids))
