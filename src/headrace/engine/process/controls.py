"""What a face may call by name while the engine serves."""

from collections.abc import Callable
from typing import Any

from headrace.base.errors import HeadraceError, RequestError
from headrace.base.log import get_logger
from headrace.engine.engine import Engine
from headrace.engine.expert_recorder import ExpertRecorder
from headrace.engine.explanation import explanation_of
from headrace.request.messages import Control, ControlReply, Failure
from headrace.runner.report import as_dict

log = get_logger(__name__)

EXPLAINED_STEPS = 32


class Controls:
    """Methods listed in `_calls`, each with plain arguments and a plain dict as its result."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        recorder = ExpertRecorder(engine)
        self._calls: dict[str, Callable[..., dict[str, Any]]] = {
            "stats": engine.stats,
            "steps": engine.scheduler.history.as_dict,
            "explain": self._explain,
            "flush_cache": self._flush_cache,
            "start_expert_distribution": recorder.start,
            "stop_expert_distribution": recorder.stop,
            "dump_expert_distribution": recorder.dump,
            "start_profile": engine.profiler.start,
            "stop_profile": engine.profiler.stop,
        }

    def reply(self, control: Control) -> ControlReply:
        """Call it; whatever goes wrong goes into the reply."""
        try:
            return ControlReply(control.call_id, self._call(control))
        except HeadraceError as error:
            failure = error
        except Exception as error:
            log.exception("%s failed", control.name)
            failure = HeadraceError(
                f"{control.name} failed", why=f"{type(error).__name__}: {error}"
            )
        return ControlReply(control.call_id, failure=Failure.of(failure))

    def _call(self, control: Control) -> dict[str, Any]:
        call = self._calls.get(control.name)
        if call is None:
            raise RequestError(
                f"There is no control {control.name!r}", remedy=f"Use {', '.join(self._calls)}"
            )
        return call(**control.arguments)

    def _explain(self) -> dict[str, Any]:
        """The plan with its decisions, as text and as data, what each path has run, and the last
        steps."""
        scheduler = self._engine.scheduler
        explanation = explanation_of(self._engine.settled, self._engine.worker.runner)
        return {
            **as_dict(explanation),
            "sampling_defaults": str(explanation.sampling_defaults),
            "text": str(explanation),
            "paths": self._engine.stats()["paths"],
            "steps": scheduler.history.as_dict(after=scheduler.counts["steps"] - EXPLAINED_STEPS),
        }

    def _flush_cache(self) -> dict[str, Any]:
        return {"pages": self._engine.flush_cache()}
