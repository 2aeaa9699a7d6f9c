"""Deterministic mode in the plan: what it takes, and what it refuses by reason and remedy."""

from dataclasses import replace
from typing import Any

import pytest
from plan_cases import CPU, CPU_WITH_COMPILER, GEMMA3, H100, LLAMA, QWEN3_MOE, persona, plan

from headrace.attention.native_deterministic import DeterministicNativeBackend
from headrace.attention.registry import ATTENTION_BACKENDS, register_attention_backend
from headrace.base.errors import ConfigError, UnsupportedError
from headrace.config.hardware import assumed_hardware

EQUIPPED = replace(H100, packages=H100.packages | {"flashinfer", "sgl_kernel"})


@pytest.mark.parametrize("family", [LLAMA, GEMMA3])
def test_backends_and_paths_are_those_whose_results_do_not_change(family: dict[str, Any]) -> None:
    on_cpu = plan(persona(family), CPU_WITH_COMPILER, deterministic=True)
    assert (on_cpu.deterministic.value, on_cpu.deterministic.asked) == (True, True)
    assert on_cpu.prefill_attention.value == on_cpu.decode_attention.value == "torch_native"
    assert on_cpu.cpu_graph.value == "off"
    assert "torch.compile" in str(on_cpu.cpu_graph.refused[0])
    on_gpu = plan(persona(family), H100, deterministic=True)
    assert on_gpu.prefill_attention.value == on_gpu.decode_attention.value == "triton"
    assert on_gpu.prefill_graph.value == "breakable"
    assert on_gpu.decode_graph.value != "off"
    assert not plan(persona(family), H100).deterministic.value


@pytest.mark.parametrize(
    ("asked", "hardware", "reason"),
    [
        ({"cpu_graph": "on"}, CPU_WITH_COMPILER, "torch.compile orders sums"),
        ({"prefill_graph": "piecewise"}, H100, "torch.compile orders sums"),
        ({"attention_backend": "flashinfer"}, EQUIPPED, "last bits"),
        ({"attention_backend": "fa3"}, EQUIPPED, "last bits"),
        ({"prefill_attention_backend": "cudnn"}, H100, "last bits"),
        ({"attention_backend": "torch_native"}, H100, "only on cpu"),
    ],
)
def test_what_follows_the_batch_is_refused(asked, hardware, reason: str) -> None:
    model = persona(LLAMA | {"hidden_size": 512, "head_dim": 128})
    with pytest.raises(UnsupportedError, match=reason) as caught:
        plan(model, hardware, deterministic=True, **asked)
    assert caught.value.remedy
    plan(model, hardware, **asked)  # without it there is nothing to refuse


def test_both_phases_take_one_backend() -> None:
    @register_attention_backend("other")
    class Other(DeterministicNativeBackend):
        pass

    try:
        with pytest.raises(UnsupportedError, match="goes through the backend of prefill"):
            plan(deterministic=True, decode_attention_backend="other")
        assert plan(deterministic=True, attention_backend="other").decode_attention.value == "other"
    finally:
        del ATTENTION_BACKENDS._entries["other"]


@pytest.mark.parametrize(
    ("hardware", "model", "reason"),
    [
        (assumed_hardware("mi300x"), LLAMA, "no kernels for rocm"),
        (replace(H100, packages=frozenset()), LLAMA, "needs Triton"),
        (CPU, QWEN3_MOE, "whose number changes with the batch"),
    ],
)
def test_models_and_devices_without_such_products_are_refused(hardware, model, reason) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match=reason):
        plan(persona(model), hardware, deterministic=True)
