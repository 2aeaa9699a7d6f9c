"""Floors against numbers computed by hand, and against the measured tables' own floors."""

import json
from dataclasses import replace

import pytest
import torch

from headrace.bench.ceilings import Ceilings, measure_ceilings
from headrace.bench.floor import StepFloor, decode_floor, prefill_floor
from headrace.bench.shapes import shape_names, shape_path, shown_name
from headrace.config.persona import ModelTraits
from headrace.models.registry import read_model_traits

BF16 = {"dtype": "bfloat16", "kv_dtype": "bfloat16"}
H200 = Ceilings(bandwidth=4.2e12, matrix_rate=785e12, dtype="bfloat16", how="measured")


def traits_of(name: str) -> ModelTraits:
    folder = shape_path(name)
    assert folder is not None
    return read_model_traits(json.loads((folder / "config.json").read_text()))


def test_bytes_of_a_decode_step_of_qwen3_8b() -> None:
    traits = traits_of("qwen3-8b")
    # per layer: q 4096 x 4096, k and v 4096 x 1024, o 4096 x 4096, three of 4096 x 12288
    layer = 4096 * (4096 + 2 * 1024 + 4096 + 3 * 12288)
    head = 151_936 * 4096
    weights = decode_floor(traits, batch=1, context=0, **BF16)
    assert weights.bytes == 2 * (36 * layer + head)
    assert weights.bytes == pytest.approx(15.1e9, rel=0.005)
    one = decode_floor(traits, batch=1, context=1, **BF16)
    assert one.bytes - weights.bytes == 147_456
    many = decode_floor(traits, batch=3, context=10.5, **BF16)
    assert many.bytes - weights.bytes == pytest.approx(3 * 10.5 * 147_456)
    # every weight is one multiply and one add for each row; a query meets each key and value
    attention = 36 * 2 * 10.5 * 32 * (128 + 128)
    assert many.operations == pytest.approx(3 * (2 * (36 * layer + head) + attention))


@pytest.mark.parametrize(
    ("name", "batch", "milliseconds"),
    [
        ("qwen3-8b", 1, 3.64),
        ("qwen3-8b", 8, 3.90),
        ("qwen3-8b", 32, 4.79),
        ("qwen3-8b", 64, 5.98),
        ("qwen3-8b", 128, 8.35),
        ("qwen3-8b", 256, 14.4),  # the products have turned from bytes to arithmetic
        ("qwen3-0.6b", 1, 0.31),
        ("qwen3-0.6b", 32, 1.21),
        ("qwen3-0.6b", 256, 7.77),
    ],
)
def test_milliseconds_of_a_decode_step(name: str, batch: int, milliseconds: float) -> None:
    floor = decode_floor(traits_of(name), batch=batch, context=1056, **BF16)
    assert floor.seconds(H200) * 1e3 == pytest.approx(milliseconds, rel=0.015)


def test_products_turn_to_arithmetic_operator_by_operator() -> None:
    traits = traits_of("qwen3-8b")
    names = {each.name: each for each in decode_floor(traits, batch=1, context=0, **BF16).operators}
    assert set(names) == {"qkv", "o", "gate up", "down", "head", "attention"}
    down = names["down"]
    assert down.seconds(H200) == pytest.approx(36 * 2 * 4096 * 12_288 / 4.2e12)
    busy = replace(down, operations=down.bytes * 1000)
    assert busy.seconds(H200) == pytest.approx(36 * 2 * 4096 * 12_288 * 1000 / 785e12)


def test_a_prefill_is_arithmetic_and_reads_the_head_once() -> None:
    traits = traits_of("qwen3-8b")
    floor = prefill_floor(traits, prompts=1, length=1024, **BF16)
    layer = 4096 * (4096 + 2 * 1024 + 4096 + 3 * 12_288)
    pairs = 1024 * 1025 / 2  # causal
    products, attention = 2 * 1024 * 36 * layer, 36 * 2 * pairs * 32 * 256
    head = 2 * 151_936 * 4096
    assert floor.operations == pytest.approx(products + attention + head)
    seconds = (products + attention) / 785e12 + head / 4.2e12
    assert floor.seconds(H200) == pytest.approx(seconds, rel=1e-6)
    # "about 18.8 s" of prefill for 1000 prompts
    assert 1000 * floor.seconds(H200) == pytest.approx(18.8, rel=0.02)


