"""Which backend serves a phase: asked by name, or the first admissible of a preference list."""

from dataclasses import dataclass

import torch

from headrace.attention import (
    cudnn_backend,
    fa3_backend,
    flashinfer_backend,
    native_deterministic,
    torch_native,
    triton_backend,
    triton_deterministic_backend,
)
from headrace.attention.backend import AttentionBackend, AttentionSetting
from headrace.attention.capabilities import AttentionNeed, Phase, need_refusals
from headrace.attention.hybrid import HybridAttentionBackend
from headrace.attention.registry import ATTENTION_BACKENDS
from headrace.base.decision import Decision, Refusal
from headrace.base.errors import UnsupportedError
from headrace.config.hardware import Hardware

BUILT_IN = (
    torch_native.TorchNativeBackend,
    native_deterministic.DeterministicNativeBackend,
    triton_backend.TritonBackend,
    triton_deterministic_backend.TritonDeterministicBackend,
    cudnn_backend.CudnnBackend,
    flashinfer_backend.FlashInferBackend,
    fa3_backend.FlashAttention3Backend,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Backends of a phase on a platform, best first, and the measurement that says so."""

    backends: tuple[str, ...]
    evidence: str


CPU = Preference(
    backends=("torch_native",), evidence="the only one that compiles for a CPU, 2026-11-29"
)
# 32 query and 8 KV heads of 128, bfloat16, page 64, one layer, eager, triton to torch_native:
# decode of 32 rows at 2048 tokens 0.11 to 3.26 ms, prefill of 4 x 1024 tokens 0.15 to 1.64 ms.
PREFERENCES = {
    ("cuda", Phase.PREFILL): Preference(
        backends=("triton", "torch_native"),
        evidence="triton 10 times as fast as torch_native on an H200, 2026-11-29",
    ),
    ("cuda", Phase.DECODE): Preference(
        backends=("triton", "torch_native"),
        evidence="triton 30 times as fast as torch_native on an H200, 2026-11-29",
    ),
    ("cpu", Phase.PREFILL): CPU,
    ("cpu", Phase.DECODE): CPU,
}
ELSEWHERE = Preference(
    backends=("torch_native",), evidence="nothing else was measured on this platform"
)


def select_attention(
    phase: Phase, asked: str | None, need: AttentionNeed, hardware: Hardware
) -> Decision[str]:
    """The backend of `phase`.

    Args:
        asked: a registered name, which is used or refused, never replaced; `None` or "auto" takes
            the first of the preference list of platform and phase that admits `need`.

    Raises:
        UnsupportedError: the name is unknown or refused, or every candidate is refused; lists every
            reason and remedy.
    """
    name = f"{phase}_attention"
    if asked not in (None, "auto"):
        refused = backend_refusals(asked, need, hardware)
        if refused:
            raise UnsupportedError(
                f"Attention backend {asked} cannot serve {phase} here",
                why="; ".join(refusal.reason for refusal in refused),
                remedy="; ".join(dict.fromkeys(refusal.remedy for refusal in refused)),
            )
        return Decision(name=name, value=asked, reason="asked for by name", asked=True)
    preference = PREFERENCES.get((hardware.platform, phase), ELSEWHERE)
    found: list[Refusal] = []
    for candidate in preference.backends:
        refused = backend_refusals(candidate, need, hardware)
        if not refused:
            reason = f"first of {', '.join(preference.backends)} that admits the model"
            return Decision(
                name=name,
                value=candidate,
                reason=f"{reason} ({preference.evidence})",
                refused=tuple(found),
            )
        found += refused
    raise UnsupportedError(
        f"No attention backend can serve {phase} on {hardware.name}",
        why="; ".join(f"{refusal.subject}: {refusal.reason}" for refusal in found),
        remedy="; ".join(dict.fromkeys(refusal.remedy for refusal in found)),
    )


def backend_refusals(name: str, need: AttentionNeed, hardware: Hardware) -> list[Refusal]:
    """Why no class called `name` serves `need`; empty when one does."""
    found: list[Refusal] = []
    for backend in _classes(name, need):
        refused = backend.refusals(need, hardware)
        if not refused:
            return []
        found += refused
    return found


def _classes(name: str, need: AttentionNeed) -> tuple[type[AttentionBackend], ...]:
    """Classes of a name that come into question: where it has a class of its own for deterministic
    results, that one alone serves such needs, and no others."""
    entries = ATTENTION_BACKENDS.entries(name)
    asked = need.deterministic
    return tuple(each for each in entries if each.capabilities.deterministic is asked) or entries


def build_attention_backend(
    prefill: str,
    decode: str,
    setting: AttentionSetting,
    *,
    kv_dtype: torch.dtype | None = None,
    deterministic: bool = False,
) -> AttentionBackend:
    """The backend of one KV group: of each name the first class whose capabilities admit it.

    Args:
        prefill, decode: registered names, as `select_attention` settled them.
        kv_dtype: of the pool; that of the queries if absent.
        deterministic: take classes whose results have the same bits in any batch.

    Raises:
        UnsupportedError: no class of a name admits the model, or its kernels cannot run here.
    """
    classes = [
        _class_of(
            name,
            AttentionNeed.of(
                phase,
                setting.group,
                setting.attention,
                dtype=_name(setting.dtype),
                kv_dtype=_name(kv_dtype or setting.dtype),
                page_size=setting.page_size,
                deterministic=deterministic,
            ),
        )
        for phase, name in ((Phase.PREFILL, prefill), (Phase.DECODE, decode))
    ]
    backends = [kind(setting) for kind in dict.fromkeys(classes)]
    return backends[0] if len(backends) == 1 else HybridAttentionBackend(*backends)


def _class_of(name: str, need: AttentionNeed) -> type[AttentionBackend]:
    found: list[Refusal] = []
    for backend in _classes(name, need):
        refused = need_refusals(name, backend.capabilities, need)
        if not refused:
            return backend
        found += refused
    raise UnsupportedError(
        f"Attention backend {name} cannot serve KV group {need.kv_kind}",
        why="; ".join(refusal.reason for refusal in found),
        remedy="; ".join(dict.fromkeys(refusal.remedy for refusal in found)),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
