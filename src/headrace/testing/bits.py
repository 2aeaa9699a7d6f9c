"""Deterministic mode put to the proof: `check_bits(EngineConfig(..., deterministic=True))`.

Every request of random workloads runs alone in a plain engine (eager, whole prompt, no cache), then
among others in engines of random settings: chunks, page sizes, cache states, arrivals, retraction,
overlap, graphs. Tokens, logprobs, hidden states and embeddings must be equal, bit for bit.

`python -m headrace.testing.bits [MODEL] --workloads 200 --device cuda` runs many.
"""

import argparse
import gc
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from headrace.base.layout import tell
from headrace.config.engine_config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.outputs import CompletionOutput, EmbeddingOutput, RequestOutput
from headrace.engine.requests import RequestHandle
from headrace.kernels.noise import derive_seed
from headrace.models.decoder import CausalDecoder
from headrace.request.pooling_params import PoolingParams
from headrace.request.sampling_params import SamplingParams
from headrace.testing.combinations import one_by_one
from headrace.testing.random_workloads import (
    MAX_MODEL_LEN,
    Ask,
    Setting,
    Subject,
    Workload,
    draw_settings,
)
from headrace.testing.tiny_models import TINY_MODELS, write_tiny_model

Output = RequestOutput | EmbeddingOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class BitsReport:
    """What the workloads met, and every request that came out otherwise than alone.

    Attributes:
        paths: path -> steps that sequences took on it.
        differences: workload, request and the first place that differs.
    """

    workloads: int
    requests: int
    tokens: int
    cached_tokens: int
    retractions: int
    paths: dict[str, int]
    differences: list[str]
    seconds: float

    def __str__(self) -> str:
        paths = ", ".join(f"{path} ({steps})" for path, steps in self.paths.items())
        lines = [
            *self.differences,
            f"{self.workloads} workloads, {self.requests} requests, {self.tokens} tokens, "
            f"{self.cached_tokens} cached, {self.retractions} retractions, steps on {paths}: "
            f"{len(self.differences)} differ from alone, {self.seconds:.0f} s",
        ]
        return "\n".join(lines)


def check_bits(
    asked: EngineConfig,
    *,
    workloads: int,
    each: int = 2,
    seed: int = 0,
    tell: Callable[[str], None] | None = None,
) -> BitsReport:
    """Run random workloads and compare every request with itself alone.

    Args:
        asked: the model and what is fixed; what was asked for by name does not vary. With
            `deterministic` off the report says how far that is from equal bits.
        each: workloads that an engine runs one after the other.
        seed: of everything that is drawn.
        tell: called with a line after each engine.

    Raises:
        HeadraceError: the model cannot be loaded, or what was asked cannot be honoured.
    """
    start = time.perf_counter()
    asked = replace(asked, max_model_len=asked.max_model_len or MAX_MODEL_LEN)
    comparison = _Comparison(asked)
    for setting in draw_settings(
        asked, comparison.subject, workloads=workloads, each=each, seed=seed
    ):
        before = len(comparison.differences)
        comparison.run(setting)
        if tell is not None:
            done, found = comparison.counts["workloads"], len(comparison.differences) - before
            tell(f"{done}/{workloads}, {found} differ: {setting}")
    comparison.alone.engine.close()
    return BitsReport(
        **{name: comparison.counts[name] for name in COUNTED},
        paths=dict(comparison.paths),
        differences=comparison.differences,
        seconds=time.perf_counter() - start,
    )


COUNTED = ("workloads", "requests", "tokens", "cached_tokens", "retractions")


class _Comparison:
    """What was met so far. One model serves all engines but the plain one."""

    def __init__(self, asked: EngineConfig) -> None:
        self._asked = asked
        self.alone = Alone(asked, longest=MAX_MODEL_LEN)
        self.counts: Counter[str] = Counter()
        self.paths: Counter[str] = Counter()
        self.differences: list[str] = []
        self._model: CausalDecoder | None = None

    @property
    def subject(self) -> Subject:
        plain = self.alone.engine
        return Subject(
            vocab_size=plain.vocab_size,
            has_graphs=plain.settled.plan.device.value == "cuda",
            has_tokenizer=plain.tokenizer is not None,
        )

    def run(self, setting: Setting) -> None:
        """The workloads of a setting in an engine of their own, each request against itself."""
        engine = Engine(
            replace(self._asked, **setting.options),
            retract_every=setting.retract_every,
            model=self._model,
        )
        self._model = engine.worker.runner.model
        for workload in setting.workloads:
            outputs = _run(engine, workload)
            for index, (ask, output) in enumerate(zip(workload.asks, outputs, strict=True)):
                if found := difference(output, self.alone.output(ask)):
                    name = f"workload {self.counts['workloads']}, request {index}"
                    self.differences.append(f"{name}: {found} ({setting})")
                _count(output, self.counts, self.paths)
            self.counts["workloads"] += 1
        engine.settle()
        engine.scheduler.check_integrity()
        self.counts["retractions"] += engine.stats()["retractions"]
        engine.close()
        del engine
        gc.collect()  # graphs and pools go before the next ones come


