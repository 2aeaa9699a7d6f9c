"""Weights through the front door: what loads equals transformers, what does not is told at once."""

import json
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loader_models import (
    EMBEDDING,
    HEAD,
    PROMPT,
    change_tensors,
    difference,
    open_llm,
    tensors_of,
    their_model,
    write_checkpoint,
)
from loader_shapes import make_model

from headrace import LLM
from headrace.base.errors import CapacityError, CheckpointError, HeadraceError, UnsupportedError
from headrace.checkpoint import open_checkpoint
from headrace.layers.weights import weight_slots
from headrace.loader import weights as loader
from headrace.loader.weights import load_weights
from headrace.request.sampling_params import SamplingParams
from headrace.runner import assembly

TOLERANCE = 2e-4
DOWN = "model.layers.1.mlp.down_proj.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("good") / "model")


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return shutil.copytree(good, tmp_path / "model")


def loads_as_in_transformers(folder: Path) -> None:
    with open_llm(folder) as llm:
        assert difference(llm, their_model(folder)) <= TOLERANCE


# ---- what loads


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (6, 3), (5, 1), (4, 4)])
def test_grouped_heads(tmp_path: Path, heads: int, kv_heads: int) -> None:
    """q, k and v are cut by their own sizes."""
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    loads_as_in_transformers(write_checkpoint(tmp_path, hidden_size=60, head_dim=16, **sizes))


@pytest.mark.parametrize(
    "biases", [{"attention_bias": True, "mlp_bias": True}, {"mlp_bias": True}], ids=str
)
def test_biases(tmp_path: Path, biases: dict[str, bool]) -> None:
    """Every bias is loaded and used."""
    folder = write_checkpoint(tmp_path, **biases)
    stored = tensors_of(folder)
    for name in [name for name in stored if name.endswith(".bias")]:
        assert stored[name].abs().max() > 0.1
    loads_as_in_transformers(folder)


@pytest.mark.parametrize("key", ["v_head_dim", "head_dim"])
def test_a_size_of_0_means_unset(folder: Path, key: str) -> None:
    """It is no width."""
    config = json.loads((folder / "config.json").read_text())
    expected = their_model(folder)
    (folder / "config.json").write_text(json.dumps(config | {key: 0}))
    with open_llm(folder) as llm:
        assert difference(llm, expected) <= TOLERANCE


def test_a_tied_model_whose_file_stores_the_head_too(tmp_path: Path) -> None:
    """The same table twice; the second is not missed and not left over."""
    folder = write_checkpoint(tmp_path, tie_word_embeddings=True)
    assert HEAD not in tensors_of(folder)
    change_tensors(folder, {HEAD: tensors_of(folder)[EMBEDDING].clone()})
    loads_as_in_transformers(folder)


def test_a_tied_model_whose_file_stores_another_head(tmp_path: Path) -> None:
    """The file is believed, as in transformers."""
    folder = write_checkpoint(tmp_path, tie_word_embeddings=True)
    loads_as_in_transformers(folder)
    other = tensors_of(folder)[EMBEDDING].flip(0).contiguous()
    change_tensors(folder, {HEAD: other})
    loads_as_in_transformers(folder)


def test_a_tied_model_whose_file_stores_the_table_as_the_head(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, tie_word_embeddings=True)
    change_tensors(folder, {HEAD: tensors_of(folder)[EMBEDDING].clone(), EMBEDDING: None})
    loads_as_in_transformers(folder)


