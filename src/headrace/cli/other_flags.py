"""The flags that vLLM and SGLang have, in the place of which ours are taken or named."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from headrace.base.errors import ConfigError
from headrace.base.unknown_names import OtherWords
from headrace.cli.flags import flag_of
from headrace.config.other_words import AS_HERE, ENGINE_WORDS
from headrace.request.other_words import FORMS, SAMPLING_WORDS

# Theirs of the server -> ours.
_OF_SERVER = {"enable_log_requests": "log_requests", "allowed_origins": "cors_origins"}
# A server's switches; what those without ours ask for is always so here.
_SERVER_SWITCHES: Mapping[str, Mapping[str, Any]] = {
    "disable_log_requests": {"log_requests": False},
    "disable_uvicorn_access_log": {},
    "enable_auto_tool_choice": {},
    "enable_cache_report": {},
    "enable_metrics": {},
    "enable_prompt_tokens_details": {},
    "enable_reasoning": {},
    "enable_request_id_headers": {},
    "enable_trace": {},
}


def _typed(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Options as they are typed: `False` as --no-..., `True` as the flag alone."""
    words: list[str] = []
    for option, value in options.items():
        flag = flag_of(option)
        if value is False:
            flag = flag.replace("--", "--no-", 1)
        words += [flag] if isinstance(value, bool) else [flag, str(value)]
    return tuple(words)


ALIASES = {
    flag_of(theirs): flag_of(ours)
    for renamed in (ENGINE_WORDS.renamed, _OF_SERVER)
    for theirs, ours in renamed.items()
}
"""Their name -> ours. A value of the flag stays where it is."""

SWITCHES = {
    flag_of(theirs): _typed(ours)
    for switches in (ENGINE_WORDS.switches, _SERVER_SWITCHES)
    for theirs, ours in switches.items()
}
"""Their flag without a value -> ours."""

ONLY = {"-dp": ("1",), "-pp": ("1",), "-tp": ("1",)} | {
    flag_of(theirs): values for theirs, values in AS_HERE.items()
}
"""Their flag -> the values that ask for what is so here anyway."""

_RENAMED = ALIASES | {
    flag_of(theirs): flag_of(ours) for theirs, ours in SAMPLING_WORDS.renamed.items()
}
_ADVICE = {
    flag_of(theirs): advice
    for words in (SAMPLING_WORDS, ENGINE_WORDS)
    for theirs, advice in words.advice.items()
} | {flag_of(theirs): f"use --structured {form}=..." for theirs, form in FORMS.items()}

_GRAPH_SIZES = "--decode-graph"  # theirs take a word for each size, ours one for all

_ADDRESS = "use --base-url http://HOST:PORT"
_LINES = "use --output-file"
_SHOWN = "the median, p90 and p99 of all times are shown"
OF_BENCH_SERVE = {
    "--apply-chat-template": "use --endpoint chat",
    "--backend": "every server is asked over OpenAI's API; --endpoint says which route",
    "--burstiness": "arrivals of a --request-rate are Poisson, whose burstiness is 1",
    "--dataset-name": "prompts are random, or those of --prompt-file",
    "--dataset-path": "use --prompt-file",
    "--disable-ignore-eos": "use --no-ignore-eos",
    "--disable-stream": "answers are streamed, or nobody would see their first token",
    "--extra-request-body": "use --extra-body",
    "--host": _ADDRESS,
    "--metric-percentiles": _SHOWN,
    "--num-warmups": "use --warm-up",
    "--percentile-metrics": _SHOWN,
    "--port": _ADDRESS,
    "--profile": "/start_profile of the server, while this runs",
    "--random-prefix-len": "use --shared-prefix-len",
    "--random-range-ratio": "use --input-len 64-256, a range",
    "--result-dir": _LINES,
    "--result-filename": _LINES,
    "--save-result": _LINES,
    "--seed": "use --load-seed",
    "--sharegpt-output-len": "use --output-len",
    "--tokenizer": "prompts are token ids, or words of about a token each",
    "--warmup-requests": "use --warm-up",
}
"""Flags of their benchmarks of a server -> what there is."""


def in_our_names(typed: Sequence[str]) -> list[str]:
    """Arguments of a verb with their flags as ours; values and everything after `--` stay.

    Raises:
        ConfigError: a flag asks for something that is not here.
    """
    ours: list[str] = []
    left = list(typed)
    while left:
        argument = left.pop(0)
        if argument == "--":
            return [*ours, argument, *left]
        name, equals, value = argument.partition("=")
        if name in SWITCHES:
            if equals:
                raise ConfigError(f"{name} takes no value")
            ours += SWITCHES[name]
        elif name in ONLY:
            asked = value if equals else _value_of(name, left)
            if asked not in ONLY[name]:
                why = ENGINE_WORDS.exact_answer(name.lstrip("-").replace("-", "_"))
                raise ConfigError(f"{name} is {asked}", why=why)
        elif ALIASES.get(name) == _GRAPH_SIZES and not equals:
            ours += [_GRAPH_SIZES, ",".join(_sizes_of(name, left))]
        else:
            ours.append(ALIASES.get(name, name) + equals + value)
    return ours


def _sizes_of(name: str, left: list[str]) -> list[str]:
    """Take the sizes in front, in one word or many."""
    sizes = [_value_of(name, left)]
    while left and left[0].isdecimal():
        sizes.append(left.pop(0))
    return sizes


def _value_of(name: str, left: list[str]) -> str:
    if not left:
        raise ConfigError(f"{name} needs a value")
    return left.pop(0)


def meant(flag: str, known: Collection[str]) -> str:
    """What to type in place of `flag`, or why there is nothing; "" where nobody knows.

    Args:
        known: the flags of the verb.
    """
    if _RENAMED.get(flag, flag) not in (flag, *known):
        return ""  # another verb has it
    switches = {theirs: ours for theirs, ours in SWITCHES.items() if set(ours) & set(known)}
    words = OtherWords(
        renamed={theirs: ours for theirs, ours in _RENAMED.items() if ours in known},
        advice=_ADVICE | {theirs: f"use {' '.join(ours)}" for theirs, ours in switches.items()},
        families=ENGINE_WORDS.families,
    )
    return words.answer(flag, known)
