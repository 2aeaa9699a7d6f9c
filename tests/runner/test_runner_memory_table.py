"""Where memory goes: exact for weights and KV, honest about shortage."""

import dataclasses

import pytest
import torch
from plan_cases import CPU, FAMILIES, GEMMA3, H100, LLAMA, persona, plan

from headrace.config.hardware import GIB
from headrace.memory.arena import Arena
from headrace.memory.kv_pool import MHATokenToKVPool
from headrace.models.registry import build_model
from headrace.runner.memory_sizes import (
    fixed_bytes,
    kv_bytes_per_token,
    kv_token_cap,
    weight_bytes,
    window_pool_saving,
)
from headrace.runner.memory_table import memory_table


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((name, {}) for name in FAMILIES),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("gemma3", {"attention_bias": True}),
    ],
)
def test_weights_are_counted_exactly(family: str, changes: dict[str, object], dtype: str) -> None:
    model = persona(FAMILIES[family], **changes)
    ropes = plan(model).ropes.value
    built = build_model(model.traits, ropes, getattr(torch, dtype), "cpu")
    held = sum(parameter.nbytes for parameter in built.parameters())
    assert sum(weight_bytes(model.traits, dtype).values()) == held


@pytest.mark.parametrize("family", FAMILIES)
def test_kv_of_a_token_is_what_the_pool_takes(family: str) -> None:
    traits = persona(FAMILIES[family]).traits
    attention = traits.attention
    pool = MHATokenToKVPool(
        Arena(torch.device("cpu")),
        num_layers=traits.num_layers,
        num_pages=3,
        page_size=4,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        v_head_dim=attention.v_head_dim,
        dtype=torch.bfloat16,
    )
    assert 3 * 4 * kv_bytes_per_token(traits, "bfloat16") == pool.keys.nbytes + pool.values.nbytes


def test_saving_of_a_window_pool() -> None:
    gemma = persona(GEMMA3).traits
    assert window_pool_saving(gemma, "float32", 512) == 0
    assert window_pool_saving(gemma, "float32", 513) == 5 * 2 * 32 * 4
    assert window_pool_saving(persona(LLAMA).traits, "float32", 9999) == 0


def test_the_lines_add_up_and_the_tokens_fit() -> None:
    model, settled = persona(), plan(hardware=H100)
    table = memory_table(model, H100, settled)
    line = {entry.name: entry.bytes for entry in table.lines}
    fixed = fixed_bytes(model.traits, settled)
    spent = sum(fixed.values()) + line["kv"]
    assert line["may be spent"] == spent + line["left"]
    assert spent + table.weight_bytes < H100.memory_bytes * settled.mem_fraction.value
    assert table.tokens * table.kv_bytes_per_token <= line["kv"]
    assert line["left"] < table.kv_bytes_per_token * settled.page_size.value
    assert not table.shortage


def test_every_reserve_grows_with_what_it_is_for() -> None:
    traits = persona().traits
    small = fixed_bytes(traits, plan(max_running_requests=2, chunked_prefill_size=8))
    large = fixed_bytes(traits, plan(max_running_requests=20, chunked_prefill_size=80))
    assert set(small) == {"rows", "page tables", "activations", "logits"}
    assert all(large[name] > small[name] for name in small)


def test_activations_are_those_of_the_largest_step() -> None:
    """A step may hold a whole chunk of prompts and a token of every row that decodes."""
    traits = persona().traits
    few = fixed_bytes(traits, plan(max_running_requests=1, chunked_prefill_size=64))
    many = fixed_bytes(traits, plan(max_running_requests=33, chunked_prefill_size=64))
    assert many["activations"] * 65 == few["activations"] * 97


def test_pool_is_capped_by_what_was_asked_or_can_be_used() -> None:
    assert kv_token_cap(plan(max_total_tokens=100, max_model_len=50)) == 100
    assert kv_token_cap(plan(max_running_requests=2, max_model_len=50, page_size=16)) == 128
    assert kv_token_cap(plan(max_running_requests=3, max_model_len=48, page_size=16)) == 144
    assert kv_token_cap(plan(hardware=H100)) is None
    table = memory_table(persona(), CPU, plan(max_total_tokens=100, max_model_len=50, page_size=16))
    assert table.tokens == 112


def test_a_machine_too_small_is_a_shortage_in_the_table() -> None:
    tiny = dataclasses.replace(H100, memory_bytes=GIB // 2)
    table = memory_table(persona(), tiny, plan(hardware=tiny))
    assert table.tokens == 0
    assert "No room for KV" in table.shortage
    assert "does not fit" in str(table)


def test_more_tokens_than_fit_are_a_shortage_where_they_were_asked() -> None:
    free = memory_table(persona(), H100, plan(hardware=H100)).tokens
    fits = plan(hardware=H100, max_total_tokens=free)
    assert memory_table(persona(), H100, fits).tokens == free
    over = memory_table(persona(), H100, plan(hardware=H100, max_total_tokens=free + 1))
    assert over.tokens == 0
    assert f"max_total_tokens {free + 1:,} was asked and {free:,} tokens fit" in over.shortage


def test_text_names_parts_and_tokens() -> None:
    table = memory_table(persona(), H100, plan(hardware=H100))
    text = str(table)
    for word in ("weights", "embedding", "rows", "activations", "logits", "kv"):
        assert word in text
    assert f"{table.tokens:,} tokens fit" in text