def test_rotary_tables_of_old_files_are_ignored(folder: Path) -> None:
    change_tensors(folder, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    loads_as_in_transformers(folder)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_half_precision_files(folder: Path, stored: torch.dtype) -> None:
    change_tensors(folder, {name: t.to(stored) for name, t in tensors_of(folder).items()})
    loads_as_in_transformers(folder)


def test_shards(good: Path, tmp_path: Path) -> None:
    loads_as_in_transformers(write_shards(good, tmp_path))


def test_every_parameter_is_filled_from_its_own_tensor(good: Path) -> None:
    model = make_model({})
    slots = weight_slots(model)
    for slot in slots.values():
        slot.destination.fill_(float("nan"))
    load_weights(model, open_checkpoint(good))
    for name, stored in tensors_of(good).items():
        assert torch.equal(slots.pop(name).destination, stored), name
    assert not slots


def test_tensors_are_read_once_in_the_order_of_the_files(good: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_shards(good, tmp_path))
    read, names = checkpoint.read, []

    def record(name: str, **options: Any) -> torch.Tensor:
        names.append(name)
        return read(name, **options)

    checkpoint.read = record  # type: ignore[method-assign]
    load_weights(make_model({}), checkpoint)
    assert names == list(checkpoint.tensors)
    files = [checkpoint.tensors[name].file.name for name in names]
    assert files == sorted(files)


@pytest.mark.parametrize("progress", [True, False])
def test_a_bar_of_bytes(good: Path, capsys: pytest.CaptureFixture[str], progress: bool) -> None:
    with LLM(str(good), device="cpu", max_model_len=64, show_progress=progress):
        shown = capsys.readouterr().err
    assert ("Loading weights: 100%" in shown) == progress


# ---- what does not load


def write_shards(good: Path, folder: Path) -> Path:
    """The checkpoint in two files."""
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    shutil.copy(good / "config.json", folder)
    tensors, placed = tensors_of(good), {}
    for shard in (0, 1):
        file = f"model-{shard + 1:05}-of-00002.safetensors"
        part = dict(list(tensors.items())[shard::2])
        save_file(part, folder / file)
        placed |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": placed})
    )
    return folder


