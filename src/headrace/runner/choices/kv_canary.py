"""Whether a runner keeps a KV canary, and how much of the KV it looks at."""

from collections.abc import Iterator

from headrace.base.decision import Decision
from headrace.config.engine_config import EngineConfig
from headrace.config.hardware import Hardware
from headrace.config.plan import OFF

ALL = "all"
DEFAULT_REAL_DATA = "partial"


def choose_kv_canary(config: EngineConfig) -> Decision[str]:
    """off, log or raise."""
    name, mode = "kv_canary", config.kv_canary
    if mode == OFF:
        return Decision(name=name, value=OFF, reason="no records are kept beside the KV pool")
    end = "what is wrong is logged"
    if mode == "raise":
        end = "sequences that read what is not theirs end with an error"
    reason = f"every step checks that sequences read their own KV; {end}"
    return Decision(name=name, value=mode, reason=reason, asked=True)


def choose_real_data(config: EngineConfig) -> Decision[str]:
    """How much of keys and values is looked at: off, partial or all."""
    name, value = "kv_canary_real_data", config.kv_canary_real_data
    if config.kv_canary == OFF:
        return Decision(name=name, value=OFF, reason="there is no KV canary")
    reason = {
        OFF: "records alone are checked",
        DEFAULT_REAL_DATA: "16 bytes of a token's keys and of its values in every layer",
        ALL: "every step reads all keys and values of its sequences once more",
    }[value]
    return Decision(name=name, value=value, reason=reason, asked=value != DEFAULT_REAL_DATA)


def choose_sweep_interval(config: EngineConfig) -> Decision[int]:
    """Steps from one check of the whole prefix cache to the next; 0: never."""
    name, every = "kv_canary_sweep_interval", config.kv_canary_sweep_interval
    if not every:
        return Decision(name=name, value=0, reason="cached pages are checked when they are read")
    reason = f"every {every} steps all pages of the prefix cache are checked"
    return Decision(name=name, value=every, reason=reason, asked=True)


def kv_canary_conflicts(config: EngineConfig, hardware: Hardware) -> Iterator[str]:
    """Why the canary that was asked for cannot be."""
    if config.kv_canary == OFF:
        if config.kv_canary_real_data != DEFAULT_REAL_DATA:
            yield (
                f"kv_canary_real_data {config.kv_canary_real_data} was asked, and kv_canary is off "
                "(ask for kv_canary log or raise)"
            )
        if config.kv_canary_sweep_interval:
            yield (
                f"kv_canary_sweep_interval {config.kv_canary_sweep_interval} was asked, and "
                "kv_canary is off (ask for kv_canary log or raise)"
            )
        return
    if hardware.platform != "cpu" and "triton" not in hardware.packages:
        yield (
            f"kv_canary {config.kv_canary} was asked, and its kernels on a GPU need triton "
            "(pip install 'headrace[cuda]', or leave kv_canary off)"
        )
