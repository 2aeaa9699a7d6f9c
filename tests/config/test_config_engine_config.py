"""Every bad value of every option is refused by name, value and what is allowed."""

from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.base.errors import ConfigError, UnknownOptionError
from headrace.config.engine_config import MAX_LAYERS, PAGE_SIZES, EngineConfig
from headrace.config.other_words import AS_HERE, ATTENTION_NAMES, ENGINE_WORDS


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


HUGE = 10**5000  # Python refuses to print it
NOTHINGS: list[Any] = [
    *[object(), Unprintable(), b"auto", {}, {"auto"}, 1j, "", " ", "x" * 10**5 + "\n"],
    *[np.array([1, 2]), np.array(["auto", "cpu"]), np.array(1.5), np.zeros((50, 50))],
    *[torch.tensor([1, 2]), torch.tensor(1), torch.zeros(2, 2)],
    *[float("nan"), float("inf"), HUGE, -HUGE, [HUGE], [None], [], ()],
]
NOT_TEXTS = [value for value in NOTHINGS if not isinstance(value, str)] + ["", " "]
NOT_FLAGS = [*NOTHINGS, "off", "on", "true", 0, 1, 0.0, np.bool_(True)]
NOT_WHOLE = [*NOTHINGS, True, False, np.bool_(True), "4", 4.0, np.float32(4), [4], 2**63]
NOT_COUNTS = [*NOT_WHOLE, 0, -1, 2**31]
NOT_CHOICES = [*NOTHINGS, 0, 1, True, "AUTO", "magic"]
NOT_NAMES = [*NOT_TEXTS, 0, 5, True, False]

BAD: dict[str, list[Any]] = {
    "model": [*NOT_NAMES, None],
    "tokenizer": NOT_NAMES,
    "chat_template": NOT_NAMES,
    "revision": NOT_NAMES,
    "load_format": [*NOT_CHOICES, None],
    "dtype": [*NOT_CHOICES, None, torch.int8],
    "kv_cache_dtype": [*NOT_CHOICES, None],
    "device": [*NOT_NAMES, None, torch.device("cpu")],
    "max_model_len": NOT_COUNTS,
    "max_running_requests": NOT_COUNTS,
    "max_total_tokens": [*NOT_WHOLE, 0, -1],
    "mem_fraction": [*NOTHINGS, "0.5", True, False, 0, 0.0, -0.1, 1.01, 2, Fraction(1, HUGE)],
    "page_size": [*NOT_COUNTS, 3, 256],
    "chunked_prefill_size": NOT_COUNTS,
    "split_prefill_layers": NOT_COUNTS,
    "enable_prefix_cache": [*NOT_FLAGS, None],
    "enable_overlap": NOT_FLAGS,
    "attention_backend": NOT_NAMES,
    "prefill_attention_backend": NOT_NAMES,
    "decode_attention_backend": NOT_NAMES,
    "decode_graph": [*NOT_CHOICES, None, 5, [0], [1, "2"], [1.0], (True,), {1}, range(3)],
    "hidden_state_layers": [
        *[value for value in NOTHINGS if not isinstance(value, list | tuple) or value],
        *[None, 3, True, "3", [1.0], [True], ["1"], {1}, range(3), [MAX_LAYERS + 1]],
    ],
    "prefill_graph": [*NOT_CHOICES, None],
    "capture": [*NOT_CHOICES, None],
    "cpu_graph": [*NOT_CHOICES, None],
    "enable_return_routed_experts": [*NOT_FLAGS, None],
    "expert_distribution_recorder_mode": [*NOT_CHOICES, None, "stat_approx"],
    "deterministic": [*NOT_FLAGS, None],
    "kv_canary": [*NOT_CHOICES, None, "on"],
    "kv_canary_real_data": [*NOT_CHOICES, None, "some"],
    "kv_canary_sweep_interval": [*NOT_WHOLE, None, -1, 2**31],
    "numeric_canary": [*NOT_WHOLE, None, -1, 2**31],
    "numeric_canary_mode": [*NOT_CHOICES, None, "off"],
    "seed": [*NOT_WHOLE, None, -(2**63) - 1],
}
CASES = [(name, value) for name, values in BAD.items() for value in values]


def test_every_field_has_bad_values() -> None:
    assert set(BAD) == {field.name for field in fields(EngineConfig)}


@pytest.mark.parametrize(
    ("name", "value"), CASES, ids=[f"{name}-{place}" for place, (name, _) in enumerate(CASES)]
)
def test_a_bad_value_is_refused_by_name_value_and_range(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**({"model": "tiny"} | {name: value}))
    error = caught.value
    assert error.what.startswith(f"{name} is ")
    assert len(error.what) > len(f"{name} is ")
    assert error.remedy.startswith("Allowed: ")
    assert "\n" not in str(error)
    assert len(str(error)) < 300


