"""Recordings of how tokens are spread over experts, between the steps of an engine."""

import os
from typing import Any

from headrace.base.errors import RequestError
from headrace.engine.engine import Engine
from headrace.observers.expert_distribution import ExpertDistribution


class ExpertRecorder:
    """Starts, stops and writes the recordings of an engine.

    Each call lets the step in flight end first, so that every forward lies on one side of it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def start(self, mode: str | None = None) -> dict[str, Any]:
        """See `ExpertDistribution.start`.

        Raises:
            RequestError: another mode, or this engine records none.
        """
        return self._settled().start(mode)

    def stop(self) -> dict[str, Any]:
        """See `ExpertDistribution.stop`.

        Raises:
            RequestError: nothing is recorded, or this engine records none.
        """
        return self._settled().stop()

    def dump(self, folder: str | os.PathLike[str]) -> dict[str, Any]:
        """See `ExpertDistribution.dump`.

        Raises:
            RequestError: nothing was recorded, it cannot be written, or this engine records none.
        """
        return self._settled().dump(folder)

    def _settled(self) -> ExpertDistribution:
        for observer in self._engine.worker.runner.observers.members:
            if isinstance(observer, ExpertDistribution):
                self._engine.settle()
                return observer
        traits = self._engine.settled.persona.traits
        what = "This engine records no distribution of experts"
        if not traits.moe_layers:
            raise RequestError(what, why=f"its model, a {traits.family}, has no experts")
        raise RequestError(
            what,
            why="counting is work of the device, recorded into graphs at the start",
            remedy="Start it with expert_distribution_recorder_mode stat, per_pass or per_token",
        )
