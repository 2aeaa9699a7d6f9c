"""Dumps of the steps to come: what may be asked, and the observer that does it."""

import os
from collections.abc import Iterable
from pathlib import Path

from headrace.base.errors import RequestError
from headrace.base.folders import made_folder
from headrace.base.log import get_logger
from headrace.observers.dump_files import LOGITS, NAMES, STREAM, K, V
from headrace.observers.dumper import Dumper
from headrace.request.checks import at_least, bad_value, listed, some_of, switch
from headrace.runner.model_runner import ModelRunner
from headrace.runner.step_reading import StepReader

log = get_logger(__name__)

USUAL = (K, V, LOGITS)
EAGER_REASON = "a dump was asked to see every step run eagerly"


class StepDumper:
    """At most one dump at a time."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._dumper: Dumper | None = None

    def start(
        self,
        folder: str | os.PathLike[str],
        *,
        layers: Iterable[int] | None = None,
        names: Iterable[str] = USUAL,
        steps: int | None = None,
        eager: bool = False,
    ) -> Dumper:
        """Dump the next steps.

        Args:
            folder: where the files go, one a step; made when missing, and must hold no dump.
            layers: whose tensors; `None`: of all.
            names: of k, v, logits and stream, the residual stream behind each layer.
            steps: how many; `None`: until `stop`.
            eager: run every step eagerly meanwhile. Only so is there a stream on a runner that has
                other paths: they replay what was recorded, and the model itself does not run.

        Raises:
            RequestError: a dump runs already, the folder cannot be written, or what was asked
                cannot be had.
        """
        if self._dumper is not None:
            raise RequestError(
                f"A dump runs already, into {self._dumper.folder}", remedy="End that one first"
            )
        runner = self._runner
        at_least("steps", steps, 1)
        switch("eager", eager)
        wanted = some_of("names", names, NAMES)
        others = [path.name for path in runner.selector.paths[:-1]]
        if STREAM in wanted and others and not eager:
            raise RequestError(
                "The stream between layers is not there on every path",
                why=f"{', '.join(others)} run what was recorded or compiled, or the model in parts",
                remedy="Ask for eager too, or leave stream out of names",
            )
        chosen = _layers(layers, runner.persona.traits.num_layers)
        self._dumper = _dumper(runner, _folder(folder), chosen, frozenset(wanted), steps)
        if eager:
            runner.selector.only_eager(EAGER_REASON)
        runner.observers = runner.observers.plus(self._dumper)
        return self._dumper

    def stop(self) -> list[Path]:
        """End the dump; the files written. No step may be in flight.

        Raises:
            RequestError: none runs, or it could not be written to its end.
        """
        dumper = self._dumper
        if dumper is None:
            raise RequestError("No dump runs", remedy="Start one first")
        self._dumper = None
        self._runner.selector.only_eager("")
        self._runner.observers = self._runner.observers.minus(dumper)
        if dumper.failure is not None:
            raise RequestError(
                f"The dump into {dumper.folder} ended after {len(dumper.files)} steps",
                why=str(dumper.failure),
            )
        log.info("Dump of %d steps written to %s", len(dumper.files), dumper.folder)
        return list(dumper.files)


def _dumper(
    runner: ModelRunner, folder: Path, layers: list[int], names: frozenset[str], most: int | None
) -> Dumper:
    plan, model = runner.plan, runner.model
    return Dumper(
        folder=folder,
        layers=layers,
        names=names,
        most=most,
        model=runner.config.model,
        dtype=plan.dtype.value,
        backends=(plan.prefill_attention.value, plan.decode_attention.value),
        reader=StepReader(
            runner.rows, runner.page_tables, plan.page_size.value, model.attention_layers()
        ),
        tapped=model.tapped,
    )


def _layers(asked: Iterable[int] | None, count: int) -> list[int]:
    if asked is None:
        return list(range(count))
    allowed = f"a list of numbers, of layers 0 to {count - 1}"
    layers = listed("layers", asked, allowed)
    if not layers or not all(type(layer) is int and 0 <= layer < count for layer in layers):
        raise bad_value("layers", layers, allowed)
    return sorted(set(layers))


def _folder(asked: str | os.PathLike[str]) -> Path:
    folder = made_folder(asked, "The dump")
    if any(folder.glob("step-*.safetensors")):
        raise RequestError(f"{asked} holds a dump already", remedy="Name another folder")
    return folder
