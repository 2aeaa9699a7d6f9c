"""Flags of `SamplingParams`: its fields, with a sentence for each."""

import argparse
from collections.abc import Collection
from pathlib import Path
from typing import Any

from headrace.base.errors import RequestError
from headrace.cli.flags import add_field_flags, integers
from headrace.request.sampling_params import HIDDEN_STATES, SamplingParams
from headrace.request.structured_output import KINDS, StructuredOutput

SAMPLING_HELP = {
    "max_tokens": "most tokens to make; by default 128, in chat what the context holds",
    "min_tokens": "no end before so many tokens",
    "temperature": "0 takes the likeliest token, higher is more random",
    "top_p": "keep the likeliest tokens of this total probability",
    "top_k": "keep the k likeliest tokens; -1: all",
    "min_p": "keep tokens at least this share of the likeliest one's probability",
    "seed": "64-bit seed of the sequences",
    "n": "sequences per prompt",
    "stop": "text that ends the output; may be given several times",
    "stop_token_ids": "token ids that end the output",
    "ignore_eos": "go on after the model's own end token",
    "presence_penalty": "subtracted once for tokens of the output, -2 to 2",
    "frequency_penalty": "subtracted per occurrence in the output, -2 to 2",
    "repetition_penalty": "above 1 makes tokens of prompt and output less likely",
    "logit_bias": "added to the logits of tokens",
    "bad_words": "text that must not appear; may be given several times",
    "allowed_token_ids": "the only token ids that may appear",
    "structured": "form of the output: json_object, or one of json_schema, regex, grammar, choice "
    "(a|b|c), structural_tag with =TEXT or =@FILE",
    "logprobs": "log-probabilities of the n likeliest output tokens (0: of the chosen one)",
    "prompt_logprobs": "the same for the tokens of the prompt",
    "logprobs_mode": "raw (before penalties, bias and filters) or processed (after)",
    "logprob_token_ids": "token ids whose log-probabilities are always returned",
    "return_hidden_states": "return hidden states: none, final (of the last output token), last "
    "(of each) or all",
    "hidden_state_layers": "their layers, 0 the embedding, negative ones from the end, as in =0,-1",
    "return_routed_experts": "return the experts of each token (--enable-return-routed-experts)",
    "include_stop_str_in_output": "keep what ended the text, a stop string or token",
    "skip_special_tokens": "leave special tokens out of the text",
}

# What the text alone has no place for.
NEEDS_JSON = (
    "logprobs",
    "prompt_logprobs",
    "logprobs_mode",
    "logprob_token_ids",
    "return_hidden_states",
    "return_routed_experts",
)
NOT_IN_CHAT = ("n", *NEEDS_JSON, "hidden_state_layers")


def add_sampling_flags(parser: argparse.ArgumentParser, skip: Collection[str] = ()) -> None:
    """One flag per field; where the engine has one of that name, it is `--sampling-...`."""
    add_field_flags(
        parser,
        SamplingParams,
        sections={"max_tokens": "sampling"},
        help_of=SAMPLING_HELP,
        rename={name: f"sampling_{name}" for name in ("seed", "hidden_state_layers")},
        skip=skip,
        readers={
            "structured": {"type": structured_output, "metavar": "FORM"},
            "return_hidden_states": {"choices": HIDDEN_STATES},
            "hidden_state_layers": {"type": integers, "metavar": "LAYER,LAYER,..."},
        },
        note="The checkpoint's generation config, if any, goes before these defaults.",
    )


def structured_output(text: str) -> StructuredOutput:
    """json_object, regex=[0-9]+, json_schema=@FILE, choice=yes|no"""
    kind, _, value = text.partition("=")
    if kind not in KINDS:
        raise argparse.ArgumentTypeError(f"{kind!r} is none of {', '.join(KINDS)}")
    try:
        if value.startswith("@"):
            value = Path(value[1:]).read_text(encoding="utf-8")
        forms: dict[str, Any] = {"json_object": True, "choice": value.split("|")}
        form: dict[str, Any] = {kind: forms.get(kind, value)}
        return StructuredOutput(**form)
    except (OSError, UnicodeDecodeError, RequestError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
