"""Tiny models written as GGUF answer as their source does; what is not supported is named."""

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from loader_models import (
    PROMPT,
    difference,
    open_llm,
    our_logprobs,
    their_logprobs,
    their_model,
    write_checkpoint,
)
from loader_shapes import CONFIG, make_model

from headrace.base.errors import CapacityError, CheckpointError, UnsupportedError
from headrace.checkpoint import open_checkpoint
from headrace.checkpoint.gguf_experts import expert_tensors
from headrace.checkpoint.gguf_file import GgufTensor
from headrace.checkpoint.gguf_types import GGML_TYPES
from headrace.layers.weights import weight_slots
from headrace.loader import weights as loader
from headrace.loader.weights import load_weights

HEADS, KV_HEADS, LAYERS = 4, 2, CONFIG["num_hidden_layers"]
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": 16,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "sliding_attention"],
    "query_pre_attn_scalar": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
SETTINGS = {"llama": {}, "gemma3": GEMMA, "qwen3moe": MOE}
# Root of the mean squared difference of logprobs from the source model: the rounding of weights.
NEAR = {"F32": 2e-5, "F16": 5e-3, "Q8_0": 0.1}


@pytest.fixture(scope="module", params=list(SETTINGS))
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param) / request.param
    return write_checkpoint(folder, **SETTINGS[request.param])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source") / "llama")


def write_gguf(path: Path, folder: Path, kind: str, architecture: str | None = None) -> dict:
    """The folder's model as one file; returns the weights that it truly holds."""
    family = folder.name
    model = their_model(folder)
    writer = gguf.GGUFWriter(path, architecture or family)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(model.config.hidden_size)
    writer.add_feed_forward_length(model.config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e6 if family == "gemma3" else 1e4)
    writer.add_vocab_size(CONFIG["vocab_size"])
    if family == "gemma3":
        writer.add_key_length(16)
        writer.add_value_length(16)
        writer.add_sliding_window(8)
    if family == "qwen3moe":
        writer.add_key_length(16)
        writer.add_value_length(16)
        writer.add_expert_count(MOE["num_experts"])
        writer.add_expert_used_count(MOE["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(MOE["moe_intermediate_size"])
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, family.upper()), LAYERS)
    held = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if ".experts." in name:
            held[name] = _add_experts(writer, name, tensor, kind)
            continue
        stem, suffix = name.rsplit(".", 1)
        held[name] = _add(writer, f"{names.get_name(stem)}.{suffix}", name, tensor, kind, family)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def _add_experts(
    writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, kind: str
) -> torch.Tensor:
    """Stacks of gate, up and down, each in a tensor of its own."""
    layer, both = name.split(".")[2], name.endswith("gate_up_proj")
    parts = zip(("gate", "up"), tensor.chunk(2, 1), strict=True) if both else [("down", tensor)]
    held = [
        _add(writer, f"blk.{layer}.ffn_{part}_exps.weight", name, each.contiguous(), kind, "")
        for part, each in parts
    ]
    return torch.cat(held, 1)


def _add(
    writer: gguf.GGUFWriter, place: str, name: str, tensor: torch.Tensor, kind: str, family: str
) -> torch.Tensor:
    array = tensor.float().numpy()
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2], 0)
    if family == "gemma3" and name.endswith("norm.weight"):
        array = array + np.float32(1)
    if tensor.dim() == 1:
        writer.add_tensor(place, array)
        return tensor
    chosen = gguf.GGMLQuantizationType[kind]
    packed = gguf.quants.quantize(array, chosen)
    held = gguf.quants.dequantize(packed, chosen)
    if family == "llama" and heads:  # the two rope halves of a head, interleaved
        halves = packed.reshape(heads, 2, packed.shape[0] // heads // 2, -1)
        packed = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(packed.shape)
    writer.add_tensor(place, packed, raw_dtype=None if kind in ("F32", "F16") else chosen)
    return torch.from_numpy(np.ascontiguousarray(held, np.float32))


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_1"])
def test_logits(source: Path, tmp_path: Path, kind: str) -> None:
    """Those of the same weights rounded, exactly; near the source, where the format is fine."""
    file = tmp_path / "tiny.gguf"
    held = write_gguf(file, source, kind)
    model = their_model(source)
    exact = their_logprobs(model)
    with open_llm(file) as llm:
        ours = our_logprobs(llm)
        model.load_state_dict(held, strict=False)
        assert (ours - their_logprobs(model)).abs().max() <= 2e-4
    if kind in NEAR:
        assert (ours - exact).square().mean().sqrt() <= NEAR[kind]


def test_a_folder_with_one_file(source: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", source, "F32")
    with open_llm(tmp_path) as llm:
        assert difference(llm, their_model(source)) <= 2e-4


@pytest.mark.parametrize("shape", [(8, 32), (0, 8, 32)])
def test_a_stack_of_experts_that_is_none(shape: tuple[int, ...]) -> None:
    tensor = GgufTensor(
        name="blk.0.ffn_up_exps.weight", shape=shape, kind=GGML_TYPES[0], start=0, nbytes=1024
    )
    with pytest.raises(CheckpointError, match="Experts are stacked"):
        list(expert_tensors(tensor))


def test_an_unknown_architecture_is_one_line(llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, llama, "F16", architecture="starcoder2")
    with pytest.raises(UnsupportedError, match=r"architecture starcoder2.*llama, ") as caught:
        open_llm(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keep", [0.0, 0.01, 0.5, 0.999])
def test_truncated(llama: Path, tmp_path: Path, keep: float) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, llama, "F32")
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(CheckpointError, match=r"tiny\.gguf"):
        open_llm(file)
    file.write_bytes(content)
    with open_llm(file) as llm:
        assert llm.generate(PROMPT, use_tqdm=False)


def test_a_renamed_file_of_another_kind(llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    shutil.copy(llama / "model.safetensors", file)
    with pytest.raises(CheckpointError, match="is not a GGUF file"):
        open_llm(file)


def test_no_room_to_unpack(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On its way to a device a packed tensor is four bytes a weight on the host: the largest."""
    file = tmp_path / "tiny.gguf"
    write_gguf(file, llama, "Q8_0")
    checkpoint = open_checkpoint(file)
    elsewhere = make_model({}, device="meta")
    largest = CONFIG["vocab_size"] * 64 * 4
    monkeypatch.setattr(loader, "free_bytes", lambda device: largest - 1)
    with pytest.raises(CapacityError, match=rf"{largest:,} bytes of host memory"):
        load_weights(elsewhere, checkpoint)
    monkeypatch.setattr(loader, "free_bytes", lambda device: largest)
    load_weights(elsewhere, checkpoint)
    load_weights(make_model({}), checkpoint)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "TQ2_0"])
def test_unpacked_in_place(llama: Path, tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    """The same numbers as by way of a float32 tensor, whatever the parameter's dtype."""
    file = tmp_path / "tiny.gguf"
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 256)
    folder = write_checkpoint(tmp_path / "llama", head_dim=64, **sizes)
    held = write_gguf(file, folder, kind)
    model = make_model(sizes | {"head_dim": 64}, dtype=dtype)
    slots = weight_slots(model)
    for slot in slots.values():
        slot.destination.fill_(float("nan"))
    load_weights(model, open_checkpoint(file))
    for name, slot in slots.items():
        assert torch.equal(slot.destination, held[name].to(dtype)), name
