"""How tokens are chosen for one request. Names follow vLLM; validated when made."""

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass

from headrace.base.errors import UnknownFieldError
from headrace.base.unknown_names import names_answered
from headrace.request.checks import bad_value, integer, listed, number, switch
from headrace.request.other_words import SAMPLING_WORDS
from headrace.request.structured_output import StructuredOutput

MAX_LOGPROBS = 1024
MAX_SEQUENCES = 1024
MAX_STOP_IDS = 64
MAX_BIASES = 2**19  # of logit_bias, and ids of allowed_token_ids: above any vocabulary
MAX_STRINGS = 1024  # of stop, and of bad_words: every token is held against each
MAX_STRING_CHARACTERS = 2**16  # of them together
MAX_STATE_LAYERS = 1024  # of hidden_state_layers: above any model's
HIDDEN_STATES = ("none", "final", "last", "all")
MAX_NEW_TOKENS = 2**30  # a prompt and so many tokens still count in 32 bits
LAST_STATE = (-1,)
_MAX_INT32 = 2**31 - 1
_INT64 = 2**63
_MOST_IDS = {
    "stop_token_ids": MAX_STOP_IDS,
    "allowed_token_ids": MAX_BIASES,
    "logprob_token_ids": MAX_LOGPROBS,
}