def lose_shard(folder: Path) -> None:
    shards = write_shards(folder, folder.parent / "shards")
    shutil.rmtree(folder)
    shards.rename(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def set_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def set_tensors(**changes: Callable[[torch.Tensor], torch.Tensor] | None) -> Any:
    """Change tensors by names with __ for a dot."""

    def change(folder: Path) -> None:
        stored = tensors_of(folder)
        for key, how in changes.items():
            name = key.replace("__", ".")
            change_tensors(folder, {name: None if how is None else how(stored[name])})

    return change


def cut(file: str, keep: float) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = (folder / file).read_bytes()
        (folder / file).write_bytes(content[: int(len(content) * keep)])

    return change


def remove(file: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).unlink()


QUERY_KEY, DOWN_KEY = QUERY.replace(".", "__"), DOWN.replace(".", "__")
SPOILED = {
    "no weights": (remove("model.safetensors"), CheckpointError, "holds no checkpoint"),
    "no config": (remove("config.json"), CheckpointError, "config.json"),
    "broken config": (cut("config.json", 0.5), CheckpointError, "config.json"),
    "lost shard": (lose_shard, CheckpointError, "model-00002-of-00002.safetensors"),
    "cut data": (cut("model.safetensors", 0.9), CheckpointError, "model.safetensors.*tensor"),
    "cut header": (cut("model.safetensors", 0.001), CheckpointError, "model.safetensors"),
    "empty file": (cut("model.safetensors", 0), CheckpointError, "model.safetensors"),
    "missing tensor": (set_tensors(**{DOWN_KEY: None}), CheckpointError, f"lacks tensor {DOWN}"),
    "names of a compiled model": (
        lambda folder: change_tensors(
            folder,
            dict.fromkeys(tensors_of(folder))
            | {f"_orig_mod.{name}": tensor for name, tensor in tensors_of(folder).items()},
        ),
        CheckpointError,
        "lacks tensors model.*in their place it holds tensors _orig_mod.*and .. more",
    ),
    "wrong shape": (
        set_tensors(**{QUERY_KEY: lambda t: t[:-1].contiguous()}),
        CheckpointError,
        rf"{QUERY} in model.safetensors has shape \[63, 64\].*\[64, 64\]",
    ),
    "transposed": (
        set_tensors(**{DOWN_KEY: lambda t: t.T.contiguous()}),
        CheckpointError,
        rf"{DOWN} in model.safetensors has shape \[96, 64\].*\[64, 96\]",
    ),
    "integers": (
        set_tensors(**{DOWN_KEY: lambda t: t.to(torch.int32)}),
        UnsupportedError,
        f"{DOWN} in model.safetensors is stored as I32",
    ),
    "eight bytes": (
        set_tensors(**{DOWN_KEY: lambda t: t.double()}),
        UnsupportedError,
        f"{DOWN} in model.safetensors is stored as F64",
    ),
    "fewer layers": (
        set_config(num_hidden_layers=1),
        CheckpointError,
        "model.safetensors holds tensors model.layers.1.*no place",
    ),
    "more layers": (
        set_config(num_hidden_layers=3),
        CheckpointError,
        "lacks tensors model.layers.2.*and 4 more",
    ),
    "another vocabulary": (
        set_config(vocab_size=280),
        CheckpointError,
        r"has shape \[272, 64\].*\[280, 64\]",
    ),
    "unknown architecture": (
        set_config(architectures=["MambaForCausalLM"]),
        UnsupportedError,
        "MambaForCausalLM",
    ),
    "packed": (
        set_config(quantization_config={"quant_method": "awq"}),
        UnsupportedError,
        "awq",
    ),
}


@pytest.mark.parametrize("case", SPOILED)
def test_spoiled_checkpoints(folder: Path, good: Path, case: str) -> None:
    """One of our errors, of one line, naming file and tensor; the next model loads."""
    spoil, kind, message = SPOILED[case]
    spoil(folder)
    with pytest.raises(kind, match=message) as caught:
        open_llm(folder)
    assert "\n" not in str(caught.value)
    still_serves(good)


def still_serves(good: Path) -> None:
    with open_llm(good) as llm:
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        assert len(llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids) == 2


def test_a_bias_the_config_knows_nothing_of(folder: Path) -> None:
    """An unused tensor is an error."""
    name = "model.layers.0.self_attn.q_proj.bias"
    change_tensors(folder, {name: torch.ones(64)})
    with pytest.raises(CheckpointError, match=rf"model\.safetensors holds tensor {name}"):
        open_llm(folder)


def test_all_is_checked_before_anything_is_read(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)

    def read(name: str, **options: object) -> torch.Tensor:
        raise AssertionError(f"{name} was read")

    checkpoint.read = read  # type: ignore[method-assign]
    wrong = make_model({"intermediate_size": 128})
    with pytest.raises(CheckpointError, match="has shape"):
        load_weights(wrong, checkpoint)


# ---- numbers that overflow


def test_weights_too_large_for_float16(folder: Path) -> None:
    """Told at the start, for nothing but errors could follow."""
    change_tensors(folder, {DOWN: tensors_of(folder)[DOWN] * 1e6})
    with pytest.raises(CheckpointError, match=f"{DOWN} in model.safetensors.*float16.*bfloat16"):
        open_llm(folder, dtype="float16")
    with open_llm(folder, dtype="bfloat16") as llm:
        assert llm.generate(PROMPT, SamplingParams(max_tokens=1), use_tqdm=False)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("weight", [float("nan"), float("inf"), 3e38])
def test_logits_that_are_no_numbers(folder: Path, weight: float, temperature: float) -> None:
    """The request ends with an error and not with token 0 again and again."""
    change_tensors(folder, {"model.norm.weight": torch.full((64,), weight)})
    params = SamplingParams(temperature=temperature, max_tokens=8, ignore_eos=True)
    with open_llm(folder) as llm:
        outputs = llm.generate([PROMPT, PROMPT[:3]], params, use_tqdm=False)
        for output in outputs:
            assert output.outputs[0].finish_reason == "error"
            assert output.outputs[0].token_ids == []
        assert llm.stats()["running"] == 0


def test_one_sequence_with_overflow_spares_the_others(folder: Path) -> None:
    """A poisoned row of the embedding: who holds that token fails, alone."""
    table = tensors_of(folder)[EMBEDDING].clone()
    table[PROMPT[4]] = float("nan")
    change_tensors(folder, {EMBEDDING: table})
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with open_llm(folder) as llm:
        alone = llm.generate(PROMPT[:4], params, use_tqdm=False)[0].outputs[0]
        bad, good = llm.generate([PROMPT, PROMPT[:4]], params, use_tqdm=False)
    assert bad.outputs[0].finish_reason == "error"
    assert good.outputs[0].finish_reason == "length"
    assert good.outputs[0].token_ids == alone.token_ids


# ---- room


def test_too_little_memory_is_told_before_reading(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "free_bytes", lambda device: 1000)
    with pytest.raises(CapacityError, match=r"weights need [\d,]+ bytes.*1,000 free"):
        open_llm(good)
    monkeypatch.undo()
    still_serves(good)


def test_the_bytes_needed_are_those_of_the_model(good: Path) -> None:
    needed = sum(tensor.numel() * 4 for tensor in tensors_of(good).values())
    loader.check_room(needed, "cpu", needed)
    loader.check_room(needed, "cpu", None)
    with pytest.raises(CapacityError):
        loader.check_room(needed, "cpu", needed - 1)


def test_errors_are_ours_all_the_way(folder: Path) -> None:
    """The last frame of what is raised lies in this package."""
    cut("model.safetensors", 0.9)(folder)
    with pytest.raises(HeadraceError) as caught:
        open_llm(folder)
    assert "/headrace/" in traceback.extract_tb(caught.value.__traceback__)[-1].filename
