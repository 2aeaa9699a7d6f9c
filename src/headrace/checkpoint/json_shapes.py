"""What the JSON files of a checkpoint folder must look like, as far as they are read.

Each is held against a file by `folder_files.read_json`, so that whoever uses a value needs no
check of its type. Keys that stand in no shape may hold anything.
"""

from typing import Annotated, Any

import msgspec

MOST_LAYERS = 10_000  # a count beyond any model's, refused before lists of that length are built

_TokenIds = int | list[int] | None


class _Token(msgspec.Struct):
    """A token that is written as an object."""

    content: str


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


_TokenText = str | _Token
_SpecialToken = _TokenText | None
_SeveralTokens = list[_TokenText] | dict[str, _TokenText] | None


class _ModelPart(msgspec.Struct):
    eos_token_id: _TokenIds = None
    num_hidden_layers: Annotated[float, msgspec.Meta(le=MOST_LAYERS)] | None = None
    quantization_config: dict[str, Any] | None = None
    compression_config: dict[str, Any] | None = None


class ModelConfig(_ModelPart):
    """config.json"""

    text_config: _ModelPart | None = None


class GenerationConfig(msgspec.Struct):
    """generation_config.json"""

    eos_token_id: _TokenIds = None


class TokenizerConfig(msgspec.Struct):
    """tokenizer_config.json, and special_tokens_map.json and chat_template.json: parts of it."""

    bos_token: _SpecialToken = None
    eos_token: _SpecialToken = None
    unk_token: _SpecialToken = None
    sep_token: _SpecialToken = None
    pad_token: _SpecialToken = None
    cls_token: _SpecialToken = None
    mask_token: _SpecialToken = None
    additional_special_tokens: _SeveralTokens = None
    extra_special_tokens: _SeveralTokens = None
    added_tokens_decoder: dict[int, _Token] | None = None
    chat_template: str | list[_NamedTemplate] | None = None
    auto_map: dict[str, Any] | None = None


class WeightIndex(msgspec.Struct):
    """model.safetensors.index.json"""

    weight_map: dict[str, str] | None = None
