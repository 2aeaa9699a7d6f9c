"""The conformance kit: the built-in backends keep their claims, and broken ones are found."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace.attention.backend import AttentionBackend
from headrace.attention.registry import ATTENTION_BACKENDS
from headrace.attention.torch_native import TorchNativeBackend
from headrace.base.decision import Refusal
from headrace.base.errors import UnsupportedError
from headrace.config.persona import KvKind
from headrace.kernels.support_triton import triton_available
from headrace.runner.detect import detect
from headrace.testing.attention import Report, check_attention_backend
from headrace.testing.attention_cases import cases_of


def test_torch_native_keeps_its_claims() -> None:
    report = check_attention_backend("torch_native")
    report.check()
    assert len(report.findings) > 80
    untested = [each.subject for each in report.findings if each.verdict == "not tested"]
    assert untested == ["deterministic"]


@pytest.mark.skipif(triton_available("cpu") is not None, reason="needs Triton's interpreter")
def test_triton_keeps_its_claims_in_a_few_cases() -> None:
    report = check_attention_backend("triton", thorough=False)
    report.check()
    assert {"metadata in graph", "ended rows", "sinks, lse"} <= {
        each.subject for each in report.findings if each.verdict == "ok"
    }


def test_captures_are_tried_on_a_gpu_where_they_are_claimed() -> None:
    for name in PARTS:
        for kind in ATTENTION_BACKENDS.entries(name):
            for thorough in (False, True):
                subjects = {each.subject for each in cases_of(kind, "cuda", thorough=thorough)}
                claimed = kind.capabilities.graph_decode
                assert ("capture and replay" in subjects, "refuses graphs" in subjects) == (
                    claimed,
                    not claimed,
                )


def test_parts_together_are_the_whole() -> None:
    whole = check_attention_backend("torch_native", thorough=False)
    parts = [
        check_attention_backend("torch_native", thorough=False, part=(index, 3))
        for index in range(3)
    ]
    taken = Counter((each.subject, each.case) for part in parts for each in part.findings)
    assert taken == Counter((each.subject, each.case) for each in whole.findings)
    assert all(part.passed for part in parts)


# In how many parts the kit runs on a GPU, by how much each backend compiles there.
PARTS = {"torch_native": 2, "triton": 12, "cudnn": 12, "fa3": 2, "flashinfer": 6}


def test_every_backend_of_this_package_is_checked_on_a_gpu() -> None:
    assert set(PARTS) == set(ATTENTION_BACKENDS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("name", "part"),
    [(name, (index, count)) for name, count in PARTS.items() for index in range(count)],
)
def test_on_the_gpu(name: str, part: tuple[int, int]) -> None:
    for kind in ATTENTION_BACKENDS.entries(name):
        missing = kind.unavailable(detect("cuda"))
        if missing is not None:
            pytest.skip(f"{missing.reason}: {missing.remedy}")
    check_attention_backend(name, "cuda", part=part).check()


def broken(
    change: Callable[[TorchNativeBackend, dict[str, Any]], None] | None = None, **claims: Any
) -> type[AttentionBackend]:
    """torch_native with something wrong in `forward`, or with claims it cannot keep."""

    class Broken(TorchNativeBackend):
        name = "broken"
        capabilities = replace(TorchNativeBackend.capabilities, **claims)

        def forward(self, q: Any, layer: Any, batch: Any, **given: Any) -> torch.Tensor:
            call = {"q": q, "layer": layer, "batch": batch, **given}
            if change is not None:
                change(self, call)
            return super().forward(**call)

    return Broken


def failed_subjects(report: Report) -> set[str]:
    return {finding.subject for finding in report.failed}


def window_off_by_one(backend: TorchNativeBackend, call: dict[str, Any]) -> None:
    if call["layer"].window is not None:
        call["layer"] = replace(call["layer"], window=call["layer"].window + 1)


def no_sinks(backend: TorchNativeBackend, call: dict[str, Any]) -> None:
    call["layer"] = replace(call["layer"], sinks=None)


def one_key_head_too_far(backend: TorchNativeBackend, call: dict[str, Any]) -> None:
    pool = call["layer"].pool
    if pool.keys.shape[2] == 3:
        call["layer"] = replace(call["layer"], pool=replace(pool, keys=pool.keys.roll(1, 2)))


def bounds_for_lengths(backend: TorchNativeBackend, call: dict[str, Any]) -> None:
    batch = call["batch"]
    device_lens = torch.tensor(batch.bounds.seq_lens, dtype=torch.int32)
    if batch.extend_lens is None and not torch.equal(batch.seq_lens, device_lens):
        batch = replace(batch, seq_lens=device_lens)
        backend.prepare_metadata(batch)
        call["batch"] = batch


def stale_plan(backend: TorchNativeBackend, call: dict[str, Any]) -> None:
    tiles = getattr(backend, "first_tiles", None)
    if tiles is None:
        backend.first_tiles = backend._tiles  # type: ignore[attr-defined]
    else:
        backend._tiles = tiles


@pytest.mark.parametrize(
    ("change", "subjects"),
    [
        (window_off_by_one, {"window", "window, lse", "all habits, lse", "a layer's own window"}),
        (no_sinks, {"sinks", "sinks, lse", "all habits, lse"}),
        (one_key_head_too_far, {"head counts"}),
        (bounds_for_lengths, {"ended rows"}),
        (stale_plan, {"one step after another"}),
    ],
)
def test_a_wrong_result_is_found_where_it_is(change: Any, subjects: set[str]) -> None:
    report = check_attention_backend(broken(change), thorough=False)
    assert failed_subjects(report) == subjects
    with pytest.raises(AssertionError, match="does not keep its claims"):
        report.check()


def test_claims_that_cannot_be_kept_are_failures() -> None:
    report = check_attention_backend(broken(graph_decode=True), thorough=False)
    (finding,) = report.failed
    assert finding.subject == "metadata in graph"
    assert finding.detail.startswith("claimed, then refused: Attention backend broken cannot be")


def test_a_claim_that_the_class_itself_refuses_is_a_failure() -> None:
    class Refusing(TorchNativeBackend):
        name = "refusing"

        @classmethod
        def refusals(cls, need: Any, hardware: Any) -> Any:
            poor = replace(cls.capabilities, soft_cap=False)
            from headrace.attention.capabilities import refusals

            return refusals(cls.name, poor, need, hardware)

    report = check_attention_backend(Refusing, thorough=False)
    assert failed_subjects(report) == {"soft cap", "soft cap, lse", "all habits, lse"}
    assert all(
        each.detail == "claimed, then refused: has no soft cap on attention logits"
        for each in report.failed
    )


def test_what_is_not_claimed_is_not_tested_and_said() -> None:
    poor = broken(no_sinks, sinks=False, soft_cap=False, mixed_dtypes=False, page_sizes={16, 64})
    report = check_attention_backend(poor, thorough=False)
    report.check()
    shown = str(report)
    for subject in ("sinks", "soft cap", "pool of another dtype", "deterministic"):
        (finding,) = [each for each in report.findings if each.subject == subject]
        assert finding.verdict == "not tested"
        assert subject in shown


def test_determinism_is_tested_where_it_is_claimed() -> None:
    class Counting(TorchNativeBackend):
        name = "counting"
        capabilities = replace(TorchNativeBackend.capabilities, deterministic=True)
        calls = 0

        def forward(self, q: Any, layer: Any, batch: Any, **given: Any) -> torch.Tensor:
            Counting.calls += 1
            out = super().forward(q, layer, batch, **given)
            return out.mul_(1 + 1e-7 * (Counting.calls % 7))

    report = check_attention_backend(Counting, thorough=False)
    assert failed_subjects(report) == {"deterministic"}


def test_a_crash_is_a_finding_and_not_the_end() -> None:
    def crash(backend: TorchNativeBackend, call: dict[str, Any]) -> None:
        if call["layer"].window is not None:
            raise ZeroDivisionError("no such window")

    report = check_attention_backend(broken(crash), thorough=False)
    assert {each.detail for each in report.failed} == {"ZeroDivisionError: no such window"}


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"platforms": frozenset({"cuda"})}, "does not run on cpu"),
        ({"kv_kinds": frozenset({KvKind.LATENT})}, "full and window KV only"),
    ],
)
def test_what_cannot_be_checked_here_is_refused(claims: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        check_attention_backend(broken(**claims))


def test_a_missing_package_is_refused_and_an_unknown_name_too() -> None:
    class Missing(TorchNativeBackend):
        name = "missing"

        @classmethod
        def unavailable(cls, hardware: Any) -> Any:
            return Refusal(subject="missing", reason="no package", remedy="pip install")

    with pytest.raises(UnsupportedError, match="No package"):
        check_attention_backend(Missing)
    with pytest.raises(UnsupportedError, match="Unknown attention backend"):
        check_attention_backend("no such backend")
