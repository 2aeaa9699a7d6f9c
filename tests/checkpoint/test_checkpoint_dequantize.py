"""Our unpackers against the gguf package, bit for bit."""

import sys

import gguf
import numpy as np
import pytest
from gguf import quants

from headrace.base.errors import UnsupportedError
from headrace.checkpoint.dequantize import _UNPACKERS, dequantize
from headrace.checkpoint.gguf_types import GGML_TYPES

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random infinities in numpy

PACKED = [kind for kind in GGML_TYPES.values() if kind.name not in ("F32", "F16", "BF16")]


def random_blocks(kind, rows=37, blocks=150):
    """Any bytes are blocks; 37 rows of 150 blocks also leave a last working set that is short."""
    size = (rows, blocks * kind.block_bytes)
    return np.random.default_rng(kind.id).integers(0, 256, size, dtype=np.uint8)


def same_bits(ours, theirs):
    """Equal bit for bit, except that any NaN is as good as another."""
    equal = ours.view(np.uint32) == theirs.view(np.uint32)
    return bool((equal | (np.isnan(ours) & np.isnan(theirs))).all())


@pytest.mark.parametrize("kind", PACKED, ids=lambda kind: kind.name)
def test_every_type_equals_the_gguf_package(kind):
    raw = random_blocks(kind)
    ours = dequantize(raw, kind)
    theirs = quants.dequantize(raw, gguf.GGMLQuantizationType(kind.id))
    assert ours.shape == (37, 150 * kind.block_elements)
    assert same_bits(ours.numpy(), theirs.astype(np.float32))
    finite = np.isfinite(theirs).mean()
    assert finite > 0.8, "most of the comparison must be about numbers"


def test_a_wrong_bit_is_seen():
    kind = GGML_TYPES[8]
    raw = random_blocks(kind)
    theirs = quants.dequantize(raw, gguf.GGMLQuantizationType.Q8_0)
    raw[0, 5] ^= 1
    assert not same_bits(dequantize(raw, kind).numpy(), theirs)


@pytest.mark.parametrize("name", sorted(_UNPACKERS))
def test_rows_need_not_be_contiguous(name):
    kind = next(kind for kind in PACKED if kind.name == name)
    raw = random_blocks(kind, rows=6)
    assert same_bits(dequantize(raw[::2], kind).numpy(), dequantize(raw, kind).numpy()[::2])


def test_type_table_equals_the_gguf_package():
    for kind in GGML_TYPES.values():
        known = gguf.GGMLQuantizationType(kind.id)
        assert known.name == kind.name
        assert gguf.GGML_QUANT_SIZES[known] == (kind.block_elements, kind.block_bytes)
    unpacked_by_package = set(quants._type_traits) | {0, 1}
    assert unpacked_by_package == set(GGML_TYPES)


def test_without_the_package_common_types_work_and_others_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)  # makes `import gguf` fail
    kinds = {kind.name: kind for kind in PACKED}
    assert dequantize(random_blocks(kinds["Q4_K"]), kinds["Q4_K"]).numel() > 0
    with pytest.raises(UnsupportedError, match=r"IQ4_NL.*pip install 'headrace\[demo\]'"):
        dequantize(random_blocks(kinds["IQ4_NL"]), kinds["IQ4_NL"])
