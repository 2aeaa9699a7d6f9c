"""`verify`: one workload on every admitted path, backend, page size, chunk size and cache state,
with and without overlap and retraction, against a float32 eager reference of the same weights."""

import gc
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from headrace.base.errors import RequestError
from headrace.config.engine_config import EngineConfig
from headrace.engine.batch_arguments import for_each
from headrace.engine.engine import Engine
from headrace.engine.prompts import NO_TOKENIZER, Prompt, prompt_token_ids
from headrace.models.decoder import CausalDecoder
from headrace.runner.assembly import Settled, settle
from headrace.testing.bits import Alone
from headrace.testing.calibration import PlainError, calibrated, measure
from headrace.testing.combinations import (
    PAGE_SIZES,
    RETRACT_EVERY,
    Configuration,
    admitted,
    pairwise,
)
from headrace.testing.comparison import HALF, Tolerance, tolerance_of
from headrace.testing.deep import FLOORS, plain_layer_bounds
from headrace.testing.judge import Judge
from headrace.testing.random_workloads import Ask
from headrace.testing.reference import Reference, exact_float32
from headrace.testing.verify_report import Result, VerifyReport
from headrace.testing.workload import (
    GPU_LENGTHS,
    LENGTHS,
    NEW_TOKENS,
    TEXT,
    OwnPrompt,
    TokenPrompt,
    Wave,
    prompts_of,
    random_ids,
    waves,
)
from headrace.text.build import build_tokenizer
from headrace.text.tokenizer import Tokenizer
from headrace.version import __version__

POOL_ROUNDS = 3  # times the workload's pages: cached prompts of both waves beside a running one
DEEP_MOST = 8  # failing configurations in which the first layer is looked for


def verify(
    asked: EngineConfig,
    *,
    prompts: Sequence[Prompt | OwnPrompt] | None = None,
    every_combination: bool = False,
    deep: bool = False,
    tell: Callable[[str], None] | None = None,
) -> VerifyReport:
    """Run the workload in many configurations and hold each against the reference; deterministic
    ones must give every prompt the bits that it has alone, too.

    Args:
        asked: the model and what is fixed; what was asked for by name does not vary.
        prompts: in place of a short text (seeded random ids, without tokenizer) cut around the
            borders of pages.
        every_combination: the whole product in place of one in which every pair of values occurs.
        deep: look for the first layer that diverges in the first configurations that fail.
        tell: called with a line of progress from time to time.

    Raises:
        HeadraceError: the model cannot be loaded, or nothing of what was asked can be honoured.
    """
    start = time.perf_counter()
    settled = settle(asked)
    source = settled.tokenizer_source
    tokenizer = None if source is None else build_tokenizer(source)
    work = waves(_prompts(settled, tokenizer, prompts))
    asked = _with_room(asked, work)
    found = admitted(asked, settled, outputs=max(wave.most_outputs for wave in work))
    chosen = found.configurations
    if not every_combination:
        chosen = pairwise(chosen, asked.seed)
    with exact_float32():
        trial = _Trial(asked, settled, work, tokenizer, deep=deep, tell=tell or _say_nothing)
        results = trial.run(chosen)
    return VerifyReport(
        model=asked.model,
        device=settled.hardware.name,
        dtype=settled.plan.dtype.value,
        tolerance=trial.judge.tolerance,
        plain=trial.plain,
        same_bits=asked.deterministic,
        waves={wave.name: len(wave.prompts) for wave in work},
        results=results,
        refused=found.refused,
        possible=len(found.configurations),
        environment=_environment(settled),
        seconds=time.perf_counter() - start,
        reference_seconds=trial.reference_seconds,
    )


