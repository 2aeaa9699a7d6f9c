"""Grammars by xgrammar (Dong et al., 2024), which the extra `grammar` installs."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from headrace.base.errors import RequestError
from headrace.request.structured_output import StructuredOutput
from headrace.sampling.grammar.json_schema import checked_schema
from headrace.sampling.grammar.json_text_masks import JsonPlace, JsonTextMasks, place_after
from headrace.sampling.grammar.protocols import CompiledGrammar
from headrace.sampling.grammar.regex_text import checked_regex
from headrace.sampling.grammar.structural_tag import checked_structural_tag
from headrace.sampling.grammar.trial import GrammarTrial, TokenBytes
from headrace.sampling.grammar.utf8_masks import Utf8Masks
from headrace.sampling.host_mask import mask_words
from headrace.text.tokenizer import Tokenizer

MAX_MESSAGE = 500
MAX_VOCABULARIES = 4  # each copies the bytes of all tokens


def require_xgrammar() -> None:
    """Raise `RequestError` with the command to install it where xgrammar is missing."""
    if find_spec("xgrammar") is None:
        raise RequestError(
            "Structured output needs the package xgrammar",
            why="It is not installed",
            remedy="pip install 'headrace[grammar]'",
        )


def checked_form(structured: StructuredOutput) -> str:
    """The text of a form in xgrammar's terms. Quick: the size of the text bounds it.

    Raises:
        RequestError: something in it would be passed over.
    """
    match structured.kind:
        case "json_object":
            return '{"type": "object"}'
        case "json_schema":
            return checked_schema(structured.text)
        case "regex":
            return checked_regex(structured.text)
        case "choice":
            return _choices(structured)
        case "structural_tag":
            return checked_structural_tag(structured.text)
        case _:
            return structured.text


class XgrammarBackend:
    """A `GrammarBackend`.

    Special and end tokens have no bytes here: text never holds them, but for special tokens that a
    structural tag may use (`StructuredOutput.special_tokens`), which are text where it names them.

    Args:
        tokenizer: its tokens must stand for bytes (`pieces`).
        vocab_size: V of the model.
        end_token_ids: the model's own.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, end_token_ids: Collection[int]
    ) -> None:
        require_xgrammar()
        pieces = tokenizer.pieces
        assert pieces is not None, "the engine refuses other tokenizers"
        known = range(min(vocab_size, tokenizer.vocab_size))
        self._ends = frozenset(end_token_ids)
        self._tokens = TokenBytes(
            pieces=[pieces[token] for token in known],
            hidden=tokenizer.special_ids | self._ends,
            vocab_size=vocab_size,
        )
        self._token_id = tokenizer.token_id
        self._trial = GrammarTrial(self._tokens)
        self._vocabularies: OrderedDict[frozenset[int], XgrammarVocabulary] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, structured: StructuredOutput) -> CompiledGrammar:
        shown = self._shown(structured)
        self._trial.run(structured, shown)
        try:
            return self._vocabulary(shown).compile(structured)
        except RequestError:
            raise
        except Exception as error:  # xgrammar's own errors share no type
            message = str(error).strip().splitlines()[-1:] or [type(error).__name__]
            _, _, place = message[0].rpartition(".cc:")
            reason = place.partition(": ")[2].rpartition(") is false: ")[2]  # behind C++ of a check
            raise RequestError(
                f"The {structured.kind} of structured is not a grammar",
                why=(reason or message[0])[:MAX_MESSAGE],
                remedy="Correct it, or make it simpler",
            ) from error

    def close(self) -> None:
        self._trial.close()

    def _shown(self, structured: StructuredOutput) -> frozenset[int]:
        """Special tokens that are text in this form."""
        tag = structured.text
        ids = {self._token_id(each) for each in structured.special_tokens if each in tag}
        return (self._tokens.hidden - self._ends).intersection(ids)

    def _vocabulary(self, shown: frozenset[int]) -> "XgrammarVocabulary":
        with self._lock:
            made = self._vocabularies.get(shown)
            if made is None:
                texts = self._tokens.texts(shown)
                made = self._vocabularies[shown] = XgrammarVocabulary(
                    texts, self._tokens.vocab_size
                )
            self._vocabularies.move_to_end(shown)
            if len(self._vocabularies) > MAX_VOCABULARIES:
                self._vocabularies.popitem(last=False)
        return made


