"""What can be watched of an engine: plans and counters, profiles, dumps, recordings of experts."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, overload

from headrace.base.errors import RequestError
from headrace.base.log import get_logger
from headrace.engine.batch_arguments import Params, Prompts, for_each, listed_prompts, one_each
from headrace.engine.batch_explanation import BatchExplanation
from headrace.engine.dumping import USUAL
from headrace.engine.engine import Engine
from headrace.engine.expert_recorder import ExpertRecorder
from headrace.engine.explanation import Explanation, explanation_of
from headrace.engine.rehearsal import DryRequest, rehearse
from headrace.engine.shared_engine import SharedEngine

log = get_logger(__name__)


class Watching:
    """The part of `LLM` that shows what its engine does, and may do so while others generate."""

    def __init__(self, shared: SharedEngine) -> None:
        self._shared = shared

    @property
    def engine(self) -> Engine:
        """The engine underneath; raises `RequestError` after `close`."""
        return self._shared.engine

    # ---- plans and counters

    @overload
    def explain(self) -> Explanation: ...
    @overload
    def explain(
        self, prompts: Prompts, sampling_params: Params | None = None
    ) -> BatchExplanation: ...
    def explain(
        self, prompts: Prompts | None = None, sampling_params: Params | None = None
    ) -> Explanation | BatchExplanation:
        """Without arguments: persona, plan, what was measured and where memory went.

        With those of `generate`: the steps that it would take, on which path each, and why not on a
        better one, as if the engine were idle, its prefix cache were empty and no stop token came.
        Nothing runs, is captured or counted.

        Raises:
            RequestError: a prompt or an option is invalid, as in `generate`.

        Example:
            print(llm.explain([[1] * 1024] * 32, SamplingParams(max_tokens=64, logprobs=5)))
            llm.explain("Hello").why_not("decode_graph")  # {"the step holds prompt tokens": 1}
        """
        engine = self.engine
        if prompts is None:
            if sampling_params is not None:
                raise RequestError("sampling_params came without prompts", remedy="Give both")
            return explanation_of(engine.settled, engine.worker.runner)
        listed = listed_prompts(prompts)
        if not listed:
            raise RequestError("No prompt was given", remedy="Give those of a call of generate")
        params = one_each("sampling_params", sampling_params, engine.default_params, len(listed))
        return rehearse(engine, for_each(partial(DryRequest.of, engine), listed, params))

    def stats(self) -> dict[str, Any]:
        """Counters since the start (steps by path and reason, tokens, endings) and memory now."""
        with self._shared.turn():
            return self.engine.stats()

    def flush_cache(self) -> int:
        """Forget every cached prefix; returns how many pages became free.

        Raises:
            RequestError: requests run or wait.
        """
        with self._shared.turn():
            return self.engine.flush_cache()

    # ---- profiles and dumps

    def start_profile(
        self,
        folder: str | os.PathLike[str],
        *,
        steps: int | None = None,
        stage: str | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Profile the next steps into a Chrome trace (Perfetto and chrome://tracing read it).

        Args:
            folder: where the trace goes; made when missing.
            steps: how many; `None`: until `stop_profile`.
            stage: "prefill" or "decode": begins with a step of that kind, ends with another.
            options: start_step, activities, with_stack, record_shapes, prefix, stages: see
                `engine.profile_request.checked_request`.

        Returns: "path" of the trace, which is written when the profile ends.

        Raises:
            RequestError: a profile runs already, or what was asked cannot be done.
        """
        if stage is not None:
            if "stages" in options:
                raise RequestError("stage and stages were both given", remedy="Give one of them")
            options["stages"] = (stage,)
        with self._shared.turn():
            return self.engine.profiler.start(folder, steps, **options)

    def stop_profile(self) -> dict[str, Any]:
        """End the profile and write its trace; where it is.

        Raises:
            RequestError: none runs, or none of its steps came.
        """
        with self._shared.turn():
            return self.engine.profiler.stop()

    @contextmanager
    def dump(
        self,
        folder: str | os.PathLike[str],
        *,
        layers: Iterable[int] | None = None,
        names: Iterable[str] = USUAL,
        steps: int | None = None,
        eager: bool = False,
    ) -> Iterator[None]:
        """Within: write the tensors of the steps that run to `folder`, a safetensors file a step.

        `headrace diff A B` compares two dumps.

        Args:
            folder: made when missing; must hold no dump yet.
            layers: whose; `None`: of all.
            names: of k and v (what a layer wrote to the KV pool), logits, and stream (what it left
                between itself and the next).
            steps: how many at most.
            eager: run every step eagerly meanwhile, which stream needs where there are other paths.

        Raises:
            RequestError: a dump runs already, or what was asked cannot be had; at the end, that it
                could not be written.

        Example:
            with llm.dump("eager", names=("k", "v", "stream", "logits"), eager=True):
                llm.generate("The capital of France is")
        """
        with self._shared.turn():
            engine = self.engine
            engine.dumper.start(folder, layers=layers, names=names, steps=steps, eager=eager)
        try:
            yield
        except BaseException:
            self._end_dump(engine, is_heard=False)
            raise
        self._end_dump(engine, is_heard=True)

    def _end_dump(self, engine: Engine, *, is_heard: bool) -> None:
        """`is_heard`: else somebody raises what matters more than that the dump failed."""
        try:
            with self._shared.turn():
                engine.settle()
                engine.dumper.stop()
        except RequestError as error:
            if is_heard:
                raise
            log.error("%s", error)

    # ---- recordings of experts

    def start_expert_distribution(self, mode: str | None = None) -> None:
        """Record how tokens are spread over experts, from the next forward on.

        What was recorded and not dumped is forgotten.

        Args:
            mode: "stat" (sums), "per_pass" (counts of every forward) or "per_token" (the experts of
                every token); `None`: `expert_distribution_recorder_mode` of the start.

        Raises:
            RequestError: another mode, a model without experts, or one started without the
                recorder.
        """
        with self._shared.turn():
            ExpertRecorder(self.engine).start(mode)

    def stop_expert_distribution(self) -> None:
        """Record no more; what was recorded waits to be dumped.

        Raises:
            RequestError: nothing is recorded.
        """
        with self._shared.turn():
            ExpertRecorder(self.engine).stop()

    def dump_expert_distribution(self, folder: str | os.PathLike[str]) -> Path:
        """Write what was recorded into a new file of the folder, and begin anew.

        Returns: the file, for `torch.load`; docs/experts.md says what it holds.

        Raises:
            RequestError: nothing was recorded, or it cannot be written.
        """
        with self._shared.turn():
            return Path(ExpertRecorder(self.engine).dump(folder)["path"])