class _Trial:
    """The reference, what plain eager is off by where that matters, and one engine at a time."""

    def __init__(
        self,
        asked: EngineConfig,
        settled: Settled,
        work: Sequence[Wave],
        tokenizer: Tokenizer | None,
        *,
        deep: bool,
        tell: Callable[[str], None],
    ) -> None:
        self._asked, self._work, self._deep, self._tell = asked, work, deep, tell
        self._tokenizer = tokenizer
        self._dtype = settled.plan.dtype.value
        self._longest = max(wave.longest for wave in work)
        self._layers = settled.persona.traits.num_layers
        self._loose = tolerance_of(self._dtype, settled.plan.device.value)
        self._reference = Reference(asked, longest=self._longest, tokenizer=tokenizer)
        self.judge = Judge(self._reference, work, tokenizer.decode if tokenizer else None)
        self.plain: PlainError | None = None
        self.reference_seconds = 0.0
        self._layer_bounds = [FLOORS[self._dtype]] * self._layers
        self._hold(self._loose)

    def _hold(self, tolerance: Tolerance) -> None:
        self.judge.tolerance = tolerance
        self._reference.sampler.tolerance = tolerance.logprob

    def run(self, chosen: Sequence[Configuration]) -> list[Result]:
        start = time.perf_counter()
        count = sum(len(wave.prompts) for wave in self._work)
        self._tell(f"first the reference: {count} prompts in float32, one by one")
        for wave in self._work:
            for index in range(len(wave.prompts)):
                self.judge.own(wave, index)
        if self._dtype in HALF:
            self._calibrate()
        self.reference_seconds = time.perf_counter() - start
        self._tell(
            f"the reference took {self.reference_seconds:.0f} s; {len(chosen)} configurations "
            "follow, fewer where options are fixed (--page-size 16), quicker with --prompts"
        )
        results: list[Result] = []
        model = self._run_alone() if self._asked.deterministic else None
        begun = time.perf_counter()
        for configuration in chosen:
            engine = _engine(self._asked, configuration, self._work, model, self._tokenizer)
            model = engine.worker.runner.model
            looks = self._deep and sum(not each.passed for each in results) < DEEP_MOST
            result = self.judge.try_one(
                engine, configuration, self._layer_bounds if looks else None
            )
            results.append(result)
            engine.close()
            del engine
            gc.collect()  # graphs and pools go before the next ones come
            verdict = "ok" if result.passed else f"FAILED: {'; '.join(result.problems[:3])}"
            each = (time.perf_counter() - begun) / len(results)
            left = f", about {each * (len(chosen) - len(results)):.0f} s left"
            self._tell(f"{len(results)}/{len(chosen)} {configuration}: {verdict}{left}")
        self._reference.close()
        return results

    def _run_alone(self) -> CausalDecoder:
        """What every prompt gives by itself, which all configurations must equal bit for bit; the
        weights, for their engines."""
        alone = Alone(self._asked, longest=self._longest)
        self.judge.alone = {
            wave.name: [
                alone.output(Ask(prompt=prompt, want=params, arrival=0))
                for prompt, params in zip(wave.prompts, wave.params, strict=True)
            ]
            for wave in self._work
        }
        alone.engine.close()
        return alone.engine.worker.runner.model

    def _calibrate(self) -> None:
        """Bounds from what plain eager of the same dtype is off by."""
        plain = Reference(
            self._asked, longest=self._longest, dtype=self._dtype, tokenizer=self._tokenizer
        )
        self.plain = measure(plain, self.judge.own, self._work)
        self._hold(calibrated(self._loose, self.plain, self._dtype))
        if self._deep:
            self._layer_bounds = list(
                plain_layer_bounds(plain, self._reference, self._work[0], self._dtype)
            )
        plain.close()
        self._tell(
            f"plain {self._dtype} eager is off by {self.plain.logprob:.2g} and "
            f"{self.plain.divergence:.2g} nats"
        )


def _say_nothing(line: str) -> None:
    pass


def _environment(settled: Settled) -> dict[str, str]:
    hardware = settled.hardware
    return {
        "headrace": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "device": hardware.name,
        "threads": str(torch.get_num_threads()),
        "packages": ", ".join(sorted(hardware.packages)) or "none",
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }


def _prompts(
    settled: Settled, tokenizer: Tokenizer | None, given: Sequence[Prompt | OwnPrompt] | None
) -> list[TokenPrompt]:
    vocab_size = settled.persona.traits.vocab_size
    if given is not None:
        make = partial(_token_prompt, tokenizer=tokenizer, vocab_size=vocab_size)
        return for_each(make, given)
    lengths = LENGTHS if settled.plan.device.value == "cpu" else GPU_LENGTHS
    room = settled.plan.max_model_len.value - NEW_TOKENS
    fitting = [length for length in lengths if length <= room]
    if not fitting:
        raise RequestError(
            f"No prompt fits into {settled.plan.max_model_len.value} tokens",
            remedy=f"Raise max_model_len to at least {NEW_TOKENS + 1}",
        )
    if tokenizer is None or settled.plan.load_format.value == "dummy":
        ids = random_ids(vocab_size, sum(fitting), settled.config.seed)
    else:
        ids = tokenizer.encode(TEXT, add_special_tokens=False)
    return [TokenPrompt(ids=prompt) for prompt in prompts_of(ids, fitting)]


def _token_prompt(
    given: Prompt | OwnPrompt, tokenizer: Tokenizer | None, vocab_size: int
) -> TokenPrompt:
    own = given if isinstance(given, OwnPrompt) else OwnPrompt(prompt=given)
    prompt = own.prompt
    if own.messages is not None:
        if tokenizer is None:
            raise RequestError(NO_TOKENIZER, remedy="Give prompts as token ids")
        text = tokenizer.apply_chat_template(list(own.messages))
        prompt = tokenizer.encode(text, add_special_tokens=False)
    ids = list(prompt_token_ids(prompt, tokenizer, vocab_size))
    return TokenPrompt(ids=ids, max_tokens=own.max_tokens)


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


def _pool_slots(config: EngineConfig, work: Sequence[Wave]) -> int:
    """Of the KV pool, in pages of every size the same: equal pools share compiled code."""
    page = max(*PAGE_SIZES, config.page_size or 0)
    tokens = POOL_ROUNDS * max(wave.pool_tokens(page) for wave in work)
    pages = -(-max(tokens, config.max_model_len or 0) // page)
    return (pages + 1) * page


def _engine(
    asked: EngineConfig,
    configuration: Configuration,
    work: Sequence[Wave],
    model: CausalDecoder | None,
    tokenizer: Tokenizer | None,
) -> Engine:
    config = configuration.applied_to(asked)
    if asked.max_total_tokens is None:
        tokens = _pool_slots(config, work) - configuration.page_size  # one page is for padding
        config = replace(config, max_total_tokens=tokens)
    every = RETRACT_EVERY if configuration.retraction else 0
    return Engine(config, retract_every=every, model=model, tokenizer=tokenizer)
