"""Hugging Face folders: one file, shards, and every way they can be broken."""

import json

import pytest
import torch
from checkpoint_builders import random_weights, write_folder, write_json
from safetensors.torch import save_file

from headrace.base.errors import CheckpointError, UnsupportedError
from headrace.checkpoint import open_checkpoint
from headrace.checkpoint.safetensors_checkpoint import INDEX_NAME, SINGLE_NAME

INDEX = "model.safetensors.index.json"
SECOND = "model-00002-of-00002.safetensors"
NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_tensor_is_read_as_stored(tmp_path, shards, dtype):
    weights = {name: weight.to(dtype) for name, weight in random_weights().items()}
    checkpoint = open_checkpoint(write_folder(tmp_path, weights, shards=shards))
    assert set(checkpoint.tensors) == set(weights)
    for name, expected in weights.items():
        tensor = checkpoint.read(name)
        assert tensor.dtype == dtype
        assert torch.equal(tensor, expected)
        entry = checkpoint.tensors[name]
        assert entry.shape == tuple(expected.shape)
        assert entry.nbytes == expected.numel() * expected.element_size()
        assert entry.file.parent == tmp_path
    assert entry.dtype == {torch.float32: "F32", torch.bfloat16: "BF16"}.get(dtype, "F16")
    assert checkpoint.config["hidden_size"] == 64


def test_reading_does_not_touch_the_file(tmp_path):
    checkpoint = open_checkpoint(write_folder(tmp_path, random_weights()))
    before = (tmp_path / "model.safetensors").read_bytes()
    checkpoint.read(NAME).zero_()
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_unknown_name(tmp_path):
    with pytest.raises(KeyError):
        open_checkpoint(write_folder(tmp_path, random_weights())).read("nothing")


def test_one_file_of_another_name(tmp_path):
    write_folder(tmp_path, random_weights())
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    assert NAME in open_checkpoint(tmp_path).tensors


def test_several_files_without_index(tmp_path):
    write_folder(tmp_path, random_weights(), shards=2)
    (tmp_path / INDEX).unlink()
    with pytest.raises(
        CheckpointError, match=r"2 .safetensors files and no model.safetensors.index"
    ):
        open_checkpoint(tmp_path)


def test_missing_shard_is_named(tmp_path):
    write_folder(tmp_path, random_weights(), shards=2)
    (tmp_path / SECOND).unlink()
    with pytest.raises(CheckpointError, match=f"lacks {SECOND}"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=f"lacks {SECOND}"):  # half a checkpoint is no plan
        open_checkpoint(tmp_path, weights=False)


def test_index_names_a_tensor_its_file_lacks(tmp_path):
    write_folder(tmp_path, random_weights(), shards=2)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["ghost.weight"] = SECOND
    write_json(tmp_path / INDEX, index)
    with pytest.raises(CheckpointError, match=f"{SECOND} lacks the tensor ghost.weight"):
        open_checkpoint(tmp_path)


def test_index_places_a_tensor_in_the_wrong_file(tmp_path):
    write_folder(tmp_path, random_weights(), shards=2)
    index = json.loads((tmp_path / INDEX).read_text())
    name = next(name for name, file in index["weight_map"].items() if file != SECOND)
    index["weight_map"][name] = SECOND
    write_json(tmp_path / INDEX, index)
    with pytest.raises(CheckpointError, match=f"{SECOND} lacks the tensor {name}"):
        open_checkpoint(tmp_path)


def test_a_tensor_in_two_shards(tmp_path):
    weights = random_weights()
    write_folder(tmp_path, weights, shards=2)
    first = next(iter(weights))
    save_file({first: weights[first], "b": torch.ones(2)}, tmp_path / SECOND)
    with pytest.raises(CheckpointError, match=f"tensor {first} twice.*00001.*00002"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [{}, {"weight_map": {}}, {"weight_map": None}])
def test_index_without_map(tmp_path, content):
    write_folder(tmp_path, random_weights(), shards=2)
    write_json(tmp_path / INDEX, content)
    with pytest.raises(CheckpointError, match=r"index.json has no weight_map"):
        open_checkpoint(tmp_path)


def test_one_whole_file_goes_before_the_index_of_an_older_save(tmp_path):
    write_folder(tmp_path, random_weights(), shards=2)
    weights = {name: tensor + 1.0 for name, tensor in random_weights().items()}
    write_folder(tmp_path, weights)
    for change in (lambda: None, (tmp_path / SECOND).unlink):
        change()
        checkpoint = open_checkpoint(tmp_path)
        assert checkpoint.tensors.keys() == weights.keys()
        assert torch.equal(checkpoint.read(NAME), weights[NAME])


