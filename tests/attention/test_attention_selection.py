"""The choice of a backend: explicit names are used or refused, `auto` takes what is admissible."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from headrace.attention import selection
from headrace.attention.backend import AttentionSetting
from headrace.attention.capabilities import AttentionNeed, Phase
from headrace.attention.hybrid import HybridAttentionBackend
from headrace.attention.native_deterministic import DeterministicNativeBackend
from headrace.attention.registry import ATTENTION_BACKENDS, register_attention_backend
from headrace.attention.selection import (
    PREFERENCES,
    backend_refusals,
    build_attention_backend,
    select_attention,
)
from headrace.attention.torch_native import TorchNativeBackend
from headrace.base.errors import UnsupportedError
from headrace.config.hardware import ASSUMED_HARDWARE, Hardware, assumed_hardware
from headrace.config.persona import AttentionTraits, KvGroupTraits, KvKind

GROUP = KvGroupTraits(name="full", kind=KvKind.FULL, window=None, layers=(0, 1))
ATTENTION = AttentionTraits(num_heads=8, num_kv_heads=2, head_dim=64, v_head_dim=64, scale=0.125)
H100 = assumed_hardware("h100")
CPU = assumed_hardware("cpu")


def need(phase: Phase = Phase.DECODE, **changes: object) -> AttentionNeed:
    made = AttentionNeed.of(
        phase, GROUP, ATTENTION, dtype="bfloat16", kv_dtype="bfloat16", page_size=16
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_need_says_what_the_group_and_the_traits_say() -> None:
    group = replace(GROUP, kind=KvKind.WINDOW, window=128)
    traits = replace(ATTENTION, soft_cap=50.0, sinks=True)
    made = AttentionNeed.of(
        Phase.PREFILL, group, traits, dtype="float32", kv_dtype="float16", page_size=4
    )
    assert (made.kv_kind, made.window, made.soft_cap, made.sinks) == (
        KvKind.WINDOW,
        128,
        True,
        True,
    )
    assert (made.dtype, made.kv_dtype, made.page_size) == ("float32", "float16", 4)


@pytest.mark.parametrize("asked", [None, "auto"])
def test_auto_takes_the_first_admissible(asked: str | None) -> None:
    decision = select_attention(Phase.DECODE, asked, need(), H100)
    assert (decision.name, decision.value, decision.asked) == ("decode_attention", "triton", False)
    assert PREFERENCES["cuda", Phase.DECODE].evidence in decision.reason
    assert select_attention(Phase.PREFILL, asked, need(), CPU).value == "torch_native"


def test_auto_lists_what_it_passed_over() -> None:
    decision = select_attention(Phase.DECODE, None, need(head_dim=512), H100)
    assert decision.value == "torch_native"
    (refusal,) = decision.refused
    assert refusal.subject == "triton"
    assert "512" in refusal.reason


def everything() -> Iterator[tuple[AttentionNeed, Hardware]]:
    """Needs of all kinds on all assumed hardware, with and without Triton."""
    sizes = itertools.product((16, 64, 512), (1, 16, 48), ("float32", "bfloat16", "float64"))
    flags = list(itertools.product((False, True), repeat=2))
    bare = replace(H100, packages=frozenset())
    for (dim, page, dtype), (graph, deterministic), hardware, phase in itertools.product(
        sizes, flags, (*ASSUMED_HARDWARE.values(), bare), Phase
    ):
        changes = {"head_dim": dim, "page_size": page, "dtype": dtype, "kv_dtype": dtype}
        yield need(phase, graph=graph, deterministic=deterministic, **changes), hardware


def test_auto_never_takes_what_its_own_check_refuses() -> None:
    chosen = set()
    for wanted, hardware in everything():
        preferred = PREFERENCES.get((hardware.platform, wanted.phase), selection.ELSEWHERE).backends
        admitted = [n for n in preferred if not backend_refusals(n, wanted, hardware)]
        if admitted:
            value = select_attention(wanted.phase, None, wanted, hardware).value
            assert value == admitted[0]
            chosen.add(value)
        else:
            with pytest.raises(UnsupportedError, match="No attention backend can serve"):
                select_attention(wanted.phase, None, wanted, hardware)
            chosen.add(None)
    assert chosen == {"torch_native", "triton", None}


def test_a_named_backend_is_used() -> None:
    decision = select_attention(Phase.PREFILL, "torch_native", need(), H100)
    assert (decision.value, decision.asked, decision.refused) == ("torch_native", True, ())


def test_a_named_backend_is_refused_with_every_reason_and_remedy_and_never_replaced() -> None:
    wanted = need(head_dim=512, page_size=48, speculation=True)
    with pytest.raises(UnsupportedError) as caught:
        select_attention(Phase.DECODE, "triton", wanted, H100)
    for part in ("512", "page size 48", "speculated", "et page_size to one of: 1, 2, 4"):
        assert part in str(caught.value)


def test_where_a_backend_never_runs_no_other_remedy_is_told() -> None:
    with pytest.raises(UnsupportedError) as caught:
        select_attention(Phase.DECODE, "triton", need(head_dim=512), assumed_hardware("mi300x"))
    assert "rocm" in str(caught.value)
    assert "512" not in str(caught.value)


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(UnsupportedError, match="Known: cudnn, fa3, flashinfer, torch_native"):
        select_attention(Phase.DECODE, "flash", need(), H100)


def build(prefill: str, decode: str, **changes: object) -> object:
    options = {
        "group": GROUP,
        "attention": ATTENTION,
        "page_size": 16,
        "max_sequences": 4,
        "max_model_len": 64,
        "dtype": torch.float32,
        "device": torch.device("cpu"),
    }
    kv_dtype = changes.pop("kv_dtype", None)
    deterministic = changes.pop("deterministic", False)
    setting = AttentionSetting(**{**options, **changes})  # type: ignore[arg-type]
    return build_attention_backend(
        prefill,
        decode,
        setting,
        kv_dtype=kv_dtype,
        deterministic=deterministic,  # type: ignore[arg-type]
    )


@pytest.fixture
def latent_class() -> Iterator[type[TorchNativeBackend]]:
    """A second class under the name torch_native, for latent KV."""

    class Latent(TorchNativeBackend):
        capabilities = replace(TorchNativeBackend.capabilities, kv_kinds=frozenset({KvKind.LATENT}))

    register_attention_backend("torch_native")(Latent)
    register_attention_backend("latent")(Latent)
    yield Latent
    ATTENTION_BACKENDS._entries["torch_native"].remove(Latent)
    del ATTENTION_BACKENDS._entries["latent"]


def test_one_name_twice_is_one_backend() -> None:
    assert type(build("torch_native", "torch_native")) is TorchNativeBackend


def test_of_several_classes_the_first_that_admits_is_built(
    latent_class: type[TorchNativeBackend],
) -> None:
    latent = replace(GROUP, kind=KvKind.LATENT)
    assert type(build("torch_native", "torch_native")) is TorchNativeBackend
    assert type(build("torch_native", "torch_native", group=latent)) is latent_class
    assert backend_refusals("torch_native", need(kv_kind=KvKind.LATENT), H100) == []
    with pytest.raises(UnsupportedError, match="Reads KV of kind latent, not full"):
        build("torch_native", "latent")


def test_two_names_make_a_hybrid(monkeypatch: pytest.MonkeyPatch) -> None:
    @register_attention_backend("other")
    class Other(TorchNativeBackend):
        pass

    try:
        hybrid = build("torch_native", "other")
    finally:
        del ATTENTION_BACKENDS._entries["other"]
    assert isinstance(hybrid, HybridAttentionBackend)
    assert type(hybrid.prefill) is TorchNativeBackend
    assert type(hybrid.decode) is Other


def test_building_what_no_class_admits_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="not state"):
        build("torch_native", "torch_native", group=replace(GROUP, kind=KvKind.STATE))


def test_a_name_serves_deterministic_needs_by_a_class_of_its_own() -> None:
    for asked, kind in ((False, TorchNativeBackend), (True, DeterministicNativeBackend)):
        assert type(build("torch_native", "torch_native", deterministic=asked)) is kind
    (refusal,) = backend_refusals("cudnn", need(Phase.PREFILL, deterministic=True), H100)
    assert "last bits" in refusal.reason
    (refusal,) = backend_refusals("torch_native", need(deterministic=True), H100)
    assert "only on cpu" in refusal.reason
