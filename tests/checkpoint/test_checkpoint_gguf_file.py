"""The header reader against the gguf package, and every way a file can be broken."""

import struct

import gguf
import numpy as np
import pytest
from checkpoint_builders import random_weights, write_gguf

from headrace.base.errors import CheckpointError, UnsupportedError
from headrace.checkpoint.gguf_file import GgufFile

TEXT, UINT32 = 8, 4


def test_header_equals_the_gguf_reader(tmp_path):
    every_type = {
        "a.uint8": 7,
        "a.negative": [-1, 2],
        "a.floats": [0.5, -1.5],
        "a.flags": [True, False],
        "a.text": "größe 水",
        "a.empty": "",
        "a.texts": ["", "x", "水車"],
    }
    weights = random_weights()
    dtypes = {"model.embed_tokens.weight": "Q8_0", "model.layers.0.mlp.up_proj.weight": "F16"}
    path = write_gguf(tmp_path / "a.gguf", weights, dtypes=dtypes, keys=every_type)
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            value = ours.metadata[key]
            value = value.tolist() if isinstance(value, np.ndarray) else value
            assert value == field.contents(), key
    assert len(ours.metadata) == len([key for key in theirs.fields if key[:5] != "GGUF."])
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert (mine.kind.id, mine.nbytes, mine.start) == (
            tensor.tensor_type,
            tensor.n_bytes,
            tensor.data_offset,
        )
        assert np.array_equal(ours.raw(mine).reshape(-1), tensor.data.reshape(-1).view(np.uint8))


def test_other_alignment(tmp_path):
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(256)
    writer.add_tensor("x.weight", np.arange(5, dtype=np.float32))
    writer.add_tensor("y.weight", np.arange(3, dtype=np.float32) + 9)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(path)
    assert file.raw(file.tensors["y.weight"]).view(np.float32).tolist() == [[9, 10, 11]]
    assert file.tensors["y.weight"].start % 256 == 0


def test_a_file_cut_anywhere_is_refused(tmp_path):
    whole = write_gguf(tmp_path / "whole.gguf", random_weights()).read_bytes()
    cut = tmp_path / "cut.gguf"
    header = whole.index(b"tokenizer.chat_template")
    for size in [0, 3, 4, 7, 8, 20, 24, 30, *range(31, header, 97), header, len(whole) - 40]:
        cut.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            GgufFile(cut)


def test_truncated_data_names_the_tensor(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", random_weights())
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(CheckpointError, match=r"a\.gguf is truncated: tensor blk\.1\.ffn_down"):
        GgufFile(path)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape=(32,), kind=0, offset=0) -> bytes:
    sizes = struct.pack(f"<{len(shape)}Q", *shape)
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)


def handmade(tmp_path, *, magic=b"GGUF", version=3, pairs=(), tensors=(), order="<"):
    path = tmp_path / "hand.gguf"
    head = magic + struct.pack(f"{order}IQQ", version, len(tensors), len(pairs))
    path.write_bytes(head + b"".join(pairs) + b"".join(tensors) + bytes(1024))
    return path


def test_the_handmade_file_is_sound(tmp_path):
    number = pair("n", UINT32, struct.pack("<I", 5))
    file = GgufFile(handmade(tmp_path, pairs=[number], tensors=[tensor("x")]))
    assert file.metadata == {"n": 5}
    assert file.tensors["x"].nbytes == 128


@pytest.mark.parametrize(
    ("broken", "error", "message"),
    [
        ({"magic": b"GGML"}, CheckpointError, "not a GGUF file"),
        ({"version": 1}, UnsupportedError, "version 1"),
        ({"version": 3, "order": ">"}, UnsupportedError, "big-endian"),
        ({"tensors": [tensor("x"), tensor("x")]}, CheckpointError, "tensor x twice"),
        ({"tensors": [tensor("x", kind=5)]}, UnsupportedError, "type 5.*Supported: F32, F16"),
        ({"tensors": [tensor("x", shape=(40,), kind=8)]}, CheckpointError, "40 elements.*32"),
        ({"tensors": [tensor("x", shape=(1,) * 5)]}, CheckpointError, "5 dimensions"),
        ({"tensors": [tensor("x", shape=())]}, CheckpointError, "0 dimensions"),
        ({"tensors": [tensor("x", shape=(4, 0))]}, CheckpointError, "tensor x is empty"),
        ({"tensors": [tensor("x", offset=1 << 60)]}, CheckpointError, "tensor x ends at byte"),
        ({"tensors": [tensor("x", shape=(1 << 40, 1 << 40))]}, CheckpointError, "truncated"),
        ({"pairs": [pair("n", 77, b"")]}, CheckpointError, "key n has the unknown type 77"),
        ({"pairs": [pair("n", UINT32, bytes(4))] * 2}, CheckpointError, "key n twice"),
        (
            {"pairs": [pair("s", TEXT, struct.pack("<Q", 2) + b"\xff\xfe")]},
            CheckpointError,
            "not UTF-8",
        ),
        (
            {"pairs": [pair("s", TEXT, struct.pack("<Q", 1 << 62))]},
            CheckpointError,
            "inside its header",
        ),
        (
            {"pairs": [pair("general.alignment", UINT32, bytes(4))]},
            CheckpointError,
            "alignment is 0",
        ),
    ],
)
def test_a_broken_file_is_refused_by_name(tmp_path, broken, error, message):
    with pytest.raises(error, match=message) as caught:
        GgufFile(handmade(tmp_path, **broken))
    assert "hand.gguf" in str(caught.value)
