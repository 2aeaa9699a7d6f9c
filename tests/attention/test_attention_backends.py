"""Every registered backend: what it takes, what it refuses and why. The Triton one, the hybrid."""

from dataclasses import replace

import pytest
import torch

from headrace.attention import triton_backend
from headrace.attention.backend import AttentionBackend, AttentionSetting
from headrace.attention.capabilities import AttentionNeed, Phase, refusals
from headrace.attention.hybrid import HybridAttentionBackend
from headrace.attention.registry import ATTENTION_BACKENDS
from headrace.attention.selection import BUILT_IN
from headrace.attention.torch_native import TorchNativeBackend
from headrace.attention.triton_backend import TritonBackend
from headrace.base.decision import Refusal
from headrace.base.errors import UnsupportedError
from headrace.batch.facts import Bucket
from headrace.config.hardware import Hardware, assumed_hardware
from headrace.config.persona import AttentionTraits, KvGroupTraits, KvKind
from headrace.kernels.support_triton import triton_available
from headrace.testing.paged_batches import Case, make_scene, run

NEED = AttentionNeed(
    phase=Phase.DECODE,
    kv_kind=KvKind.FULL,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    v_head_dim=128,
    dtype="bfloat16",
    kv_dtype="bfloat16",
    page_size=16,
)
H100 = assumed_hardware("h100")
EQUIPPED = replace(H100, packages=frozenset({"triton", "flashinfer", "sgl_kernel"}))
ACCEPTED = {
    "torch_native": (replace(NEED, head_dim=300, page_size=48), assumed_hardware("mi300x")),
    "triton": (replace(NEED, window=512, soft_cap=True, sinks=True, graph=True), H100),
    "cudnn": (replace(NEED, phase=Phase.PREFILL, window=512, sinks=True), H100),
    "flashinfer": (replace(NEED, window=512, soft_cap=True, graph=True), EQUIPPED),
    "fa3": (replace(NEED, window=512, soft_cap=True, graph=True), EQUIPPED),
}
REFUSED = {
    "torch_native": (replace(NEED, graph=True), H100, "cannot be captured into a decode graph"),
    "triton": (NEED, assumed_hardware("mi300x"), "does not run on rocm, only on cpu, cuda"),
    "cudnn": (NEED, replace(H100, capability=(7, 5)), "needs compute capability 8.0 or newer"),
    "flashinfer": (NEED, H100, "flashinfer is not among the packages of h100-80gb"),
    "fa3": (NEED, H100, "sgl_kernel is not among the packages of h100-80gb"),
}
needs_triton = pytest.mark.skipif(
    triton_available("cpu") is not None, reason="needs Triton's interpreter"
)


def test_every_registered_backend_has_its_two_cases() -> None:
    names = set(ATTENTION_BACKENDS)
    assert names == set(ACCEPTED) == set(REFUSED)
    assert {backend.name for backend in BUILT_IN} == names


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str) -> None:
    backend, *_ = ATTENTION_BACKENDS.entries(name)
    need, hardware = ACCEPTED[name]
    assert backend.refusals(need, hardware) == []


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_reason_and_remedy(name: str) -> None:
    backend, *_ = ATTENTION_BACKENDS.entries(name)
    need, hardware, reason = REFUSED[name]
    (refusal,) = backend.refusals(need, hardware)
    assert refusal.subject == name
    assert reason in refusal.reason
    assert refusal.remedy


@pytest.mark.parametrize("name", ["flashinfer", "fa3"])
def test_on_another_platform_that_is_the_only_reason(name: str) -> None:
    """Another dtype or an installed package would not help."""
    backend, *_ = ATTENTION_BACKENDS.entries(name)
    here = replace(H100, platform="cpu", assumed=False)
    (refusal,) = backend.refusals(replace(NEED, dtype="float32", kv_dtype="float32"), here)
    assert refusal.reason == "does not run on cpu, only on cuda"
    (missing,) = backend.refusals(NEED, replace(H100, assumed=False))
    assert missing.reason.endswith("is not installed")


def test_cudnn_on_a_cpu_asks_for_a_gpu(monkeypatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    backend, *_ = ATTENTION_BACKENDS.entries("cudnn")
    (refusal,) = backend.refusals(NEED, replace(H100, platform="cpu", assumed=False))
    assert "needs a CUDA GPU" in refusal.reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kv_kind": KvKind.LATENT}, "not latent"),
        ({"dtype": "float64", "kv_dtype": "float64"}, "has no kernel for float64"),
        ({"kv_dtype": "fp8_e4m3"}, "cannot read a KV cache of fp8_e4m3"),
        ({"kv_dtype": "float32"}, "of one dtype"),
        ({"page_size": 48}, "page size 48"),
        ({"head_dim": 320}, "head dimension of 320, only 1 to 256"),
        ({"v_head_dim": 512}, "value head dimension of 512"),
        ({"num_heads": 30}, "30 query heads cannot share 8 KV heads"),
        ({"deterministic": True}, "last bits"),
        ({"graph": True, "phase": Phase.PREFILL}, "prefill graph"),
        ({"speculation": True}, "speculated"),
    ],
)
def test_every_capability_is_compared(change: dict[str, object], reason: str) -> None:
    need = replace(NEED, **change)  # type: ignore[arg-type]
    found = TritonBackend.refusals(need, H100)
    assert any(reason in refusal.reason for refusal in found)
    assert all(refusal.remedy for refusal in found)
    assert TritonBackend.refusals(NEED, H100) == []


