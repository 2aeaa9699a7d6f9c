"""What the operator asked for. Never changed after it is made: what comes of it is the `Plan`."""

from dataclasses import dataclass, field, fields
from typing import Any

from headrace.base.errors import UnknownOptionError
from headrace.base.unknown_names import names_answered
from headrace.config.checks import (
    MAX_INT32,
    MAX_INT64,
    Check,
    backend_name,
    dtype_name,
    flag,
    fraction,
    one_of,
    optional,
    sizes,
    text,
    whole,
    wholes,
)
from headrace.config.other_words import ENGINE_WORDS

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
DTYPES = ("auto", "float32", "bfloat16", "float16")
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)

MAX_LAYERS = 1024  # above any model's

_BACKEND = optional(backend_name())
_COUNT = optional(whole(1, MAX_INT32))


def option(default: Any, meaning: str, check: Check) -> Any:
    """A field of the configuration: the sentence that `--help` shows for it, and what it takes."""
    return field(default=default, metadata={"help": meaning, "check": check})


@names_answered(ENGINE_WORDS, "option of the engine", UnknownOptionError)
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything an operator can ask for; keywords of `LLM` and flags of the command line.

    Raises:
        ConfigError: a value is of another type or outside its range; names field, value and range.
            Or there is no such field; names the one that was meant.
    """

    model: str = field(
        metadata={
            "help": "path, short name (smollm2) or hub id",
            "check": text("paths, short names and hub ids"),
        }
    )
    tokenizer: str | None = option(
        None, "path or hub id of another tokenizer", optional(text("paths and hub ids"))
    )
    chat_template: str | None = option(
        None,
        "file with a chat template in Jinja, in place of the checkpoint's",
        optional(text("paths of files")),
    )
    revision: str | None = option(
        None, "revision of a hub model", optional(text("branches, tags and commits"))
    )
    load_format: str = option(
        "auto",
        "auto, safetensors, gguf, or dummy (seeded random weights)",
        one_of(*LOAD_FORMATS),
    )
    dtype: str = option("auto", "auto, float32, bfloat16 or float16", dtype_name(*DTYPES))
    kv_cache_dtype: str = option(
        "auto", "dtype of the KV pool; auto follows dtype", dtype_name(*DTYPES)
    )
    device: str = option("auto", "auto, cuda or cpu", text("auto, cuda or cpu"))
    max_model_len: int | None = option(None, "longest prompt + output in tokens", _COUNT)
    max_running_requests: int | None = option(None, "sequences that run at the same time", _COUNT)
    max_total_tokens: int | None = option(
        None, "tokens in the KV pool", optional(whole(1, MAX_INT64))
    )
    mem_fraction: float | None = option(
        None, "part of device memory for weights and KV pool", optional(fraction)
    )
    page_size: int | None = option(
        None, "tokens per KV page: 1, 2, 4, ... 128", optional(whole(1, 128, PAGE_SIZES))
    )
    chunked_prefill_size: int | None = option(
        None, "prompt tokens per step; longer ones are cut", _COUNT
    )
    split_prefill_layers: int | None = option(
        None, "layers of a long prompt's step between two decode steps of others", _COUNT
    )
    enable_prefix_cache: bool = option(True, "keep KV of finished prompts for later ones", flag)
    enable_overlap: bool | None = option(
        None, "launch a step before reading the one before it", optional(flag)
    )
    attention_backend: str | None = option(None, "attention backend of both phases", _BACKEND)
    prefill_attention_backend: str | None = option(None, "attention backend of prefill", _BACKEND)
    decode_attention_backend: str | None = option(None, "attention backend of decode", _BACKEND)
    decode_graph: str | tuple[int, ...] = option(
        "auto", "auto, off, or batch sizes to capture", sizes("auto", "off")
    )
    hidden_state_layers: tuple[int, ...] = option(
        (),
        "inner layers whose hidden states decode graphs keep: 0 the embedding, i behind layer i, "
        "negative ones from the end",
        wholes(-MAX_LAYERS, MAX_LAYERS),
    )
    prefill_graph: str = option(
        "auto",
        "auto, off, breakable or piecewise (by torch.compile): replay prefills of few tokens",
        one_of("auto", "off", "breakable", "piecewise"),
    )
    capture: str = option(
        "need",
        "graphs: need (when steps ask, or a server is idle) or all (before the first step)",
        one_of("need", "all"),
    )
    cpu_graph: str = option(
        "auto",
        "auto, off or on: torch.compile of decode on the CPU",
        one_of("auto", "off", "on"),
    )
    enable_return_routed_experts: bool = option(
        False, "let requests ask which experts their tokens were given", flag
    )
    expert_distribution_recorder_mode: str = option(
        "off",
        "off, stat, per_pass or per_token: count the tokens of experts in recordings",
        one_of("off", "stat", "per_pass", "per_token"),
    )
    deterministic: bool = option(
        False, "bit-identical results alone or in any batch, chunked or cached", flag
    )
    kv_canary: str = option(
        "off",
        "off, log or raise: check at every step that sequences read their own KV",
        one_of("off", "log", "raise"),
    )
    kv_canary_real_data: str = option(
        "partial",
        "off, partial or all: how much of the keys and values themselves the KV canary looks at",
        one_of("off", "partial", "all"),
    )
    kv_canary_sweep_interval: int = option(
        0, "steps between two checks of the whole prefix cache; 0: none", whole(0, MAX_INT32)
    )
    numeric_canary: int = option(
        0, "run every n-th step again by reference and compare; 0: none", whole(0, MAX_INT32)
    )
    numeric_canary_mode: str = option(
        "log",
        "of a step that differs: log, or raise, so that its sequences end with an error",
        one_of("log", "raise"),
    )
    seed: int = option(
        0, "seed of dummy weights and of sequences that name none", whole(-(2**63), MAX_INT64)
    )

    def __post_init__(self) -> None:
        for entry in fields(self):
            plain = entry.metadata["check"](entry.name, getattr(self, entry.name))
            object.__setattr__(self, entry.name, plain)  # once, while it is made

    @classmethod
    def field_help(cls) -> dict[str, str]:
        return {entry.name: entry.metadata["help"] for entry in fields(cls)}
