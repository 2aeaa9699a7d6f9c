"""The time of a decode step and of a prefill, beside their floors.

Two times of a decode step are taken. "ms/step" is (time of 64 tokens - time of 1 token) / 63
through `LLM.generate`, which can be measured of any engine; where prompts are read in several
steps, rows that decode ride along with them, and this time comes out too low. "steady" is the
median time of a turn in which every row decodes and no prompt is read. It can be taken once more
with every row asking for its hidden states.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from headrace.bench.ceilings import Ceilings
from headrace.bench.contestants import Headrace
from headrace.bench.decoding import Decoding, check_room, output_len
from headrace.bench.floor import decode_floor, prefill_floor
from headrace.bench.load import Load, Prompts
from headrace.bench.trace import WARM_TURNS, TraceReport, trace_turns
from headrace.execution.prefill_graph import SECOND_ASK

if TYPE_CHECKING:
    from headrace.llm import LLM

STEADY_TURNS = 32
WARM_PROMPTS = 8  # of the full length: enough to fill a step of 8192 tokens
WARM_LEN = 16
TOP_P, TOP_LOGPROBS = {"top_p": 0.9, "temperature": 1.0}, {"logprobs": 5}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What to measure.

    Attributes:
        batches: sequences of a decode step. prefills: prompts read at once, to their first token.
        context: tokens of a prompt. output_len: tokens of the long run.
        trace_turns: turns under the profiler, on a GPU; 0 for none.
        mixed: trace too with a row that samples by top-p and one that asks for logprobs.
        hidden_states: "last" or "all": steady turns too in which every row asks for them, after the
            last norm and of the layers that graphs keep.
    """

    batches: tuple[int, ...]
    prefills: tuple[int, ...] = ()
    context: int = 1024
    output_len: int = 64
    repeats: int = 3
    trace_turns: int = 20
    mixed: bool = False
    hidden_states: str = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """Turns in which every row decodes.

    Attributes:
        seconds: of each turn. context: mean tokens of a sequence.
        paths: turns by path; refused: why better paths were not taken.
        trace, mixed_trace: `None` where none was asked for, or there is no GPU.
    """

    seconds: tuple[float, ...]
    context: float
    floor: float
    paths: dict[str, int]
    refused: tuple[str, ...]
    trace: TraceReport | None = None

    @property
    def median(self) -> float:
        return median(self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Prompts from submission to the last of their first tokens.

    `paths`: steps by path, of all repeats.
    """

    prompts: int
    length: int
    seconds: tuple[float, ...]
    floor: float
    paths: dict[str, int]

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.prompts * self.length / self.median

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": "prefill",
            **asdict(self),
            "median_seconds": self.median,
            "tokens_per_second": self.tokens_per_second,
            "ratio": self.median / self.floor,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """Decode steps of one batch size; floors and steps in seconds.

    `states`: steady turns in which every row asks for hidden states, `None` where none were taken.
    """

    batch: int
    prompt_len: int
    output_len: int
    short: tuple[float, ...]
    long: tuple[float, ...]
    context: float
    floor: float
    steady: Steady
    mixed_trace: TraceReport | None = None
    states: Steady | None = None

    @property
    def step(self) -> float:
        return (median(self.long) - median(self.short)) / (self.output_len - 1)

    def as_dict(self) -> dict[str, Any]:
        steady = self.steady
        return {
            "kind": "decode",
            "batch": self.batch,
            "prompt_len": self.prompt_len,
            "output_len": self.output_len,
            "seconds_of_one_token": list(self.short),
            "seconds_of_all_tokens": list(self.long),
            "context": self.context,
            "step_seconds": self.step,
            "floor_seconds": self.floor,
            "ratio": self.step / self.floor,
            "steady_context": steady.context,
            "steady_seconds": steady.median,
            "steady_floor_seconds": steady.floor,
            "steady_ratio": steady.median / steady.floor,
            "turn_seconds": list(steady.seconds),
            "paths": steady.paths,
            "refused": list(steady.refused),
            "trace": None if steady.trace is None else steady.trace.as_dict(),
            "mixed_trace": None if self.mixed_trace is None else self.mixed_trace.as_dict(),
            "states_seconds": None if self.states is None else self.states.median,
            "states_paths": None if self.states is None else self.states.paths,
        }


class StepBench:
    """Measures one model that is loaded.

    Args:
        tell: called with a line of progress before each measurement.

    Raises:
        ConfigError, CapacityError: a batch cannot run at once; nothing was measured.
        UnsupportedError: no floor is known for the model.
    """

    def __init__(
        self,
        llm: "LLM",
        work: StepWork,
        ceilings: Ceilings,
        *,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self._tell = tell
        self._llm, self._work, self._ceilings = llm, work, ceilings
        self._ours = Headrace(llm)
        explanation = llm.explain()
        self._traits, plan = explanation.persona.traits, explanation.plan
        self._dtypes = {"dtype": plan.dtype.value, "kv_dtype": plan.kv_cache_dtype.value}
        kept = plan.hidden_state_layers.value
        self._states: dict[str, Any] = {}  # of every row, in the turns that ask for hidden states
        if work.hidden_states != "none":
            self._states = {
                "return_hidden_states": work.hidden_states,
                "hidden_state_layers": (*kept, -1),
            }
        self._traced = plan.device.value == "cuda" and work.trace_turns > 0
        self._first_tokens: dict[int, tuple[tuple[float, ...], dict[str, int]]] = {}
        for batch in work.prefills:
            check_room(llm, batch, work.context + 2)
        for batch in work.batches:
            made = max(work.output_len, output_len(llm, batch, work.context, self._turns))
            check_room(llm, batch, work.context + made)

    def measure(self) -> Iterator[Decode | Prefill]:
        for batch in self._work.batches:
            self._begin(f"decode steps of {batch}")
            yield self._decode(batch)
        for prompts in self._work.prefills:
            self._begin(f"prefill of {prompts}")
            yield self._prefill(prompts)

    def _begin(self, what: str) -> None:
        if self._tell is not None:
            self._tell(f"{what} x {self._work.context} tokens ...")

    # ---- decode

    def _decode(self, batch: int) -> Decode:
        work = self._work
        self._warm(batch)
        short, long = [], []
        paths: Counter[str] = Counter()
        for repeat in range(work.repeats):
            prompts = self._prompts(batch, repeat)
            before = self._path_counts()
            short.append(self._seconds(prompts, 1))
            paths += _by_path(self._path_counts() - before)
            long.append(self._seconds(prompts, work.output_len))
        self._first_tokens[batch] = tuple(short), dict(paths)
        context = work.context + work.output_len / 2  # the mean over the steps between the two
        return Decode(
            batch=batch,
            prompt_len=work.context,
            output_len=work.output_len,
            short=tuple(short),
            long=tuple(long),
            context=context,
            floor=self._decode_floor(batch, context),
            steady=self._steady(batch, {}),
            states=self._steady(batch, self._states) if self._states else None,
            mixed_trace=self._mixed_trace(batch) if self._traced and work.mixed else None,
        )

    def _steady(self, batch: int, params: dict[str, Any]) -> Steady:
        prompts = self._prompts(batch, self._work.repeats)
        with Decoding(self._llm, prompts, [params] * batch, self._turns) as decoding:
            before, started = self._path_counts(), decoding.context
            seconds = tuple(decoding.turn() for _ in range(STEADY_TURNS))
            taken = self._path_counts() - before
            context = fmean((started, decoding.context))
            trace = trace_turns(decoding, self._work.trace_turns) if self._traced else None
        return Steady(
            seconds=seconds,
            context=context,
            floor=self._decode_floor(batch, context),
            paths=dict(_by_path(taken)),
            refused=tuple(reason for _, reason in taken if reason),
            trace=trace,
        )

    @property
    def _turns(self) -> int:
        """Of one batch: those that are timed, then those that are traced."""
        return STEADY_TURNS + (WARM_TURNS + self._work.trace_turns if self._traced else 0)

    def _mixed_trace(self, batch: int) -> TraceReport:
        """One row that samples by top-p and one that asks for logprobs; a single row does both."""
        special = [TOP_P, TOP_LOGPROBS] if batch > 1 else [TOP_P | TOP_LOGPROBS]
        params = [*special, *[{}] * (batch - len(special))]
        prompts = self._prompts(batch, self._work.repeats + 1)
        turns = self._work.trace_turns
        with Decoding(self._llm, prompts, params, WARM_TURNS + turns) as decoding:
            return trace_turns(decoding, turns)

    def _decode_floor(self, batch: int, context: float) -> float:
        floor = decode_floor(self._traits, batch=batch, context=context, **self._dtypes)
        return floor.seconds(self._ceilings)

    def _path_counts(self) -> Counter[tuple[str, str]]:
        entries = self._llm.stats()["paths"]
        return Counter({(each["path"], each["refused"]): each["steps"] for each in entries})

    # ---- prefill

    def _prefill(self, prompts: int) -> Prefill:
        work = self._work
        if prompts not in self._first_tokens:
            self._warm(prompts)
            before = self._path_counts()
            times = tuple(
                self._seconds(self._prompts(prompts, repeat), 1) for repeat in range(work.repeats)
            )
            self._first_tokens[prompts] = times, dict(_by_path(self._path_counts() - before))
        seconds, paths = self._first_tokens[prompts]
        floor = prefill_floor(self._traits, prompts=prompts, length=work.context, **self._dtypes)
        return Prefill(
            prompts=prompts,
            length=work.context,
            seconds=seconds,
            floor=floor.seconds(self._ceilings),
            paths=paths,
        )

    # ---- both

    def _warm(self, batch: int) -> None:
        """Compile and capture what the measured runs need, with fewer prompt tokens."""
        full = min(batch, WARM_PROMPTS)
        for ask in range(SECOND_ASK):  # the last one captures a prefill graph
            self._seconds(self._prompts(full, self._work.repeats + 2 + ask), 2)
        short = min(WARM_LEN, self._work.context)
        load = Load(num_prompts=batch, input_len=short, output_len=4)
        self._seconds(load.prompts(0, self._vocab), load.output_len)

    def _prompts(self, batch: int, repeat: int) -> Prompts:
        load = Load(num_prompts=batch, input_len=self._work.context, output_len=1)
        return load.prompts(repeat, self._vocab)

    @property
    def _vocab(self) -> int:
        return self._traits.vocab_size

    def _seconds(self, prompts: Prompts, output_len: int) -> float:
        start = time.perf_counter()
        self._ours.run(prompts, output_len)
        return time.perf_counter() - start


def _by_path(counts: Counter[tuple[str, str]]) -> Counter[str]:
    paths: Counter[str] = Counter()
    for (path, _), steps in counts.items():
        paths[path] += steps
    return paths
