"""The two demo models: facts of their files, and that they open fast."""

import time

import gguf
import pytest
import torch
from gguf import quants

from headrace.base.errors import NotFoundError
from headrace.checkpoint import open_checkpoint, resolve_model

pytestmark = pytest.mark.real


def real(name):
    try:
        return resolve_model(name)
    except NotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def smollm2():
    return open_checkpoint(real("smollm2"))


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_CACHE", str(tmp_path_factory.mktemp("cache")))
        return open_checkpoint(real("gemma3-270m"))


def test_smollm2(smollm2):
    assert smollm2.config["model_type"] == "llama"
    assert len(smollm2.tensors) == 30 * 9 + 2
    assert smollm2.tensors["model.embed_tokens.weight"].shape == (49152, 576)
    source = smollm2.tokenizer_source
    assert source.eos_token_ids == (0, 2)
    assert source.gguf.tokens[2] == "<|im_end|>"
    assert len(source.gguf.merges) == 48900
    assert "<|im_start|>" in source.chat_template


def test_gemma3(gemma3):
    config = gemma3.config
    assert config["model_type"] == "gemma3_text"
    assert (config["head_dim"], config["query_pre_attn_scalar"]) == (256, 256)
    full = [index for index, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
    assert full == [5, 11, 17]
    assert len(gemma3.tensors) == 18 * 13 + 2
    assert gemma3.tokenizer_source.eos_token_ids == (1, 106)
    assert gemma3.tokenizer_source.chat_template is None
    assert len(gemma3.tokenizer_source.gguf.scores) == 262144
    norm = gemma3.read("model.layers.0.self_attn.q_norm.weight")
    assert norm.shape == (256,)


def test_values_equal_the_gguf_package(gemma3):
    """One tensor of each packed type in the file, against the package's own reading."""
    kinds = {}
    for name, entry in gemma3.tensors.items():
        if entry.dtype != "F32" and entry.nbytes < 10_000_000:
            kinds.setdefault(entry.dtype, name)
    assert set(kinds) == {"Q4_K", "Q5_0", "Q6_K", "Q8_0"}
    for dtype, name in kinds.items():
        source = gemma3._sources[name]
        theirs = quants.dequantize(gemma3._file.raw(source), gguf.GGMLQuantizationType[dtype])
        assert torch.equal(gemma3.read(name), torch.from_numpy(theirs)), name


def test_a_vocabulary_of_262144_opens_fast(gemma3):
    seconds = []
    for _ in range(3):
        start = time.thread_time()
        open_checkpoint(gemma3.path)
        seconds.append(time.thread_time() - start)
    assert min(seconds) < 1.0  # about 0.1 s of this thread's own time


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_every_weight_equals_what_transformers_makes_of_the_file(name, request):
    from transformers import AutoModelForCausalLM

    checkpoint = request.getfixturevalue(name)
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint.path.parent, gguf_file=checkpoint.path.name, dtype=torch.float32
    )
    state = model.state_dict()
    del state["lm_head.weight"]  # tied
    assert set(state) == set(checkpoint.tensors)
    for tensor, expected in state.items():
        assert torch.equal(checkpoint.read(tensor), expected), tensor