GOOD: dict[str, list[Any]] = {
    "model": ["tiny", Path("some") / "folder"],
    "tokenizer": [None, "tiny", Path("folder")],
    "chat_template": [None, "tools.jinja", Path("folder") / "tools.jinja"],
    "revision": [None, "main"],
    "device": ["auto", "cuda", "cpu", "tpu"],  # which devices there are is detected later
    "max_model_len": [None, 1, 2**31 - 1, np.int32(5)],
    "max_total_tokens": [None, 1, 10**15, np.uint64(7)],
    "mem_fraction": [None, 1, 1e-3, np.float32(0.5), Fraction(1, 2)],
    "page_size": [None, *PAGE_SIZES, np.int64(4)],
    "enable_prefix_cache": [True, False],
    "enable_overlap": [None, True, False],
    "attention_backend": [None, "torch_native"],
    "decode_graph": ["auto", "off", (1, 2), [1, 2], [np.int64(8)]],
    "hidden_state_layers": [(), (0, -1), [np.int64(3)]],
    "seed": [0, -(2**63), 2**63 - 1, np.int64(3)],
}


@pytest.mark.parametrize(("name", "values"), GOOD.items(), ids=list(GOOD))
def test_good_values_pass_and_become_plain(name: str, values: list[Any]) -> None:
    for value in values:
        plain = getattr(EngineConfig(**({"model": "tiny"} | {name: value})), name)
        if isinstance(value, Path):
            assert plain == str(value)
        elif isinstance(value, list):
            assert plain == tuple(value)
            assert {type(size) for size in plain} == {int}
        else:
            assert plain == value
            assert type(plain) in (type(None), str, bool, int, float, tuple)


def test_messages_read_well() -> None:
    with pytest.raises(
        ConfigError, match=r"^page_size is 3\. Allowed: 1, 2, 4, .*128; or left out \(None\)\.$"
    ):
        EngineConfig(model="tiny", page_size=3)
    with pytest.raises(ConfigError, match=r"^seed is of type int and cannot be printed\. Allowed"):
        EngineConfig(model="tiny", seed=HUGE)
    with pytest.raises(ConfigError, match=r"^enable_overlap is 'off'\. Allowed: True or False; or"):
        EngineConfig(model="tiny", enable_overlap="off")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "answer"),
    [
        ("page_sise", r"did you mean page_size\?"),
        ("tensor_parallel_size", "this version runs on one device; leave it out"),
        ("gpu_memory_utilization", "use mem_fraction"),
        ("max_num_seqs", "use max_running_requests"),
        ("enforce_eager", "use decode_graph='off', prefill_graph='off'"),
        ("trust_remote_code", "code that comes with a checkpoint is never run"),
        ("enable_chunked_prefill", "it is always so; leave it out"),
        ("max_lora_rank", "this version does not have it"),
        ("data_parallel_rank", "this version runs on one device; leave it out"),
    ],
)
def test_an_option_that_there_is_not_is_answered(option: str, answer: str) -> None:
    with pytest.raises(
        UnknownOptionError, match=rf"option of the engine: {option} \({answer}\)\.$"
    ):
        EngineConfig(model="tiny", **{option: 3})


def test_other_words_lead_to_options_of_ours() -> None:
    ours = set(EngineConfig.field_help())
    words = ENGINE_WORDS
    assert set(words.renamed.values()) <= ours
    assert not ours & {*words.renamed, *words.switches, *words.advice, *AS_HERE}
    assert all(words.exact_answer(theirs) for theirs in AS_HERE)
    for options in words.switches.values():
        EngineConfig(model="tiny", **options)


@pytest.mark.parametrize("written", ["half", "fp16", "float16", "torch.float16", torch.float16])
def test_dtypes_are_taken_as_others_write_them(written: object) -> None:
    config = EngineConfig(model="tiny", dtype=written, kv_cache_dtype=written)  # type: ignore[arg-type]
    assert (config.dtype, config.kv_cache_dtype) == ("float16", "float16")


@pytest.mark.parametrize(("theirs", "ours"), ATTENTION_NAMES.items())
def test_backends_are_taken_as_others_write_them(theirs: str, ours: str) -> None:
    config = EngineConfig(model="tiny", attention_backend=theirs, decode_attention_backend="own")
    assert (config.attention_backend, config.decode_attention_backend) == (ours, "own")


@pytest.mark.parametrize("written", ["fp8", "Half", "torch.int8", 16, ["half"]])
def test_other_dtypes_are_refused(written: object) -> None:
    with pytest.raises(ConfigError, match=r"^dtype is .*Allowed: auto, float32, bfloat16, float16"):
        EngineConfig(model="tiny", dtype=written)  # type: ignore[arg-type]
