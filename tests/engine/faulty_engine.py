"""A child whose steps go wrong when a prompt asks for it; otherwise the engine's own process."""

import os
import signal
import sys
import time
from typing import Any

from headrace.config.engine_config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.process.child import main

RAISES, CRASHES, HANGS = 261, 262, 263  # special tokens of the tiny checkpoint
HANG_SECONDS = 60


def build(config: EngineConfig) -> Engine:
    engine = Engine(config)
    forward = engine.worker.forward_batch_generation

    def faulty(batch: Any) -> Any:
        tokens = () if batch.prompt_tokens is None else set(batch.prompt_tokens.tolist())
        if RAISES in tokens:
            raise ZeroDivisionError("a step that raises")
        if CRASHES in tokens:
            os.kill(os.getpid(), signal.SIGSEGV)
        if HANGS in tokens:
            time.sleep(HANG_SECONDS)
        return forward(batch)

    engine.worker.forward_batch_generation = faulty  # type: ignore[method-assign]
    return engine


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], build))
