"""How byte-level BPE vocabularies cut text before merging, by the name GGUF files give it.

The names, which models share a rule, and the flags are facts of llama.cpp (`llama-vocab.cpp`);
the expressions are those of the models' own tokenizer.json files. Each expression cuts the pieces
the one before it left.
"""

from dataclasses import dataclass

from headrace.base.errors import UnsupportedError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_SIGNS}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD, _SLASHED = r"[^\r\n\p{L}\p{N}]?", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}|{_SLASHED}|{_SPACES}"
_GPT4O = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_SLASHED}|{_SPACES}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """`whole_words_first`: a piece that is a token is taken before any merge is tried.

    `adds_bos` holds for a file that does not say. `composed`: text is brought to NFC first.
    """

    splits: tuple[str, ...]
    whole_words_first: bool = False
    adds_bos: bool = False
    composed: bool = False


_RULES: tuple[tuple[PreTokenizer, str], ...] = (
    (
        PreTokenizer(splits=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
        "default",
    ),
    (
        PreTokenizer(splits=(_GPT2,)),
        "gpt-2 phi-2 mpt olmo jais exaone4 trillion granite-docling gigachat a.x-4.0 mellum",
    ),
    (
        PreTokenizer(splits=(r"\p{N}", _GPT2)),
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    ),
    (
        PreTokenizer(splits=(_LLAMA3,), whole_words_first=True, adds_bos=True),
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    ),
    (PreTokenizer(splits=(_LLAMA3,)), "dbrx smaug-bpe glm4 chatglm-bpe"),
    (PreTokenizer(splits=(_QWEN2,), composed=True), "qwen2"),
    (
        PreTokenizer(splits=(_QWEN2,)),
        "deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
    ),
    (PreTokenizer(splits=(_QWEN35,), composed=True), "qwen35"),
    (PreTokenizer(splits=(_TEKKEN,), whole_words_first=True, adds_bos=True), "tekken"),
    (PreTokenizer(splits=(_GPT4O,)), "gpt-4o llama4 kanana2 talkie minimax-m2"),
)
PRE_TOKENIZERS = {name: rule for rule, names in _RULES for name in names.split()}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The rule for `tokenizer.ggml.pre`; a file without the key means "default"."""
    rule = PRE_TOKENIZERS.get(name or "default")
    if rule is None:
        raise UnsupportedError(
            f"the pre-tokenizer {name!r} of this GGUF file is not known",
            why="Cutting text by another rule would give the model ids it was not trained on",
            remedy=f"Known are: {', '.join(sorted(PRE_TOKENIZERS))}. Or name a folder with a "
            "tokenizer.json as the tokenizer",
        )
    return rule