class Alone:
    """Runs each request by itself: eager, in one chunk, without cache and overlap.

    Args:
        longest: tokens of the longest sequence.
    """

    def __init__(self, asked: EngineConfig, *, longest: int) -> None:
        page_size = asked.page_size or 16
        self.engine = Engine(one_by_one(asked, longest=longest, page_size=page_size))

    def output(self, ask: Ask) -> Output:
        """Of several sequences each runs by itself too, with the seed that is its own."""
        want = ask.want
        if isinstance(want, PoolingParams) or want.n == 1:
            return self._one(ask)
        assert want.seed is not None
        outputs: list[RequestOutput] = []
        for index in range(want.n):
            one = replace(want, n=1, seed=derive_seed(want.seed, index))
            output = self._one(replace(ask, want=one))
            assert isinstance(output, RequestOutput)
            outputs.append(output)
        return replace(outputs[0], outputs=[output.outputs[0] for output in outputs])

    def _one(self, ask: Ask) -> Output:
        (output,) = _run(self.engine, Workload(asks=[ask], warmers=[], salt=""))
        return output


def _run(engine: Engine, workload: Workload) -> list[Output]:
    greedy = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    for prompt in workload.warmers:
        warmer = engine.add(prompt, greedy, cache_salt=workload.salt)
        while not warmer.is_finished:
            engine.step()
    handles: list[RequestHandle] = []
    turn = 0
    while len(handles) < len(workload.asks) or not all(each.is_finished for each in handles):
        for ask in workload.asks[len(handles) :]:
            if ask.arrival > turn:
                break
            handles.append(_submit(engine, ask, workload.salt))
        engine.step()
        turn += 1
    return [
        handle.output() if isinstance(ask.want, SamplingParams) else handle.embedding_output()
        for ask, handle in zip(workload.asks, handles, strict=True)
    ]


def _submit(engine: Engine, ask: Ask, salt: str) -> RequestHandle:
    if isinstance(ask.want, PoolingParams):
        prepared = engine.prepare_embedding(ask.prompt, ask.want)
    else:
        prepared = engine.prepare(ask.prompt, ask.want)
    return engine.submit(prepared, cache_salt=salt)


def _count(output: Output, counts: Counter[str], paths: Counter[str]) -> None:
    counts["requests"] += 1
    counts["cached_tokens"] += output.cached_tokens
    for path, steps in output.paths:
        paths[path] += steps
    if isinstance(output, RequestOutput):
        counts["tokens"] += sum(len(each.token_ids) for each in output.outputs)


def difference(ours: Output, alone: Output) -> str:
    """The first thing that is not equal, bit for bit; empty when all is."""
    if isinstance(ours, EmbeddingOutput):
        assert isinstance(alone, EmbeddingOutput)
        return _unlike("embedding", _bytes(ours.embedding), _bytes(alone.embedding))
    assert isinstance(alone, RequestOutput)
    parts = _unlike("prompt logprob", ours.prompt_logprobs, alone.prompt_logprobs)
    pairs = zip(ours.outputs, alone.outputs, strict=True)
    return parts or next(filter(None, (_sequence(*pair) for pair in pairs)), "")


def _sequence(ours: CompletionOutput, alone: CompletionOutput) -> str:
    if "error" in (ours.finish_reason, alone.finish_reason):
        return f"ended by error: {ours.message or alone.message}"
    found = _unlike("token", ours.token_ids, alone.token_ids)
    found = found or _unlike("logprob", ours.logprobs, alone.logprobs)
    if not found and alone.hidden_states is not None:
        states = ours.hidden_states
        found = "hidden states are missing" if states is None else ""
        found = found or _unlike(
            "hidden state",
            *(list(each.packed.data) for each in (states, alone.hidden_states) if each),
        )
    return found and f"sequence {ours.index}, {found}"


def _bytes(vector: np.ndarray[Any, Any] | None) -> list[int]:
    return [] if vector is None else list(vector.tobytes())


def _unlike(what: str, ours: Sequence[Any] | None, alone: Sequence[Any] | None) -> str:
    if ours is None or alone is None:
        return "" if ours is alone else f"{what}s are missing"
    places = (place for place, (a, b) in enumerate(zip(ours, alone, strict=False)) if a != b)
    place = next(places, None)
    if place is not None:
        return f"{what} {place} is {ours[place]}, alone {alone[place]}"
    return "" if len(ours) == len(alone) else f"{len(ours)} {what}s, alone {len(alone)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where all is equal, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m headrace.testing.bits", description=__doc__)
    parser.add_argument("model", nargs="?", help="path, short name or hub id; tiny random ones")
    parser.add_argument("--workloads", type=int, default=200, help="of each model and dtype")
    parser.add_argument("--each", type=int, default=4, help="workloads of an engine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--family", nargs="+", default=list(TINY_MODELS), choices=TINY_MODELS)
    parser.add_argument("--default", action="store_true", help="deterministic off: what differs")
    given = parser.parse_args(arguments)
    passed = True
    with tempfile.TemporaryDirectory() as folder:
        models = [(given.model, "auto")] if given.model else []
        for family in () if given.model else given.family:
            models.append((str(write_tiny_model(Path(folder) / family, family)), "dummy"))
        for (model, load_format), dtype in product(models, given.dtype):
            asked = EngineConfig(
                model=model,
                load_format=load_format,
                dtype=dtype,
                device=given.device,
                deterministic=not given.default,
            )
            report = check_bits(
                asked, workloads=given.workloads, each=given.each, seed=given.seed, tell=tell
            )
            print(f"{Path(model).name} in {dtype}: {report}", flush=True)
            passed = passed and not report.differences
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
