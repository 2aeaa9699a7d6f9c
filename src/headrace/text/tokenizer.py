"""`Tokenizer`: text to ids and back, the same for every source a vocabulary can come from."""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, Protocol, Self

from headrace.base.errors import RequestError
from headrace.base.log import get_logger
from headrace.base.unknown_names import OtherWords, attributes_answered
from headrace.text.chat_template import ChatTemplate
from headrace.text.pieces import Pieces

log = get_logger(__name__)

TOKENIZER_WORDS = OtherWords(
    renamed={"all_special_ids": "special_ids", "eos_token_id": "eos_token_ids"},
    advice={
        **dict.fromkeys(("batch_decode", "batch_encode_plus"), "take one text at a time"),
        **dict.fromkeys(("bos_token", "eos_token", "pad_token"), "use special_tokens"),
        "chat_template": "use template_text",
        "convert_ids_to_tokens": "use token_text(id)",
        "convert_tokens_to_ids": "use token_id(text)",
        "tokenize": "use encode(text)",
    },
)
"""Attributes of transformers' tokenizers -> what there is here."""

_TO_TENSORS = (
    *("max_length", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors"),
    *("tokenize", "truncation"),
)  # transformers' arguments of apply_chat_template, for ids in place of the text


class Backend(Protocol):
    """What turns text into ids. `pieces` is None when its decoding is not a join of bytes.

    `vocab_size` is one more than the largest id that means something.
    """

    vocab_size: int
    special_ids: frozenset[int]
    pieces: Pieces | None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...

    def token_id(self, token: str) -> int | None: ...


@attributes_answered(TOKENIZER_WORDS)
class Tokenizer:
    """A vocabulary with its special tokens and chat template. Safe to share between threads.

    Args:
        special_tokens: names as templates know them (bos_token, eos_token, ...) -> their text.
        eos_token_ids: every id that ends a sequence.
        chat_template: None for a model without one; then chat is refused and completion works.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str],
        eos_token_ids: frozenset[int],
        chat_template: ChatTemplate | None,
    ) -> None:
        self._backend = backend
        self._chat_template = chat_template
        self.special_tokens = dict(special_tokens)
        self.eos_token_ids = eos_token_ids
        self.special_ids = backend.special_ids
        self.vocab_size = backend.vocab_size
        self.pieces = backend.pieces
        self._longest_piece: int | None = None
        self._has_warned = False
        bos = special_tokens.get("bos_token")
        self.bos_token_id = None if bos is None else backend.token_id(bos)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    @property
    def template_text(self) -> str | None:
        """Source of the chat template, of all of them if there are several."""
        return None if self._chat_template is None else self._chat_template.text

    @property
    def template_variables(self) -> frozenset[str]:
        """Names that the chat template asks for, those that the server gives among them."""
        return frozenset() if self._chat_template is None else self._chat_template.variables

    def with_chat_template(self, text: str) -> Self:
        """The same vocabulary with another chat template, in Jinja."""
        changed = copy(self)
        changed._chat_template = ChatTemplate({"default": text})
        return changed

    def token_id(self, token: str) -> int | None:
        """The id of a token by its text, if there is one."""
        return self._backend.token_id(token)

    @property
    def longest_piece(self) -> int | None:
        """Bytes of the longest token, so that a text of n bytes has at least n / this tokens;
        `None` where tokens do not stand for bytes. The first call reads the whole vocabulary."""
        if self._longest_piece is None and self.pieces is not None:
            self._longest_piece = max(len(self.pieces[token]) for token in range(self.vocab_size))
        return self._longest_piece

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. Special tokens written in the text become their ids.

        `add_special_tokens` adds what the model wants around a text (bos, eos); leave it off for
        the result of `apply_chat_template`, which writes them itself. A text that begins with bos
        gets a second one, as in transformers; the first time the log says so.

        Raises:
            RequestError: the text holds half of a surrogate pair, which no encoding can carry.
        """
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise RequestError(
                    f"the text has a lone surrogate at character {error.start}",
                    why="It is not valid Unicode and cannot be written as UTF-8",
                    remedy="Send the whole character",
                ) from None
        ids = self._backend.encode(text, add_special_tokens)
        if add_special_tokens and not self._has_warned and ids[:2] == [self.bos_token_id] * 2:
            self._has_warned = True
            log.warning(
                "A text begins with %s and got another one before it, which few models expect. A "
                "chat template writes its own: use chat, or give the ids of encode(text, "
                "add_special_tokens=False)",
                self.special_tokens["bos_token"],
            )
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; invalid UTF-8 gives U+FFFD, ids out of the vocabulary give nothing.

        Where sentencepiece byte tokens are no valid UTF-8 the valid characters among them are kept,
        as sentencepiece does; the `tokenizers` library would replace the whole run of bytes.
        """
        pieces = self.pieces
        if pieces is None:
            known = [token_id for token_id in ids if 0 <= token_id < self.vocab_size]
            return self._backend.decode(known, skip_special_tokens)
        hidden = self.special_ids if skip_special_tokens else frozenset[int]()
        return pieces.rules.text([pieces[i] for i in ids if i not in hidden])

    def token_text(self, token_id: int) -> str:
        """Text of one token by itself, its leading space kept (for logprobs)."""
        if self.pieces is not None:
            return self.pieces[token_id].decode("utf-8", self.pieces.rules.errors)
        return self.decode([token_id], skip_special_tokens=False)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,  # so that a variable may have any name
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation, special tokens written in it as text.

        Args:
            messages: dicts with `role` and `content`, a string or a list of text parts.
            tools: JSON schemas for templates that offer functions.
            add_generation_prompt: end with the opening of the assistant's turn.
            continue_final_message: leave the last message open, to be written on.
            variables: further names for the template (`enable_thinking`, ...).

        Raises:
            RequestError: no template, messages it cannot take, or its own refusal; or ids were
                asked for, as of transformers.
        """
        for name in _TO_TENSORS:
            if variables.get(name) and name not in self.template_variables:
                raise RequestError(
                    f"apply_chat_template has no {name}",
                    why="it gives the text",
                    remedy="Give that to encode, with add_special_tokens=False",
                )
        if self._chat_template is None:
            raise RequestError(
                "this model has no chat template",
                why="Neither its tokenizer nor its file brings one, as usual for base models",
                remedy="Send a plain prompt to LLM.generate or /v1/completions, or name a file "
                "with a template (option chat_template)",
            )
        return self._chat_template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**self.special_tokens, **variables},
        )
