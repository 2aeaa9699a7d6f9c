"""Runs the workload in one configuration and holds every sequence against the reference."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import takewhile

from headrace.engine.engine import Engine
from headrace.engine.outputs import RequestOutput
from headrace.memory.integrity import IntegrityError
from headrace.request.sampling_params import SamplingParams
from headrace.testing.bits import Output, difference
from headrace.testing.combinations import Configuration
from headrace.testing.comparison import ComparedSequence, Decode, Tally, Tolerance
from headrace.testing.deep import (
    BEHIND,
    DeepFinding,
    FirstWrong,
    behind_the_layers,
    finding_of,
    written_along,
)
from headrace.testing.kv_watch import watched_steps
from headrace.testing.reference import Reference, Scored
from headrace.testing.verify_report import Result
from headrace.testing.workload import Wave

EXAMINED = 3  # runs: retraction counts all steps, so that it comes elsewhere in the next one
FORCED_KEPT = 128  # sequences that the reference was forced along


class Judge:
    """Compares configurations with the reference.

    What the reference says is kept: most configurations choose its own tokens, and in half
    precision many of the others choose the same ones. Of the latter the last few are kept, since
    each takes some megabytes.

    Args:
        decode: text of tokens, where there is a tokenizer.
    """

    def __init__(
        self, reference: Reference, work: Sequence[Wave], decode: Decode | None = None
    ) -> None:
        self.tolerance = Tolerance(logprob=0.0, divergence=0.0, excused=0.0)
        self.alone: dict[str, list[Output]] = {}  # wave -> what the bits must be
        self._reference, self._work, self._decode = reference, work, decode
        self._own: dict[tuple[str, int], Scored] = {}
        self._forced: dict[tuple[str, int, tuple[int, ...]], Scored] = {}

    def own(self, wave: Wave, index: int) -> Scored:
        """What the reference says about a prompt along the tokens it chooses itself."""
        key = (wave.name, index)
        if key not in self._own:
            self._own[key] = self._reference.score(wave.prompts[index], wave.params[index])
        return self._own[key]

    def try_one(
        self,
        engine: Engine,
        configuration: Configuration,
        layer_bounds: Sequence[float] | None = None,
    ) -> Result:
        """Run the workload.

        Args:
            layer_bounds: of keys and values by layer; with them, the first layer that diverges is
                looked for where a sequence fails.
        """
        start = time.perf_counter()
        tally = Tally(tolerance=self.tolerance, decode=self._decode)
        paths: dict[str, int] = {}
        problems: list[str] = []
        tokens: dict[tuple[str, int], list[int]] = {}
        for wave in self._work:
            outputs, missed = run_wave(engine, wave, configuration, salt=wave.name)
            problems += missed + self._other_bits(wave, outputs)
            for index, output in enumerate(outputs):
                tokens[wave.name, index] = output.outputs[0].token_ids
                tally.add(wave.name, index, output, self._score(wave, index, output))
                for path, steps in output.paths:
                    paths[path] = paths.get(path, 0) + steps
        engine.settle()
        problems = tally.verdict() + problems + _unmet(engine, configuration, paths)
        deep = None
        if problems and layer_bounds is not None:
            worst = _worst(tally.sequences)
            deep = self._examine(
                engine, configuration, worst, tokens[worst.wave, worst.index], layer_bounds
            )
        return Result(
            configuration=configuration,
            paths=paths,
            sequences=tuple(tally.sequences),
            places=tally.places,
            max_difference=tally.max_difference,
            mean_divergence=tally.mean_divergence,
            top_agreement=tally.top_agreement,
            excused=tally.excused,
            problems=tuple(problems),
            deep=deep,
            seconds=time.perf_counter() - start,
        )

    def _other_bits(self, wave: Wave, outputs: Sequence[RequestOutput]) -> list[str]:
        """Prompts that came out otherwise than alone, where that is asked."""
        pairs = enumerate(zip(outputs, self.alone.get(wave.name, outputs), strict=True))
        found = ((index, difference(output, alone)) for index, (output, alone) in pairs)
        return [f"{wave.name} prompt {index}: {text}" for index, text in found if text]

    def _score(self, wave: Wave, index: int, output: RequestOutput) -> Scored:
        tokens = output.outputs[0].token_ids
        own = self.own(wave, index)
        if tokens == own.picks or len(tokens) != len(own.picks):
            return own
        asked = (wave.name, index, tuple(tokens))
        if asked not in self._forced:
            if len(self._forced) >= FORCED_KEPT:
                del self._forced[next(iter(self._forced))]
            self._forced[asked] = self._reference.score(
                wave.prompts[index], wave.params[index], forced=tokens
            )
        return self._forced[asked]

    def _examine(
        self,
        engine: Engine,
        configuration: Configuration,
        compared: ComparedSequence,
        tokens: list[int],
        layer_bounds: Sequence[float],
    ) -> DeepFinding:
        wave = next(wave for wave in self._work if wave.name == compared.wave)
        index = compared.index
        # One that ended early is held as far as it went.
        along = tokens + self.own(wave, index).picks[len(tokens) :]
        wanted, _ = written_along(self._reference, wave, index, along)
        for attempt in range(EXAMINED):
            first = FirstWrong(engine, wanted, layer_bounds)
            salt = f"{wave.name} again {attempt}"
            watch = watched_steps(engine, request_id(salt, index), first.take)
            outputs, _ = run_wave(engine, wave, configuration, salt=salt, watch=watch)
            again = outputs[index].outputs[0].token_ids
            same = len(wave.prompts[index]) + _shared(tokens, again)
            if again == tokens or 0 <= first.position < same:
                found = finding_of(first, compared, self.tolerance)
                if not found.meaning.endswith(BEHIND):
                    return found
                behind = self._behind(engine, configuration, wave, index, max(layer_bounds))
                return replace(found, meaning=behind or found.meaning)
        return DeepFinding(
            sequence=compared.name,
            meaning=f"other tokens when it ran again, {EXAMINED} times: the fault comes and goes",
        )

    def _behind(
        self, engine: Engine, configuration: Configuration, wave: Wave, index: int, bound: float
    ) -> str:
        """What a run that brings the states before the head says, "" where it is right."""
        asked = replace(wave.params[index], return_hidden_states=True)
        params = [asked if at == index else each for at, each in enumerate(wave.params)]
        outputs, _ = run_wave(
            engine, replace(wave, params=params), configuration, salt=f"{wave.name} states"
        )
        ours = outputs[index]
        output = ours.outputs[0]
        if output.finish_reason != "length":
            return ""
        scored = self._reference.score(wave.prompts[index], asked, forced=output.token_ids)
        last = engine.settled.persona.traits.num_layers - 1
        return behind_the_layers(ours, scored, last, tolerance=self.tolerance, bound=bound)


def _shared(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Leading tokens that are the same."""
    pairs = zip(tokens, others, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _worst(sequences: Sequence[ComparedSequence]) -> ComparedSequence:
    """The first that fails, or the one that is furthest off."""
    failing = [each for each in sequences if each.problem]
    return failing[0] if failing else max(sequences, key=lambda each: each.largest)


def run_wave(
    engine: Engine,
    wave: Wave,
    configuration: Configuration,
    *,
    salt: str,
    watch: AbstractContextManager[None] | None = None,
) -> tuple[list[RequestOutput], list[str]]:
    """All requests of a wave at the same time, and what the cache failed to give them.

    Args:
        salt: of the prefix cache. watch: around the wave itself, after the cache was warmed.
    """
    cached = [_cached_length(len(prompt), configuration) for prompt in wave.prompts]
    greedy = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    for prompt, length in zip(wave.prompts, cached, strict=True):
        if length:
            _run(engine, [(prompt[: length + 1], greedy)], salt=salt)
    with watch or nullcontext():
        outputs = _run(engine, list(zip(wave.prompts, wave.params, strict=True)), salt=salt)
    problems = [
        f"{wave.name} prompt {index}: {output.cached_tokens} cached tokens, at least {length} "
        "were in the cache"
        for index, (output, length) in enumerate(zip(outputs, cached, strict=True))
        if output.cached_tokens < length and wave.params[index].prompt_logprobs is None
    ]
    return outputs, problems


def request_id(salt: str, index: int) -> str:
    """Of a prompt of a wave."""
    return f"{salt} {index}"


def _cached_length(length: int, configuration: Configuration) -> int:
    """Tokens of a prompt that are put into the cache before it runs: whole pages."""
    shares = {"warm": (length - 1) // 2, "hit": length - 1}
    return shares.get(configuration.cache, 0) // configuration.page_size * configuration.page_size


def _run(
    engine: Engine, requests: Sequence[tuple[list[int], SamplingParams]], *, salt: str
) -> list[RequestOutput]:
    handles = [
        engine.add(prompt, params, cache_salt=salt, request_id=request_id(salt, index))
        for index, (prompt, params) in enumerate(requests)
    ]
    while not all(handle.is_finished for handle in handles):
        engine.step()
    return [handle.output() for handle in handles]


def _unmet(engine: Engine, configuration: Configuration, paths: dict[str, int]) -> list[str]:
    """What the configuration should have done and did not, pages that are lost included."""
    problems = []
    try:
        engine.scheduler.check_integrity()
    except IntegrityError as error:
        problems.append(f"pages or rows are lost: {error}")
    if configuration.path_name not in paths:
        refused = {entry["refused"] for entry in engine.stats()["paths"]}
        problems.append(f"no step took {configuration.path_name}: {'; '.join(sorted(refused))}")
    if configuration.retraction and not engine.stats()["retractions"]:
        problems.append("nothing was retracted")
    return problems
