"""`headrace generate MODEL`: complete prompts; one prompt streams, many run as a batch."""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING, Any

from headrace.base.errors import ConfigError
from headrace.cli.flags import flag_of, given_fields
from headrace.cli.prompt_file import prompt_lines
from headrace.cli.sampling_flags import NEEDS_JSON
from headrace.cli.start import start
from headrace.cli.watch_flags import check as check_watched
from headrace.cli.watch_flags import watching
from headrace.request.outcome import Logprob
from headrace.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    from headrace.engine.outputs import CompletionOutput, Piece, RequestOutput
    from headrace.engine.token_states import TokenStates
    from headrace.llm import LLM

FAILED = 1
NOT_FAILED = ("stop", "length")

Prompt = str | Sequence[int]


@dataclass(slots=True, kw_only=True)
class Clock:
    """Times of one run on the host, in seconds, and the tokens made."""

    started: float
    first_token: float | None = None
    ended: float = 0.0
    tokens: int = 0

    def count(self, tokens: int) -> None:
        self.ended = time.perf_counter()
        if tokens and self.first_token is None:
            self.first_token = self.ended
        self.tokens += tokens


def run(arguments: argparse.Namespace) -> int:
    given = given_fields(arguments, SamplingParams)
    SamplingParams(**given)  # out-of-range values show before the model loads
    if not arguments.json:
        _refuse_what_text_cannot_show(given)
    check_watched(arguments)
    prompts = read_prompts(arguments)
    with start(arguments, chats=arguments.chat) as llm:
        params = replace(llm.get_default_sampling_params(), **given)
        clock = Clock(started=time.perf_counter())
        try:
            with watching(llm, arguments):
                failed = _run(llm, prompts, params, arguments, clock)
        except KeyboardInterrupt:
            clock.count(0)
            if arguments.stats:
                print(f"\n{_statistics(llm, clock)}", file=sys.stderr)
            raise
        if arguments.stats:
            print(_statistics(llm, clock), file=sys.stderr)
    return FAILED if failed else 0


def _run(
    llm: "LLM",
    prompts: list[Prompt],
    params: SamplingParams,
    arguments: argparse.Namespace,
    clock: Clock,
) -> bool:
    """Whether a prompt failed. One prompt streams."""
    if len(prompts) == 1 and params.n == 1 and not arguments.json:
        return _stream(llm, prompts[0], params, chat=arguments.chat, clock=clock)
    return _batch(llm, prompts, params, arguments, clock)


def _refuse_what_text_cannot_show(given: Mapping[str, Any]) -> None:
    asked = [
        name
        for name in NEEDS_JSON
        if not any(given.get(name) is no for no in (None, False, "none"))
    ]
    flags = [flag_of(name) for name in asked]
    if flags:
        raise ConfigError(
            f"{', '.join(flags)} {'needs' if len(flags) == 1 else 'need'} --json",
            why="plain text has no place for it",
            remedy="Add --json, or leave it out",
        )


def read_prompts(arguments: argparse.Namespace) -> list[Prompt]:
    """Prompts of the arguments, of a file, or standard input as one prompt.

    Raises:
        ConfigError: none is given, several sources are, or the file cannot be read.
    """
    file = arguments.prompt_file
    named: list[Prompt] = [*(arguments.prompt or ()), *(arguments.prompt_ids or ())]
    if named and file:
        raise ConfigError("Prompts given on the command line and in a file", remedy="Give one")
    if file:
        return list(prompt_lines(file))
    if named:
        return named
    if sys.stdin is None or sys.stdin.isatty():  # None: it is closed
        raise ConfigError(
            "No prompt given", remedy="Use -p TEXT, --prompt-file FILE, or standard input"
        )
    try:
        text = sys.stdin.read().removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("Standard input cannot be read", why=str(error)) from None
    if not text:
        raise ConfigError("The prompt on standard input is empty", remedy="Send some text")
    return [text]


def _stream(
    llm: "LLM", prompt: Prompt, params: SamplingParams, *, chat: bool, clock: Clock
) -> bool:
    pieces: Iterator[Piece]
    pieces = llm.stream_chat([_user(prompt)], params) if chat else llm.stream(prompt, params)
    last: Piece | None = None
    shown = False
    for last in pieces:
        clock.count(len(last.token_ids))
        shown = shown or bool(last.text)
        print(last.text, end="", flush=True)
    print()
    if clock.tokens and not shown:
        print(f"no text in {clock.tokens} tokens; --json shows their ids", file=sys.stderr)
    if last is None or last.finish_reason in NOT_FAILED:
        return False
    _tell_failure(last.finish_reason, last.message)
    return True


