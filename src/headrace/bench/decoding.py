"""A batch that decodes turn by turn under the eye of a benchmark: all rows running, none ending."""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from headrace.base.errors import CapacityError, ConfigError, HeadraceError
from headrace.bench.load import Prompts
from headrace.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    from headrace.llm import LLM

SETTLING_TURNS = 4  # turns in which every row decodes, before anything is measured
SPARE_TURNS = 4  # a step in flight, and prompts cut in two


def check_room(llm: "LLM", batch: int, length: int) -> None:
    """Refuse a batch whose sequences cannot all run at once, each with `length` tokens.

    Raises:
        ConfigError: more sequences, or longer ones, than the plan allows.
        CapacityError: too little KV.
    """
    runner = llm.engine.worker.runner
    allowed, page = runner.plan.max_running_requests.value, runner.plan.page_size.value
    longest = runner.plan.max_model_len.value
    if length > longest:
        raise ConfigError(
            f"Sequences of {length} tokens are needed",
            why=f"the context holds {longest} tokens (max_model_len)",
            remedy="Take a smaller context, fewer tokens or fewer traced turns",
        )
    if batch > allowed:
        raise ConfigError(
            f"A batch of {batch} cannot run at once",
            why=f"the plan lets {allowed} sequences run",
            remedy=f"Ask for --max-running-requests {batch}",
        )
    needed = batch * -(-length // page) * page
    if needed > runner.kv_budget.tokens:
        raise CapacityError(
            f"A batch of {batch} with {length} tokens each needs {needed:,} tokens of KV",
            why=f"{runner.kv_budget.tokens:,} fit ({runner.kv_budget.reason})",
            remedy="Take a smaller batch or context, or raise max_total_tokens or mem_fraction",
        )


def output_len(llm: "LLM", batch: int, input_len: int, turns: int) -> int:
    """Tokens that a row may make until every row has decoded for `turns` turns.

    Early rows decode while late prompts are still read; none may end before the last turn.
    """
    chunk = llm.engine.worker.runner.plan.chunked_prefill_size.value
    return -(-batch * input_len // chunk) + SETTLING_TURNS + turns + SPARE_TURNS


class Decoding:
    """A batch in flight.

    Args:
        prompts: equally long. params: one for each, or one for all; token limits are set here.
        turns: full turns that will be asked for.

    Raises:
        ConfigError, CapacityError: see `check_room`.
    """

    def __init__(
        self, llm: "LLM", prompts: Prompts, params: Sequence[dict[str, Any]], turns: int
    ) -> None:
        self._engine = llm.engine
        self._counts = self._engine.scheduler.counts
        self._batch, self._input_len = len(prompts), len(prompts[0])
        max_tokens = output_len(llm, self._batch, self._input_len, turns)
        check_room(llm, self._batch, self._input_len + max_tokens)
        self._before = self._counts["output_tokens"]
        self._handles = [
            self._engine.add(
                prompt,
                SamplingParams(
                    **{"temperature": 0.0, **each}, max_tokens=max_tokens, ignore_eos=True
                ),
            )
            for prompt, each in zip(prompts, params, strict=True)
        ]

    def __enter__(self) -> Self:
        """Step until every row decodes."""
        full = 0
        try:
            while full < SETTLING_TURNS:
                full = full + 1 if self._turn() else 0
        except BaseException:
            self._abort()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._abort()

    @property
    def context(self) -> float:
        """Mean tokens of a sequence by now, over the rows."""
        made = self._counts["output_tokens"] - self._before
        return self._input_len + made / self._batch

    def turn(self) -> float:
        """Seconds of one turn of the loop, in which every row gets a token."""
        start = time.perf_counter()
        full = self._turn()
        seconds = time.perf_counter() - start
        assert full, "every row decodes in a measured turn"
        return seconds

    def _turn(self) -> bool:
        counts = self._counts
        prompt, output = counts["prompt_tokens"], counts["output_tokens"]
        ended = self._engine.step()
        if ended:
            early = ended[0].output().outputs[0]
            raise HeadraceError(
                "A sequence ended before its batch was measured",
                why=early.message or early.finish_reason,
            )
        made = counts["output_tokens"] - output
        return counts["prompt_tokens"] == prompt and made == self._batch

    def _abort(self) -> None:
        self._engine.abort([handle.request_id for handle in self._handles])
