"""`verify`: one workload on every admitted path, backend, page size, chunk size and cache state,
with and without overlap and retraction, against a float32 eager reference of the same weights."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from headrace.base.errors import RequestError
from headrace.config.engine_config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.outputs import RequestOutput
from headrace.engine.prompts import Prompt, prompt_token_ids
from headrace.models.decoder import CausalDecoder
from headrace.request.sampling_params import SamplingParams
from headrace.runner.assembly import Settled, settle
from headrace.testing.combinations import Configuration, admitted, pairwise
from headrace.testing.comparison import Tally, tolerance_of
from headrace.testing.reference import Reference, Scored, exact_float32
from headrace.testing.verify_report import Result, VerifyReport
from headrace.testing.workload import (
    GPU_LENGTHS,
    LENGTHS,
    NEW_TOKENS,
    TEXT,
    Wave,
    prompts_of,
    random_ids,
    waves,
)
from headrace.text.build import build_tokenizer

RETRACT_EVERY = 2
FORCED_KEPT = 128  # sequences that the reference was forced along
POOL_ROUNDS = 3  # times the workload's pages: cached prompts of both waves beside a running one

Run = list[tuple[Wave, list[RequestOutput]]]


def verify(
    asked: EngineConfig,
    *,
    prompts: Sequence[Prompt] | None = None,
    every_combination: bool = False,
    on_result: Callable[[Result, int, int], None] | None = None,
) -> VerifyReport:
    """Run the workload in many configurations and hold each against the reference.

    Args:
        asked: the model and what is fixed; what was asked for by name does not vary.
        prompts: texts or token ids, in place of a short text (seeded random ids, without tokenizer)
            cut around the borders of pages.
        every_combination: the whole product in place of one in which every pair of values occurs.
        on_result: called after each configuration with its result, its number and how many there
            are.

    Raises:
        HeadraceError: the model cannot be loaded, or nothing of what was asked can be honoured.
    """
    start = time.perf_counter()
    settled = settle(asked)
    work = waves(_prompts(settled, prompts))
    asked = _with_room(asked, work)
    found = admitted(asked, settled)
    chosen = found.configurations
    if not every_combination:
        chosen = pairwise(chosen, asked.seed)
    dtype, device = settled.plan.dtype.value, settled.plan.device.value
    tolerance = tolerance_of(dtype, device)
    results: list[Result] = []
    with exact_float32():
        reference = Reference(
            asked, longest=max(wave.longest for wave in work), tolerance=tolerance.logprob
        )
        judge = Judge(reference, work)
        model: CausalDecoder | None = None
        for configuration in chosen:
            engine = _engine(asked, configuration, work, model)
            model = engine.worker.runner.model
            tally = Tally(tolerance=tolerance)
            result = judge.try_one(engine, configuration, tally)
            results.append(result)
            engine.close()
            del engine
            gc.collect()  # graphs and pools go before the next ones come
            if on_result is not None:
                on_result(result, len(results), len(chosen))
        reference.close()
    return VerifyReport(
        model=asked.model,
        device=settled.hardware.name,
        dtype=dtype,
        tolerance=tolerance,
        results=results,
        refused=found.refused,
        possible=len(found.configurations),
        seconds=time.perf_counter() - start,
    )


def _prompts(settled: Settled, given: Sequence[Prompt] | None) -> list[list[int]]:
    vocab_size = settled.persona.traits.vocab_size
    source = settled.tokenizer_source
    tokenizer = None if source is None else build_tokenizer(source)
    if given is not None:
        return [list(prompt_token_ids(prompt, tokenizer, vocab_size)) for prompt in given]
    lengths = LENGTHS if settled.plan.device.value == "cpu" else GPU_LENGTHS
    room = settled.plan.max_model_len.value - NEW_TOKENS
    fitting = [length for length in lengths if length <= room]
    if not fitting:
        raise RequestError(
            f"No prompt fits into {settled.plan.max_model_len.value} tokens",
            remedy=f"Raise max_model_len to at least {NEW_TOKENS + 1}",
        )
    if tokenizer is None or settled.plan.load_format.value == "dummy":
        return prompts_of(random_ids(vocab_size, sum(fitting), settled.config.seed), fitting)
    return prompts_of(tokenizer.encode(TEXT, add_special_tokens=False), fitting)


def _with_room(asked: EngineConfig, work: Sequence[Wave]) -> EngineConfig:
    """Room for the workload and little more, where nothing was asked: many engines follow."""
    longest = max(wave.longest for wave in work)
    rows = asked.max_running_requests or len(work[0].prompts)
    sizes = asked.decode_graph
    if sizes in (None, "auto"):  # few buckets, which padding fills: each is captured in each engine
        sizes = tuple(sorted({1, min(4, rows), rows}))
    return replace(
        asked,
        max_model_len=asked.max_model_len or longest,
        max_running_requests=rows,
        decode_graph=sizes,
    )


def _engine(
    asked: EngineConfig,
    configuration: Configuration,
    work: Sequence[Wave],
    model: CausalDecoder | None,
) -> Engine:
    config = configuration.applied_to(asked)
    if asked.max_total_tokens is None:
        page = configuration.page_size
        tokens = POOL_ROUNDS * max(wave.pool_tokens(page) for wave in work)
        config = replace(config, max_total_tokens=max(tokens, config.max_model_len or 0))
    every = RETRACT_EVERY if configuration.retraction else 0
    return Engine(config, retract_every=every, model=model)


class Judge:
    """Runs the workload on an engine and compares it with the reference.

    What the reference says is kept: most configurations choose its own tokens, and in half
    precision many of the others choose the same ones. Of the latter the last few are kept, since
    each takes some megabytes.
    """

    def __init__(self, reference: Reference, work: Sequence[Wave]) -> None:
        self._reference, self._work = reference, work
        self._own: dict[tuple[str, int], tuple[Scored, list[int]]] = {}
        self._forced: dict[tuple[str, int, tuple[int, ...]], Scored] = {}

    def try_one(self, engine: Engine, configuration: Configuration, tally: Tally) -> Result:
        start = time.perf_counter()
        paths: dict[str, int] = {}
        problems: list[str] = []
        for wave in self._work:
            outputs, missed = _run_wave(engine, wave, configuration)
            problems += missed
            for index, output in enumerate(outputs):
                scored = self._score(wave, index, output.outputs[0].token_ids)
                tally.add(f"{wave.name} prompt {index}", output, scored)
                for path, steps in output.paths:
                    paths[path] = paths.get(path, 0) + steps
        engine.settle()
        engine.scheduler.check_integrity()
        problems += _unmet(engine, configuration, paths)
        return Result(
            configuration=configuration,
            paths=paths,
            sequences=tally.sequences,
            places=tally.places,
            max_difference=tally.max_difference,
            mean_divergence=tally.mean_divergence,
            first_difference=tally.first_difference,
            excused=tally.excused,
            problems=tuple(tally.verdict() + problems),
            seconds=time.perf_counter() - start,
        )

    def _score(self, wave: Wave, index: int, tokens: list[int]) -> Scored:
        prompt, params = wave.prompts[index], wave.params[index]
        key = (wave.name, index)
        if key not in self._own:
            scored = self._reference.score(prompt, params)
            self._own[key] = (scored, scored.picks)
        scored, own = self._own[key]
        if tokens == own or len(tokens) != len(own):
            return scored
        asked = (*key, tuple(tokens))
        if asked not in self._forced:
            if len(self._forced) >= FORCED_KEPT:
                del self._forced[next(iter(self._forced))]
            self._forced[asked] = self._reference.score(prompt, params, forced=tokens)
        return self._forced[asked]


def _run_wave(
    engine: Engine, wave: Wave, configuration: Configuration
) -> tuple[list[RequestOutput], list[str]]:
    """All requests of a wave at the same time, and what the cache failed to give them."""
    cached = [_cached_length(len(prompt), configuration) for prompt in wave.prompts]
    warmers = [
        (prompt[: length + 1], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
        for prompt, length in zip(wave.prompts, cached, strict=True)
        if length
    ]
    for prompt, params in warmers:
        _run(engine, [(prompt, params)], salt=wave.name)
    outputs = _run(engine, list(zip(wave.prompts, wave.params, strict=True)), salt=wave.name)
    problems = [
        f"{wave.name} prompt {index}: {output.cached_tokens} cached tokens, at least {length} "
        "were in the cache"
        for index, (output, length) in enumerate(zip(outputs, cached, strict=True))
        if output.cached_tokens < length and wave.params[index].prompt_logprobs is None
    ]
    return outputs, problems


def _cached_length(length: int, configuration: Configuration) -> int:
    """Tokens of a prompt that are put into the cache before it runs: whole pages."""
    shares = {"warm": (length - 1) // 2, "hit": length - 1}
    return shares.get(configuration.cache, 0) // configuration.page_size * configuration.page_size


def _run(
    engine: Engine, requests: Sequence[tuple[list[int], SamplingParams]], *, salt: str
) -> list[RequestOutput]:
    handles = [engine.add(prompt, params, cache_salt=salt) for prompt, params in requests]
    while not all(handle.is_finished for handle in handles):
        engine.step()
    return [handle.output() for handle in handles]


def _unmet(engine: Engine, configuration: Configuration, paths: dict[str, int]) -> list[str]:
    """What the configuration should have done and did not."""
    problems = []
    if configuration.path_name not in paths:
        refused = {entry["refused"] for entry in engine.stats()["paths"]}
        problems.append(f"no step took {configuration.path_name}: {'; '.join(sorted(refused))}")
    if configuration.retraction and not engine.stats()["retractions"]:
        problems.append("nothing was retracted")
    return problems
