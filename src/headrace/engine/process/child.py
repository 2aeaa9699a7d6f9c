"""From a command line to an engine that serves, and to the end of both."""

import argparse
import faulthandler
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from headrace.base.errors import CapacityError, EngineDeadError, HeadraceError
from headrace.base.garbage import set_aside_what_stays
from headrace.base.log import get_logger, log_to_stderr
from headrace.config.engine_config import EngineConfig
from headrace.engine.process.lifeline import end_with_parent
from headrace.engine.process.link import Link
from headrace.request.messages import EngineInfo, Failure, Hello, Ready, StartFailed

if TYPE_CHECKING:
    from headrace.engine.engine import Engine

log = get_logger(__name__)

Build = Callable[[EngineConfig], "Engine"]


def main(arguments: Sequence[str], build: Build | None = None) -> int:
    """Run the engine's process; returns its exit code.

    Args:
        build: makes the engine; tests give one that makes it fail in some way.
    """
    started = time.monotonic()
    asked = _parsed(arguments)
    os.dup2(2, 1)  # what libraries print belongs to the log
    faulthandler.enable()
    end_with_parent()
    log_to_stderr(asked.log_level, process="engine")
    config = EngineConfig(**json.loads(asked.config))
    link = Link(asked.address)
    try:
        link.send(Hello(os.getpid()))
        engine = _start(config, link, build)
        if engine is None:
            return 1
        link.catch_signals()
        set_aside_what_stays()
        link.send(Ready(_info(engine, time.monotonic() - started), engine.load()))
        return _serve(engine, link)
    finally:
        link.close()


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m headrace.engine.process", description=__doc__)
    parser.add_argument("--address", required=True, help="ZeroMQ address of the face")
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    parser.add_argument("--log-level", default="info")
    return parser.parse_args(arguments)


def _start(config: EngineConfig, link: Link, build: Build | None) -> "Engine | None":
    """The engine; `None` after telling the face why there is none."""
    try:
        return (build or _build)(config)
    except HeadraceError as error:
        failure = error
    except MemoryError as error:
        failure = CapacityError("There is too little memory to start", why=str(error))
    except Exception as error:
        log.exception("The engine could not start")
        failure = EngineDeadError(
            "The engine could not start",
            why=f"{type(error).__name__}: {error}",
            remedy="The log shows where; this is a bug worth reporting",
        )
    link.send(StartFailed(Failure.of(failure)))
    return None


def _build(config: EngineConfig) -> "Engine":
    from headrace.engine.engine import Engine  # brings torch, which takes seconds: after the hello

    return Engine(config)


def _serve(engine: "Engine", link: Link) -> int:
    from headrace.engine.process.loop import ServingLoop

    try:
        ServingLoop(engine, link).run()
    except Exception:
        log.exception("The engine's loop failed")
        return 1
    return 0


def _info(engine: "Engine", seconds: float) -> EngineInfo:
    from headrace.engine.explanation import explanation_of
    from headrace.runner.report import summary

    settled, plan = engine.settled, engine.settled.plan
    traits = settled.persona.traits
    explanation = explanation_of(settled, engine.worker.runner)
    return EngineInfo(
        model=settled.config.model,
        model_path=str(settled.checkpoint.path),
        summary=summary(explanation),
        architecture=traits.family,
        device=plan.device.value,
        dtype=plan.dtype.value,
        max_model_len=plan.max_model_len.value,
        vocab_size=engine.vocab_size,
        num_layers=traits.num_layers,
        hidden_size=traits.hidden_size,
        eos_token_ids=sorted(engine.eos_token_ids),
        default_params=engine.default_params,
        sampling_defaults=str(explanation.sampling_defaults),
        is_generation=traits.is_generation,
        has_tokenizer=engine.tokenizer is not None,
        kv_tokens=engine.scheduler.keeper.capacity_tokens,
        page_size=plan.page_size.value,
        max_running_requests=plan.max_running_requests.value,
        start_seconds=seconds,
        pid=os.getpid(),
    )
