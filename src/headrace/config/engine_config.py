"""What the operator asked for. Never changed after it is made: what comes of it is the `Plan`."""

from dataclasses import dataclass, field, fields
from typing import Any

from headrace.base.errors import ConfigError

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
DTYPES = ("auto", "float32", "bfloat16", "float16")
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def option(default: Any, meaning: str) -> Any:
    """A field of the configuration with the sentence that `--help` shows for it."""
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything an operator can ask for; keywords of `LLM` and flags of the command line.

    Raises:
        ConfigError: a value is outside its range; names field, value and range.
    """

    model: str = field(metadata={"help": "path, short name (smollm2) or hub id"})
    tokenizer: str | None = option(None, "path or hub id of another tokenizer")
    revision: str | None = option(None, "revision of a hub model")
    load_format: str = option("auto", "auto, safetensors, gguf, or dummy (seeded random weights)")
    dtype: str = option("auto", "auto, float32, bfloat16 or float16")
    kv_cache_dtype: str = option("auto", "dtype of the KV pool; auto follows dtype")
    device: str = option("auto", "auto, cuda or cpu")
    max_model_len: int | None = option(None, "longest prompt + output in tokens")
    max_running_requests: int | None = option(None, "sequences that run at the same time")
    max_total_tokens: int | None = option(None, "tokens in the KV pool")
    mem_fraction: float | None = option(None, "part of device memory for weights and KV pool")
    page_size: int | None = option(None, "tokens per KV page: 1, 2, 4, ... 128")
    chunked_prefill_size: int | None = option(None, "prompt tokens per step; longer ones are cut")
    enable_prefix_cache: bool = option(True, "keep KV of finished prompts for later ones")
    enable_overlap: bool | None = option(None, "launch a step before reading the one before it")
    attention_backend: str | None = option(None, "attention backend of both phases")
    prefill_attention_backend: str | None = option(None, "attention backend of prefill")
    decode_attention_backend: str | None = option(None, "attention backend of decode")
    decode_graph: str | tuple[int, ...] = option("auto", "auto, off, or batch sizes to capture")
    prefill_graph: str = option(
        "auto", "auto or off; breakable and piecewise are not in this version"
    )
    capture: str = option(
        "need", "decode graphs: need (when a step first needs one) or all (first)"
    )
    cpu_graph: str = option("auto", "auto, off or on: torch.compile of decode on the CPU")
    deterministic: bool = option(
        False, "bit-identical results whatever the batch (on: not in this version)"
    )
    seed: int = option(0, "seed of dummy weights and of sequences that name none")

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model is {self.model!r}", remedy="Give a path, short name or id")
        _one_of("load_format", self.load_format, LOAD_FORMATS)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, DTYPES)
        _one_of("prefill_graph", self.prefill_graph, ("auto", "off", "breakable", "piecewise"))
        _one_of("capture", self.capture, ("need", "all"))
        _one_of("cpu_graph", self.cpu_graph, ("auto", "off", "on"))
        for name in ("max_model_len", "max_running_requests", "max_total_tokens"):
            _positive(name, getattr(self, name))
        _positive("chunked_prefill_size", self.chunked_prefill_size)
        if self.page_size is not None:
            _one_of("page_size", self.page_size, PAGE_SIZES)
        if self.mem_fraction is not None and not 0.0 < self.mem_fraction <= 1.0:
            raise ConfigError(
                f"mem_fraction is {self.mem_fraction!r}", remedy="Give a number in (0, 1]"
            )
        _check_graph_sizes(self.decode_graph)
        if not isinstance(self.seed, int) or not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"seed is {self.seed!r}", remedy="Give a 64-bit integer")

    @classmethod
    def field_help(cls) -> dict[str, str]:
        return {entry.name: entry.metadata["help"] for entry in fields(cls)}


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ConfigError(
            f"{name} is {value!r}", remedy=f"Use one of: {', '.join(map(str, allowed))}"
        )


def _positive(name: str, value: int | None) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} is {value!r}", remedy="Give a whole number of at least 1")


def _check_graph_sizes(value: str | tuple[int, ...]) -> None:
    if isinstance(value, str):
        _one_of("decode_graph", value, ("auto", "off"))
        return
    if not value or any(not isinstance(size, int) or size < 1 for size in value):
        raise ConfigError(
            f"decode_graph is {value!r}", remedy="Use auto, off, or batch sizes of at least 1"
        )