def _tell_failure(reason: str | None, message: str) -> None:
    print(f"headrace: {reason}: {message}", file=sys.stderr)


def _user(prompt: Prompt) -> dict[str, str]:
    if not isinstance(prompt, str):
        raise ConfigError("--chat needs text", why="a chat template is written around text")
    return {"role": "user", "content": prompt}


def _batch(
    llm: "LLM",
    prompts: list[Prompt],
    params: SamplingParams,
    arguments: argparse.Namespace,
    clock: Clock,
) -> bool:
    bar = sys.stderr.isatty()
    if arguments.chat:
        results = llm.chat([[_user(prompt)] for prompt in prompts], params, use_tqdm=bar)
    else:
        results = llm.generate(prompts, params, use_tqdm=bar)
    clock.count(sum(len(output.token_ids) for result in results for output in result.outputs))
    failed = False
    for number, result in enumerate(results):
        for output in result.outputs:
            if output.finish_reason not in NOT_FAILED:
                failed = True
                _tell_failure(output.finish_reason, output.message)
            if arguments.json:
                line = output_dict(number, result, output)
                print(json.dumps(line, ensure_ascii=not _shows_unicode(), allow_nan=False))
            else:
                print(f"--- prompt {number}, output {output.index} ({output.finish_reason})")
                print(output.text)
    return failed


def _shows_unicode() -> bool:
    """Whether standard output takes every character; JSON has escapes for those it does not."""
    return (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") == "utf8"


def output_dict(number: int, result: "RequestOutput", output: "CompletionOutput") -> dict[str, Any]:
    """One output as plain types; -inf is shown as -9999."""
    prompt_logprobs = result.prompt_logprobs
    return {
        "prompt_index": number,
        "index": output.index,
        "prompt": result.prompt,
        "prompt_token_ids": list(result.prompt_token_ids),
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "message": output.message,
        "logprobs": None if output.logprobs is None else [_top(each) for each in output.logprobs],
        "prompt_logprobs": None
        if prompt_logprobs is None
        else [None if each is None else _top(each) for each in prompt_logprobs],
        "hidden_states": None if output.hidden_states is None else _states(output.hidden_states),
        "routed_experts": None if output.routed_experts is None else output.routed_experts.tolist(),
        "cached_tokens": result.cached_tokens,
        "paths": [list(run) for run in output.paths],
    }


def _states(given: "TokenStates") -> dict[str, Any]:
    """`states`: per position, from `first_position` on, per layer a list of numbers; those that are
    no numbers are null."""
    return {
        "first_position": given.first_position,
        "layers": list(given.layers),
        "states": [
            [[number if isfinite(number) else None for number in state] for state in row]
            for row in given.states.float().tolist()
        ],
    }


def _top(entries: dict[int, Logprob]) -> list[dict[str, Any]]:
    return [
        {
            "token_id": token_id,
            "token": entry.decoded_token,
            "logprob": entry.finite,
            "rank": entry.rank,
        }
        for token_id, entry in entries.items()
    ]


def _statistics(llm: "LLM", clock: Clock) -> str:
    seconds = max(clock.ended - clock.started, 1e-9)
    parts = [f"{clock.tokens} tokens in {seconds:.2f} s, {clock.tokens / seconds:.1f} tokens/s"]
    if not clock.tokens:  # a batch that was interrupted hands nothing over
        parts = [f"no output after {seconds:.2f} s"]
    if clock.first_token is not None and clock.first_token < clock.ended:
        parts.append(f"first token after {clock.first_token - clock.started:.2f} s")
    stats = llm.stats()
    steps: Counter[str] = Counter()
    for entry in stats["paths"]:
        steps[entry["path"]] += entry["steps"]
    parts.append(f"paths: {', '.join(f'{path} x {count}' for path, count in steps.items())}")
    reasons = [
        f"{entry['path']} x {entry['steps']}, not {entry['refused']}"
        for entry in stats["paths"]
        if entry["refused"]
    ]
    return "\n".join(["; ".join(parts), *reasons, *_checks(stats)])


def _checks(stats: Mapping[str, Any]) -> Iterator[str]:
    """What canaries counted, a line each."""
    start = "kv_canary_"
    of_kv = {name.removeprefix(start): stats[name] for name in stats if name.startswith(start)}
    for canary, counts in {"kv_canary": of_kv, **stats["observers"]}.items():
        if counts:
            told = ", ".join(f"{name} {count}" for name, count in counts.items())
            yield f"{canary}: {told}".replace("_", " ")