class XgrammarVocabulary:
    """Compiles for tokens of these bytes; those of none are never allowed, nor are ids beyond.

    xgrammar is given the bytes of each token, which makes every kind of vocabulary alike.
    """

    def __init__(self, pieces: Sequence[bytes], vocab_size: int) -> None:
        import xgrammar

        self._pieces, self._vocab_size = pieces, vocab_size
        self._utf8, self._json = Utf8Masks(pieces, vocab_size), JsonTextMasks(pieces, vocab_size)
        self._xgrammar: Any = xgrammar
        self._compiler = xgrammar.GrammarCompiler(
            xgrammar.TokenizerInfo(
                list(pieces),
                xgrammar.VocabType.RAW,
                vocab_size=vocab_size,
                stop_token_ids=[],  # those of each request are its mask's business
                add_prefix_space=False,
            ),
            max_threads=1,  # its caller has threads, and keeps the results
            cache_enabled=False,
        )

    def compile(self, structured: StructuredOutput) -> "XgrammarGrammar":
        compiled = self._compile(structured)
        json = self._json if structured.kind in ("json_schema", "json_object") else None
        grammar = XgrammarGrammar(
            compiled.memory_size_bytes,
            lambda: XgrammarMatcher(
                self._xgrammar.GrammarMatcher(compiled), self._pieces, self._utf8, json
            ),
        )
        self._check_beginning(structured, grammar.matcher())
        return grammar

    def _check_beginning(self, structured: StructuredOutput, matcher: "XgrammarMatcher") -> None:
        """Raise `RequestError` where no answer begins, as with the rule `root ::= root`."""
        line = torch.zeros(mask_words(self._vocab_size), dtype=torch.int32)
        matcher.allowed(line)
        if not (bool(line.any()) or matcher.is_complete):
            raise RequestError(
                f"The {structured.kind} of structured describes no answer",
                why="no token of this vocabulary may come first",
            )

    def _compile(self, structured: StructuredOutput) -> Any:
        compiler, text = self._compiler, checked_form(structured)
        match structured.kind:
            case "json_schema" | "json_object":
                return compiler.compile_json_schema(text, any_whitespace=structured.any_whitespace)
            case "regex":
                return compiler.compile_regex(text)
            case "structural_tag":
                return compiler.compile_structural_tag(text)
            case _:
                return compiler.compile_grammar(text)


class XgrammarGrammar:
    """A `CompiledGrammar`."""

    def __init__(self, size_bytes: int, matcher: Callable[[], "XgrammarMatcher"]) -> None:
        self.size_bytes, self.matcher = size_bytes, matcher


class XgrammarMatcher:
    """A `GrammarMatcher`."""

    def __init__(
        self,
        matcher: Any,
        pieces: Sequence[bytes],
        utf8: Utf8Masks,
        json: JsonTextMasks | None,  # for answers that are JSON as a whole
    ) -> None:
        self._matcher, self._pieces, self._utf8, self._json = matcher, pieces, utf8, json
        self._last_byte, self._place = 0, JsonPlace.OUTSIDE

    @property
    def is_complete(self) -> bool:
        return bool(self._matcher.is_completed())

    def accept(self, token_id: int) -> bool:
        if not self._matcher.accept_token(token_id):
            return False
        piece = self._pieces[token_id]  # no token without bytes is accepted
        self._last_byte = piece[-1]
        if self._json is not None:
            place = place_after(self._place, piece)
            if place is None:
                return False
            self._place = place
        return True

    def allowed(self, line: Tensor) -> None:
        self._matcher.fill_next_token_bitmask(line[None], 0)
        self._utf8.narrow(line, self._last_byte)
        if self._json is not None:
            self._json.narrow(line, self._place)


def _choices(structured: StructuredOutput) -> str:
    """The choices as one EBNF rule."""
    assert structured.choice is not None
    return "root ::= " + " | ".join(f'"{_escaped(text)}"' for text in structured.choice)


def _escaped(text: str) -> str:
    return "".join(
        character if character.isalnum() or character == " " else f"\\U{ord(character):08x}"
        for character in text
    )