def test_a_window_bounds_what_is_read() -> None:
    full = traits_of("qwen3-0.6b")
    layers = tuple(
        replace(layer, window=100, kv_group="window") if index % 2 else layer
        for index, layer in enumerate(full.layers)
    )
    mixed = replace(full, layers=layers)
    per_token_layer = 2 * 8 * 128 * 2

    def kv(traits: ModelTraits, context: int) -> float:
        step = decode_floor(traits, batch=2, context=context, **BF16)
        return step.bytes - decode_floor(traits, batch=2, context=0, **BF16).bytes

    assert kv(mixed, 80) == kv(full, 80)
    assert kv(mixed, 500) == 2 * 14 * (500 + 100) * per_token_layer
    operations = [
        prefill_floor(traits, prompts=1, length=300, **BF16).operations for traits in (full, mixed)
    ]
    saved = 300 * 301 / 2 - (100 * 101 / 2 + 200 * 100)
    assert operations[0] - operations[1] == pytest.approx(14 * 2 * saved * 16 * 256)


def test_experts_are_read_as_often_as_tokens_choose_them() -> None:
    traits = traits_of("qwen3-30b-a3b")
    expert, router = 3 * 2048 * 768, 128 * 2048
    attention = 2048 * (2 * 32 * 128 + 2 * 4 * 128)
    rest = 48 * (2 * attention + 4 * router) + 2 * 151_936 * 2048  # routers are float32

    def experts_read(step: StepFloor) -> float:
        return (step.bytes - rest) / (48 * 2 * expert)

    step = decode_floor(traits, batch=1, context=0, **BF16)
    assert experts_read(step) == pytest.approx(8)
    # of 128 experts 120 are left out by each of two tokens
    both = decode_floor(traits, batch=2, context=0, **BF16)
    assert experts_read(both) == pytest.approx(128 * (1 - (120 / 128) ** 2))
    assert experts_read(decode_floor(traits, batch=4096, context=0, **BF16)) == pytest.approx(128)
    one = 2 * (48 * (attention + router + 8 * expert) + 151_936 * 2048)
    assert (step.operations, both.operations) == (one, 2 * one)
    mixed = replace(
        traits,
        layers=(*(replace(layer, is_moe=False) for layer in traits.layers[:8]), *traits.layers[8:]),
    )
    assert decode_floor(mixed, batch=1, context=0, **BF16).bytes - step.bytes == pytest.approx(
        8 * (2 * (3 * 2048 * 6144 - 8 * expert) - 4 * router)
    )


def test_ceilings_of_this_cpu() -> None:
    found = measure_ceilings(torch.device("cpu"), torch.float32, side=128, read_bytes=1 << 22)
    assert 1e8 < found.bandwidth < 1e13
    assert 1e8 < found.matrix_rate < 1e14
    assert (found.dtype, found.how) == ("float32", "memory read, 128^3 product")
    assert "float32 (memory read, 128^3 product)" in str(found)


def test_shapes_are_named_and_an_existing_path_comes_first(tmp_path, monkeypatch) -> None:
    assert shape_names() == ["llama-3.1-8b", "qwen3-0.6b", "qwen3-30b-a3b", "qwen3-8b"]
    folder = shape_path("qwen3-8b")
    assert folder is not None
    assert shown_name(str(folder)) == "qwen3-8b"
    assert shown_name("elsewhere/qwen3-8b") == "elsewhere/qwen3-8b"
    assert shape_path("qwen4") is None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3-8b").mkdir()
    assert shape_path("qwen3-8b") is None
