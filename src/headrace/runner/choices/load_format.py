"""How the weights are read."""

from collections.abc import Iterator

from headrace.base.decision import Decision
from headrace.config.engine_config import EngineConfig
from headrace.runner.checkpoint_facts import CheckpointFacts


def choose_load_format(config: EngineConfig, checkpoint: CheckpointFacts) -> Decision[str]:
    if config.load_format == "dummy":
        reason = f"random, seed {config.seed}"
        return Decision(name="load_format", value="dummy", reason=reason, asked=True)
    return Decision(
        name="load_format",
        value=checkpoint.load_format,
        reason="the checkpoint's format",
        asked=config.load_format != "auto",
    )


def load_format_conflicts(config: EngineConfig, checkpoint: CheckpointFacts) -> Iterator[str]:
    """Why the format asked for cannot be."""
    stored = checkpoint.load_format
    if config.load_format not in ("auto", "dummy", stored):
        yield (
            f"load_format {config.load_format} was asked, the checkpoint is {stored} "
            "(leave load_format at auto)"
        )
