"""What the vocabulary says: the tokenizer, text of tokens, end tokens, grammars over it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.base.log import get_logger
from headrace.runner.assembly import Settled
from headrace.sampling.grammar.compiler import GrammarCompiler
from headrace.sampling.grammar.xgrammar_backend import XgrammarBackend
from headrace.text.build import build_tokenizer
from headrace.text.tokenizer import Tokenizer

log = get_logger(__name__)


def tokenizer_of(settled: Settled) -> Tokenizer | None:
    """The tokenizer of the checkpoint, if it has one."""
    source = settled.tokenizer_source
    return None if source is None else build_tokenizer(source)


def grammar_compiler(
    tokenizer: Tokenizer | None, vocab_size: int, end_token_ids: frozenset[int]
) -> GrammarCompiler:
    """Compiles grammars over this vocabulary, in processes that start when the first one comes."""

    def load() -> XgrammarBackend:
        assert tokenizer is not None, "check_structured asks for one"
        return XgrammarBackend(tokenizer, vocab_size, end_token_ids)

    return GrammarCompiler(load)


def token_text(tokenizer: Tokenizer | None) -> Callable[[int], str | None]:
    """Text of a token id, for logprobs."""
    return (lambda token_id: None) if tokenizer is None else tokenizer.token_text


def eos_token_ids_of(settled: Settled, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Ids that end a sequence: those of config, generation config and tokenizer together."""
    ids = set() if tokenizer is None else set(tokenizer.eos_token_ids)
    for config in (settled.checkpoint.config, settled.checkpoint.generation_config):
        ids |= _stated_ids(config)
    vocab_size = settled.persona.traits.vocab_size
    outside = sorted(token for token in ids if not 0 <= token < vocab_size)
    if outside:
        log.warning("End tokens %s are outside the vocabulary of %d ids", outside, vocab_size)
    return frozenset(ids.difference(outside))


def _stated_ids(config: Mapping[str, Any]) -> set[int]:
    stated = config.get("eos_token_id")
    return set(stated) if isinstance(stated, Sequence) else set() if stated is None else {stated}