def test_names_of_a_model_saved_without_its_head(tmp_path):
    """As those of Qwen3-Embedding: transformers' AutoModel leaves out `model.`"""
    weights = random_weights()
    bare = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    for shards in (2, 1):
        checkpoint = open_checkpoint(write_folder(tmp_path, bare, shards=shards))
        assert checkpoint.tensors.keys() == weights.keys()
        for name, tensor in weights.items():
            assert checkpoint.tensors[name].name == name
            assert torch.equal(checkpoint.read(name), tensor)


def test_what_macos_puts_beside_a_file_is_none(tmp_path):
    write_folder(tmp_path, random_weights())
    (tmp_path / SINGLE_NAME).rename(tmp_path / "weights.safetensors")
    (tmp_path / "._weights.safetensors").write_bytes(b"\0\5\x16\7")
    assert NAME in open_checkpoint(tmp_path).tensors


def test_truncated_data_names_file_and_tensor(tmp_path):
    write_folder(tmp_path, random_weights())
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors is truncated or broken: tensor model\."
    ):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("size", [0, 5, 8, 200])
def test_truncated_header(tmp_path, size):
    write_folder(tmp_path, random_weights())
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        open_checkpoint(tmp_path)


def with_header(tmp_path, header: bytes, data: bytes = bytes(64)):
    write_folder(tmp_path, random_weights())
    content = len(header).to_bytes(8, "little") + header + data
    (tmp_path / "model.safetensors").write_bytes(content)
    return tmp_path


def entry(**changes):
    plain = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    return json.dumps({"__metadata__": {"format": "pt"}, "x": plain | changes}).encode()


def test_the_handmade_header_is_sound(tmp_path):
    assert open_checkpoint(with_header(tmp_path, entry())).tensors["x"].shape == (4,)


@pytest.mark.parametrize(
    ("header", "error", "message"),
    [
        (b"{not json", CheckpointError, "unreadable header"),
        (b"[1]", CheckpointError, "unreadable header"),
        (b'{"x": {"dtype": "F32"}}', CheckpointError, "unreadable header"),
        (entry(shape=[5]), CheckpointError, "tensor x takes 16 bytes.*needs 20"),
        (entry(data_offsets=[1000, 1016]), CheckpointError, "tensor x takes bytes 1000 to 1016"),
        (entry(dtype="F8_E4M3", data_offsets=[0, 4]), UnsupportedError, "type F8_E4M3.*bfloat16"),
    ],
)
def test_broken_header(tmp_path, header, error, message):
    with pytest.raises(error, match=message) as caught:
        open_checkpoint(with_header(tmp_path, header))
    assert "model.safetensors" in str(caught.value)


def test_file_changed_after_opening(tmp_path):
    checkpoint = open_checkpoint(write_folder(tmp_path, random_weights()))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(CheckpointError, match=rf"tensor {NAME} cannot be read"):
        checkpoint.read(NAME)


def test_negative_offsets_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="tensor x takes bytes -16"):
        open_checkpoint(with_header(tmp_path, entry(data_offsets=[-16, 0])))


def test_a_folder_without_weights_can_be_planned(tmp_path):
    write_folder(tmp_path, random_weights())
    (tmp_path / "model.safetensors").unlink()
    checkpoint = open_checkpoint(tmp_path, weights=False)
    assert checkpoint.config["model_type"] == "llama"
    assert not checkpoint.tensors
    with pytest.raises(CheckpointError, match=r"holds no checkpoint.*load_format dummy"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds no checkpoint.*Name the folder"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("placed", [3, ["x"], {"a": 3}, {"a": None}, {"a": ["x.safetensors"]}])
def test_a_weight_map_of_another_type(tmp_path, placed):
    folder = write_folder(tmp_path / "model", random_weights(), shards=2)
    write_json(folder / INDEX_NAME, {"weight_map": placed})
    with pytest.raises(CheckpointError, match=r"index\.json is not the JSON.*weight_map"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/../../x", "..\\x", "", "n" * 5000]
)
def test_a_weight_map_that_leaves_the_folder(tmp_path, name):
    folder = write_folder(tmp_path / "model", random_weights(), shards=2)
    (tmp_path / "x.safetensors").write_bytes((folder / SECOND).read_bytes())
    write_json(folder / INDEX_NAME, {"weight_map": {"model.norm.weight": name}})
    with pytest.raises(CheckpointError, match=r"weight_map names.*in the same folder") as caught:
        open_checkpoint(folder)
    assert len(str(caught.value)) < 1000