@names_answered(SAMPLING_WORDS, "field of SamplingParams", UnknownFieldError)
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling options of one request.

    Attributes:
        max_tokens: most tokens to make; `None` lets the face decide (128 offline, the rest of the
            context in chat, 16 for raw HTTP completions).
        min_tokens: stop ids (end of sequence included) are masked until so many are made.
        temperature: 0 takes the arg-max; logits are divided by it otherwise.
        top_p, top_k, min_p: filters, applied in the order top-k, top-p, min-p; top_k -1 or 0 and
            top_p 1 and min_p 0 mean off.
        seed: `None` or -1 draws one at admission, as in vLLM and llama.cpp. Sequence i of n uses
            a stream of its own.
        n: sequences per prompt.
        stop: strings that end the text; `stop_token_ids`: tokens that end it.
        ignore_eos: the model's own end tokens do not end it.
        presence_penalty, frequency_penalty: subtracted for tokens of the output (OpenAI).
        repetition_penalty: divides positive, multiplies negative logits of tokens of prompt and
            output (CTRL, Keskar et al. 2019).
        logit_bias: token id -> value added to its logit.
        bad_words: strings that must not appear; allowed_token_ids: the only ids that may.
        structured: the form the answer must have; see `StructuredOutput`.
        logprobs: top n of each output token (0: the chosen one only); prompt_logprobs likewise.
        logprobs_mode: raw (before penalties, bias, mask and filters) or processed (after them).
        logprob_token_ids: ids whose logprobs are always returned too.
        return_hidden_states: "last" (or True): the state that each output token was drawn from;
            "final": that of the last one alone; "all": those of every prompt token too; "none" (or
            False).
        hidden_state_layers: which states, numbered as transformers' `output_hidden_states`: 0 is
            the embedding, i the stream behind i layers, the number of layers (or -1) the state
            after the last norm; negative ones count from there.
        return_routed_experts: the experts of every token that was read, in a mixture of them.
        include_stop_str_in_output: the text keeps what ended it, a stop string or a token.
        skip_special_tokens: special tokens, those that end it too, do not show.

    Raises:
        RequestError: (a ValueError) naming field, value and range; for a field that there is not,
            the one that was meant.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None
    structured: StructuredOutput | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: str = "raw"
    logprob_token_ids: Sequence[int] = ()
    return_hidden_states: bool | str = "none"
    hidden_state_layers: Sequence[int] = LAST_STATE
    return_routed_experts: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            self._set_integer("max_tokens", 1, MAX_NEW_TOKENS)
        self._set_integer(
            "min_tokens", 0, MAX_NEW_TOKENS if self.max_tokens is None else self.max_tokens
        )
        self._set_number("temperature", 0.0, 100.0)
        self._set_number("top_p", 0.0, 1.0, open_low=True)
        self._set_integer("top_k", -1, _MAX_INT32)
        self._set_number("min_p", 0.0, 1.0)
        if self.seed is not None:
            self._set_integer("seed", -_INT64, _INT64 - 1)
            if self.seed == -1:
                self._set("seed", None)
        self._set_integer("n", 1, MAX_SEQUENCES)
        for name in ("presence_penalty", "frequency_penalty"):
            self._set_number(name, -2.0, 2.0)
        self._set_number("repetition_penalty", 0.01, 100.0)  # smaller ones overflow float32
        self._normalise_stops()
        self._normalise_ids()
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._set_integer(name, 0, MAX_LOGPROBS)
        if not isinstance(self.structured, StructuredOutput | None):
            raise bad_value("structured", self.structured, "a StructuredOutput")
        mode = self.logprobs_mode  # an array must not be asked whether it equals a text
        if not isinstance(mode, str) or mode not in ("raw", "processed"):
            raise bad_value("logprobs_mode", mode, "raw or processed")
        for name in (
            "ignore_eos",
            "return_routed_experts",
            "include_stop_str_in_output",
            "skip_special_tokens",
        ):
            switch(name, getattr(self, name))
        self._normalise_states()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    @property
    def has_bias(self) -> bool:
        return bool(self.logit_bias) or self.allowed_token_ids is not None

    @property
    def has_filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def wants_hidden_states(self) -> bool:
        return self.return_hidden_states != "none"

    def state_layers(self, num_layers: int) -> tuple[int, ...]:
        """`hidden_state_layers` as numbers from 0, the embedding, to `num_layers`.

        Raises:
            RequestError: the model has no such layer.
        """
        for layer in self.hidden_state_layers:
            if not -num_layers - 1 <= layer <= num_layers:
                raise bad_value(
                    "hidden_state_layers",
                    self.hidden_state_layers,
                    f"integers in [{-num_layers - 1}, {num_layers}]: this model has {num_layers} "
                    "layers",
                )
        return tuple(layer % (num_layers + 1) for layer in self.hidden_state_layers)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `RequestError` when a token id of any field is not in [0, vocab_size)."""
        for name, ids in (
            ("logit_bias", self.logit_bias or ()),
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("logprob_token_ids", self.logprob_token_ids),
        ):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise bad_value(name, token, f"token ids in [0, {vocab_size})")

    def _normalise_states(self) -> None:
        asked = self.return_hidden_states
        if isinstance(asked, bool):
            asked = "last" if asked else "none"
        if not isinstance(asked, str) or asked not in HIDDEN_STATES:
            raise bad_value(
                "return_hidden_states", asked, f"{', '.join(HIDDEN_STATES)}, True or False"
            )
        self._set("return_hidden_states", asked)
        name, value = "hidden_state_layers", self.hidden_state_layers
        if value is LAST_STATE:
            return
        if isinstance(value, str | bytes | Mapping):
            raise bad_value(name, value, "a list of layers")
        limits = f"1 to {MAX_STATE_LAYERS} layers"
        if isinstance(value, Sized) and len(value) > MAX_STATE_LAYERS:  # before it is copied
            raise bad_value(name, value, limits)
        layers = listed(name, value, "a list of layers")
        if not 1 <= len(layers) <= MAX_STATE_LAYERS:
            raise bad_value(name, value, limits)
        most = MAX_STATE_LAYERS
        layers = tuple(integer(name, layer, -most, most) for layer in layers)
        if asked == "none" and layers != LAST_STATE:
            raise bad_value(name, layers, "layers beside return_hidden_states")
        self._set(name, layers)

    def _normalise_stops(self) -> None:
        for name in ("stop", "bad_words"):
            value = getattr(self, name)
            if type(value) is tuple and not value:
                continue  # nothing is asked, as nearly always
            strings = (value,) if isinstance(value, str) else value
            if strings is None:
                strings = ()
            strings = listed(name, strings, "a string or a list of strings")
            if any(not isinstance(text, str) or not text for text in strings):
                raise bad_value(name, value, "strings that are not empty")
            if len(strings) > MAX_STRINGS or sum(map(len, strings)) > MAX_STRING_CHARACTERS:
                raise bad_value(
                    name,
                    value,
                    f"at most {MAX_STRINGS} strings of {MAX_STRING_CHARACTERS} characters together",
                )
            self._set(name, strings)

    def _normalise_ids(self) -> None:
        for name in _MOST_IDS:
            value = getattr(self, name)
            if type(value) is tuple and not value:
                continue
            if value is None:
                self._set(name, None if name == "allowed_token_ids" else ())
                continue
            if isinstance(value, str | bytes | Mapping):
                raise bad_value(name, value, "a list of token ids")
            tokens, most = listed(name, value, "a list of token ids"), _MOST_IDS[name]
            if len(tokens) > most:
                raise bad_value(name, value, f"at most {most} ids")
            self._set(name, tuple(integer(name, token, 0, _MAX_INT32) for token in tokens))
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise bad_value("allowed_token_ids", self.allowed_token_ids, "at least one token id")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise bad_value("logit_bias", self.logit_bias, "a mapping of token id to number")
            if len(self.logit_bias) > MAX_BIASES:
                raise bad_value("logit_bias", self.logit_bias, f"at most {MAX_BIASES} ids")
            bias = {
                integer("logit_bias", token, 0, _MAX_INT32): number("logit_bias", value, -1e6, 1e6)
                for token, value in self.logit_bias.items()
            }
            self._set("logit_bias", bias)

    def _set_integer(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if type(value) is int and low <= value <= high:
            return  # as it should be: nearly always, and each request comes here twice
        self._set(name, integer(name, value, low, high))

    def _set_number(self, name: str, low: float, high: float, *, open_low: bool = False) -> None:
        value = getattr(self, name)
        if type(value) is float and low <= value <= high and not (open_low and value == low):
            return
        self._set(name, number(name, value, low, high, open_low=open_low))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # normalising a frozen field, once, while it is made
