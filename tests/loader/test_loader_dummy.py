"""Dummy weights: the numbers they are, their scale, the same bits whatever the slices."""

import hashlib
import struct

import pytest
import torch
from loader_shapes import make_model
from torch import Tensor

from headrace.layers.weights import weight_slots
from headrace.loader import dummy
from headrace.loader.dummy import fill_dummy

EMBEDDING = "model.embed_tokens.weight"


def weights(seed: int = 5, *, device: str = "cpu", slices: int | None = None, **config: object):
    model = make_model(config, device=device)
    for slot in weight_slots(model).values():
        slot.destination.fill_(float("nan"))
    fill_dummy(model, seed, slice_elements=slices)
    return {name: slot.destination for name, slot in weight_slots(model).items()}


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    assert first.keys() == second.keys()
    return all(torch.equal(first[name].cpu(), second[name].cpu()) for name in first)


def weight_at(seed: int, name: str, place: int, deviation: float) -> float:
    """The definition, in Python integers and float32."""
    block, lane = divmod(place, dummy.BLOCK)
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=4).digest()
    word = ((lane ^ lane >> 16) * 0x7FEB352D) & 0xFFFFFFFF
    word ^= int.from_bytes(digest, "little")
    word = ((word ^ word >> 15) * 0x846CA68B) & 0xFFFFFFFF
    number = torch.tensor(struct.unpack("<i", struct.pack("<I", word))[0], dtype=torch.float32)
    return (number * torch.tensor(3.0**0.5 / 2**31 * deviation, dtype=torch.float32)).item()


def test_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are shortened, so that a small tensor has several of them."""
    monkeypatch.setattr(dummy, "BLOCK", 1000)
    table = weights()[EMBEDDING]  # [272, 64]
    flat = table.reshape(-1)
    for place in (0, 1, 17, 999, 1000, 1001, 5432, len(flat) - 1):
        assert flat[place].item() == weight_at(5, EMBEDDING, place, 64**-0.5), place


@pytest.mark.parametrize("slices", [1000, 4096, 5000, 1 << 22])
def test_the_slices_do_not_change_a_bit(slices: int) -> None:
    assert equal(weights(slices=slices), weights())


def test_a_seed_and_a_name_of_its_own() -> None:
    first, other = weights(seed=1), weights(seed=2)
    assert equal(first, weights(seed=1))
    matrices = [name for name in first if first[name].dim() == 2]
    assert all((first[name] != other[name]).float().mean() > 0.99 for name in matrices)
    gate, up = (first[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up"))
    assert abs(torch.corrcoef(torch.stack((gate.flatten(), up.flatten())))[0, 1]) < 0.05


def test_matrices_look_random() -> None:
    """Scale, mean, and singular values as far apart as those of independent numbers."""
    for name, weight in weights().items():
        if weight.dim() != 2:
            continue
        rows, columns = weight.shape
        unit = weight.double() * columns**0.5
        assert abs(unit.mean()) < 5 / unit.numel() ** 0.5, name
        assert abs(unit.std() - 1) < 0.02, name
        values = torch.linalg.svdvals(unit)
        edges = [abs(rows**0.5 + sign * columns**0.5) for sign in (-1, 1)]  # Marchenko-Pastur
        assert values[0] < edges[1] * 1.05, name
        assert values[-1] > edges[0] * 0.9, name


def test_vectors_are_what_they_scale_or_add() -> None:
    filled = weights(attention_bias=True)
    for name, weight in filled.items():
        if weight.dim() == 1:
            mean = 0.0 if name.endswith(".bias") else 1.0
            assert abs(weight.mean() - mean) < 0.02, name
            assert 0.01 < weight.std() < 0.03, name
    assert any(name.endswith(".bias") for name in filled)


def test_norms_stored_as_deviations_are_around_1_as_well() -> None:
    filled = weights(architectures=["Gemma3ForCausalLM"], head_dim=16, tie_word_embeddings=True)
    assert abs(filled["model.norm.weight"].mean() - 1) < 0.02


@pytest.mark.gpu
def test_a_gpu_makes_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert equal(weights(device="cuda"), weights())
    monkeypatch.setattr(dummy, "BLOCK", 1000)
    for dtype in (torch.bfloat16, torch.float16):
        models = [make_model({}, device=device, dtype=dtype) for device in ("cpu", "cuda")]
        for model in models:
            fill_dummy(model, 3)
        first, second = (model.state_dict() for model in models)
        assert equal(first, second)
