"""The plan's word about the KV canary, its refusals and its bytes."""

from dataclasses import replace

import pytest
from plan_cases import CPU, GEMMA3, H100, LLAMA, persona, plan

from headrace.base.errors import ConfigError
from headrace.runner.memory_sizes import canary_bytes_per_token
from headrace.runner.memory_table import memory_table


def test_off_unless_asked() -> None:
    made = plan(persona(LLAMA), H100)
    assert (made.kv_canary.value, made.kv_canary.asked) == ("off", False)
    assert made.kv_canary_real_data.value == "off"
    assert made.kv_canary_sweep_interval.value == 0
    asked = plan(persona(LLAMA), H100, kv_canary="raise", kv_canary_sweep_interval=100)
    assert (asked.kv_canary.value, asked.kv_canary.asked) == ("raise", True)
    assert "end with an error" in asked.kv_canary.reason
    assert asked.kv_canary_real_data.value == "partial"
    assert asked.kv_canary_sweep_interval.value == 100


@pytest.mark.parametrize(
    ("asked", "hardware", "reason"),
    [
        ({"kv_canary_real_data": "all"}, CPU, "and kv_canary is off"),
        ({"kv_canary_sweep_interval": 5}, CPU, "and kv_canary is off"),
        (
            {"kv_canary": "log", "attention_backend": "torch_native"},
            replace(H100, packages=frozenset()),
            r"need triton \(pip install 'headrace\[cuda\]'",
        ),
    ],
)
def test_what_cannot_be_is_refused(asked, hardware, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        plan(persona(LLAMA), hardware, **asked)


def test_its_records_take_tokens_from_the_pool() -> None:
    for model, groups in ((LLAMA, 1), (GEMMA3, 2)):
        traits = persona(model).traits
        tables = {}
        for real_data, parts in (("off", 2), ("partial", 3), ("all", 3)):
            made = plan(persona(model), H100, kv_canary="log", kv_canary_real_data=real_data)
            assert canary_bytes_per_token(traits, made) == groups * parts * 8
            tables[real_data] = memory_table(persona(model), H100, made)
            assert "kv canary" in str(tables[real_data])
        plain = memory_table(persona(model), H100, plan(persona(model), H100))
        assert "kv canary" not in str(plain)
        assert plain.tokens > tables["off"].tokens > tables["all"].tokens
        assert plain.kv_bytes_per_token == tables["all"].kv_bytes_per_token
        (canary,) = (line.bytes for line in tables["all"].lines if line.name == "kv canary")
        (pool,) = (line.bytes for line in tables["all"].lines if line.name == "kv")
        assert canary * plain.kv_bytes_per_token == pool * groups * 24