@pytest.mark.parametrize(
    ("lacks", "change", "reason"),
    [
        ({"sliding_window": False}, {"window": 8}, "no sliding window"),
        ({"soft_cap": False}, {"soft_cap": True}, "no soft cap"),
        ({"sinks": False}, {"sinks": True}, "no attention sinks"),
        ({"needs_exact_host_lengths": True}, {"exact_host_lengths": False}, "exact lengths"),
    ],
)
def test_capabilities_that_no_built_in_lacks(
    lacks: dict[str, bool], change: dict[str, object], reason: str
) -> None:
    poor = replace(TritonBackend.capabilities, **lacks)
    assert refusals("poor", poor, NEED, H100) == []
    (refusal,) = refusals("poor", poor, replace(NEED, **change), H100)  # type: ignore[arg-type]
    assert reason in refusal.reason


def test_missing_triton_package_is_a_refusal_on_assumed_hardware() -> None:
    (refusal,) = TritonBackend.refusals(NEED, replace(H100, packages=frozenset()))
    assert "pip install" in refusal.remedy


def test_triton_that_cannot_run_here_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    no = Refusal(subject="triton", reason="no interpreter", remedy="set it")
    monkeypatch.setattr(triton_backend, "triton_available", lambda platform: no)
    here = Hardware(name="this", platform="cpu", memory_bytes=1, packages=frozenset({"triton"}))
    assert TritonBackend.refusals(NEED, here) == [no]
    with pytest.raises(UnsupportedError, match="No interpreter"):
        make_scene(Case(rows=[(0, 1)])).backend(TritonBackend)


@needs_triton
def test_triton_graph_metadata_serves_every_length() -> None:
    scene = make_scene(Case(rows=[(0, 1), (70, 1)], decode=True))
    backend = scene.backend(TritonBackend)
    assert isinstance(backend, TritonBackend)
    backend.capture_buffers(Bucket(tokens=4, sequences=4))
    first = backend._scratch.captured[-1]
    backend.capture_buffers(Bucket(tokens=2, sequences=2))
    assert backend._scratch.captured == [first]  # smaller graphs share scratch
    backend.capture_buffers(Bucket(tokens=8, sequences=8))
    assert backend._scratch.captured[0] is first  # which an earlier graph still holds
    backend.prepare_metadata_in_graph(scene.batch)
    out = backend.forward(scene.q, scene.layer, scene.batch)
    torch.testing.assert_close(out.double(), scene.expected, rtol=2e-5, atol=2e-5)


class Recorder(AttentionBackend):
    """Writes down what it is called for."""

    name = "recorder"
    capabilities = TorchNativeBackend.capabilities

    def __init__(self) -> None:
        setting = AttentionSetting(
            group=KvGroupTraits(name="full", kind=KvKind.FULL, window=None, layers=(0,)),
            attention=AttentionTraits(
                num_heads=6, num_kv_heads=2, head_dim=32, v_head_dim=32, scale=1.0
            ),
            page_size=16,
            max_sequences=4,
            max_model_len=100,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        super().__init__(setting)
        self.calls: list[str] = []

    def prepare_metadata(self, batch: object) -> None:
        self.calls.append("prepare")

    def prepare_metadata_in_graph(self, batch: object) -> None:
        self.calls.append("prepare in graph")

    def capture_buffers(self, bucket: object) -> None:
        self.calls.append("buffers")

    def forward(self, q: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        self.calls.append("forward")
        return q


def test_hybrid_sends_decode_to_one_part_and_the_rest_to_the_other() -> None:
    prefill, decode = Recorder(), Recorder()
    hybrid = HybridAttentionBackend(prefill, decode)
    run(make_scene(Case(rows=[(3, 1)], decode=True)), hybrid)
    assert (prefill.calls, decode.calls) == ([], ["prepare", "forward"])
    run(make_scene(Case(rows=[(3, 1), (0, 4)])), hybrid)
    assert prefill.calls == ["prepare", "forward"]
    hybrid.capture_buffers(Bucket(tokens=1, sequences=1))
    hybrid.prepare_metadata_in_graph(make_scene(Case(rows=[(3, 1)], decode=True)).batch)
    assert decode.calls[2:] == ["buffers", "prepare in graph"]
