"""`python -m headrace.bench.split_prefill MODEL`: how long others wait while a long prompt is read.

Streams decode; long prompts arrive among them, evenly. Milliseconds between two tokens of a stream,
with the prompts' steps whole and in parts of some layers, each in an engine of its own over the
same weights. A gap is what passes between the moments at which the host has two tokens.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from headrace.base.errors import HeadraceError
from headrace.bench.load import Load
from headrace.bench.setting import Setting, use_threads
from headrace.bench.shapes import shape_path
from headrace.engine.engine import Engine
from headrace.engine.requests import RequestHandle
from headrace.llm import LLM
from headrace.request.sampling_params import SamplingParams

STREAM_PROMPT = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """`streams` of `tokens` each; `arrivals` prompts of `prompt_len` come while they run."""

    streams: int
    tokens: int
    arrivals: int
    prompt_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """What the streams and the prompts saw, milliseconds."""

    layers: int
    gaps: list[float]
    first_tokens: list[float]
    seconds: float

    def __str__(self) -> str:
        name = f"{self.layers} layers" if self.layers else "whole"
        cuts = quantiles(self.gaps, n=1000)
        columns = (median(self.gaps), cuts[989], max(self.gaps), median(self.first_tokens))
        return f"{name:>10}{''.join(f'{each:>12.2f}' for each in columns)}{self.seconds:>10.2f}"


def run(engine: Engine, work: Work, layers: int, *, seed: int) -> Gaps:
    """Run the work once."""
    params = SamplingParams(temperature=0.0, max_tokens=work.tokens, ignore_eos=True)
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    short = Load(num_prompts=work.streams, input_len=STREAM_PROMPT, output_len=work.tokens)
    long = Load(num_prompts=work.arrivals, input_len=work.prompt_len, output_len=1)
    streams = [engine.add(ids, params) for ids in short.prompts(seed, engine.vocab_size)]
    waiting = long.prompts(seed, engine.vocab_size)
    while min(each.output_tokens for each in streams) < 2:
        engine.step()
    start = time.perf_counter()
    seen = [(each.output_tokens, start) for each in streams]
    prompts: list[tuple[RequestHandle, float]] = []
    gaps: list[float] = []
    first_tokens: list[float] = []
    every = work.tokens // (work.arrivals + 1)
    while not all(each.is_finished for each in streams):
        if waiting and streams[0].output_tokens >= every * (len(prompts) + len(first_tokens) + 1):
            prompts.append((engine.add(waiting.pop(), one), time.perf_counter()))
        engine.step()
        now = time.perf_counter()
        for index, stream in enumerate(streams):
            before, at = seen[index]
            if stream.output_tokens > before:
                gaps.append((now - at) * 1e3)
                seen[index] = (stream.output_tokens, now)
        first_tokens += [(now - at) * 1e3 for each, at in prompts if each.is_finished]
        prompts = [(each, at) for each, at in prompts if not each.is_finished]
    seconds = time.perf_counter() - start
    while engine.has_work:
        engine.step()
    return Gaps(layers=layers, gaps=gaps, first_tokens=first_tokens, seconds=seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m headrace.bench.split_prefill")
    parser.add_argument("model", help="path, short name, hub id or shape")
    parser.add_argument("--layers", default="0,4", help="of a part; 0: whole")
    parser.add_argument("--streams", type=int, default=31)
    parser.add_argument("--tokens", type=int, default=256, help="of each stream")
    parser.add_argument("--arrivals", type=int, default=8, help="long prompts")
    parser.add_argument("--prompt-len", type=int, default=8192)
    parser.add_argument("--deterministic", action="store_true")
    asked = parser.parse_args(arguments)
    work = Work(
        streams=asked.streams,
        tokens=asked.tokens,
        arrivals=asked.arrivals,
        prompt_len=asked.prompt_len,
    )
    folder = shape_path(asked.model)
    longest = work.prompt_len + 16
    try:
        for layers in (int(part) for part in asked.layers.split(",")):
            with LLM(
                folder or asked.model,
                load_format="auto" if folder is None else "dummy",
                split_prefill_layers=layers or None,
                deterministic=asked.deterministic,
                enable_prefix_cache=False,
                chunked_prefill_size=work.prompt_len,
                max_model_len=longest,
                max_running_requests=work.streams + 2,
                max_total_tokens=2 * longest + work.streams * (STREAM_PROMPT + work.tokens + 128),
            ) as llm:
                if layers == int(asked.layers.split(",")[0]):
                    print(Setting.of(llm, threads=use_threads(None), repeats=1))
                    print(f"{work}")
                    heads = ("gap p50", "gap p99", "longest", "first token")
                    print(f"{'ms':>10}{''.join(f'{head:>12}' for head in heads)}{'seconds':>10}")
                run(llm.engine, work, layers, seed=1)  # kernels, graphs
                print(run(llm.engine, work, layers, seed=2), flush=True)
    except HeadraceError as error:
        print(f"headrace: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
