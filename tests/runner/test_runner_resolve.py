"""The plan: values, reasons, refusals, and asks that cannot be honoured."""

import dataclasses
from dataclasses import replace

import plan_cases as cases
import pytest
from plan_cases import CPU, GEMMA3, H100, LLAMA, QWEN3_MOE, TURING, persona, plan

from headrace.attention.registry import ATTENTION_BACKENDS, register_attention_backend
from headrace.attention.torch_native import TorchNativeBackend
from headrace.base.errors import ConfigError, UnsupportedError
from headrace.config.hardware import assumed_hardware
from headrace.runner.checkpoint_facts import CheckpointFacts
from headrace.runner.memory_sizes import fixed_bytes


def test_same_input_same_plan_and_every_decision_has_a_reason() -> None:
    first, second = plan(), plan()
    assert first == second
    for decision in first:
        assert decision.reason, decision.name
    names = [field.name for field in dataclasses.fields(first)]
    assert [decision.name for decision in first] == names


@pytest.mark.parametrize(
    ("hardware", "facts", "family", "dtype", "refused"),
    [
        (CPU, CheckpointFacts(dtype="bfloat16"), LLAMA, "float32", ["bfloat16"]),
        (H100, CheckpointFacts(dtype="bfloat16"), LLAMA, "bfloat16", []),
        (H100, CheckpointFacts(dtype="float16"), LLAMA, "float16", []),
        (H100, CheckpointFacts(dtype="float16"), GEMMA3, "bfloat16", ["float16"]),
        (H100, CheckpointFacts(dtype="float32"), LLAMA, "bfloat16", ["float32"]),
        (H100, CheckpointFacts(dtype="packed", load_format="gguf"), LLAMA, "bfloat16", []),
        (H100, CheckpointFacts(dtype=None), LLAMA, "bfloat16", []),
        (TURING, CheckpointFacts(dtype="bfloat16"), LLAMA, "float16", ["bfloat16"]),
        (TURING, CheckpointFacts(dtype="bfloat16"), GEMMA3, "float32", ["bfloat16", "float16"]),
    ],
)
def test_dtype_auto(hardware, facts, family, dtype, refused) -> None:
    decision = plan(persona(family), hardware, facts).dtype
    assert decision.value == dtype
    assert not decision.asked
    assert [refusal.subject for refusal in decision.refused] == refused


def test_float32_that_crowds_out_the_machine_becomes_bfloat16_on_a_cpu() -> None:
    small = dataclasses.replace(CPU, memory_bytes=400_000)
    decision = plan(hardware=small).dtype
    assert decision.value == "bfloat16"
    assert [refusal.subject for refusal in decision.refused] == ["float32"]


def test_asked_dtype_is_kept_and_kv_follows() -> None:
    settled = plan(hardware=H100, dtype="float32")
    assert (settled.dtype.value, settled.dtype.asked) == ("float32", True)
    assert settled.kv_cache_dtype.value == "float32"
    assert plan(dtype="float16").dtype.value == "float16"


def test_context_is_the_models_and_capped_on_a_cpu() -> None:
    assert plan(hardware=H100).max_model_len.value == 16384
    capped = plan().max_model_len
    assert capped.value == 8192
    assert "16,384" in str(capped.refused[0])
    asked = plan(max_model_len=16384).max_model_len
    assert (asked.value, asked.asked) == (16384, True)


def test_context_of_a_small_pool_is_the_pool() -> None:
    settled = plan(max_total_tokens=100)
    assert settled.max_model_len.value == 100
    assert settled.max_total_tokens.value == 100


def test_a_stretched_rope_states_a_longer_context() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16384}
    stretched = persona(rope_scaling=scaling)
    assert plan(stretched, H100, max_model_len=65536).max_model_len.value == 65536
    with pytest.raises(ConfigError, match="beyond the 65,536 positions"):
        plan(stretched, H100, max_model_len=65537)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_ropes_that_depend_on_length_are_fixed_at_the_context(kind: str) -> None:
    factors = [1.0] * 8
    scaling = {
        "rope_type": kind,
        "factor": 2.0,
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": 4096,
    }
    settled = plan(persona(rope_scaling=scaling), H100, max_model_len=5000)
    assert settled.ropes.value["default"].length == 5000
    assert kind in settled.ropes.reason
    assert "5,000" in settled.ropes.reason
    assert "no rule" in plan().ropes.reason


def test_platform_defaults() -> None:
    cpu, gpu = plan(), plan(hardware=H100)
    assert (cpu.page_size.value, gpu.page_size.value) == (16, 64)
    assert (cpu.overlap.value, gpu.overlap.value) == (False, True)
    assert cpu.overlap.refused
    assert (cpu.chunked_prefill_size.value, gpu.chunked_prefill_size.value) == (512, 8192)
    assert (cpu.max_running_requests.value, gpu.max_running_requests.value) == (64, 256)
    assert cpu.mem_fraction.value < gpu.mem_fraction.value
    assert (cpu.device.value, gpu.device.value) == ("cpu", "cuda")
    assert [refusal.subject for refusal in cpu.device.refused] == ["cuda"]


@pytest.mark.parametrize(
    ("name", "size"),
    [("l4", 2048), ("a100-40gb", 4096), ("a100-80gb", 8192), ("h200", 8192), ("b200", 16384)],
)
def test_chunk_size_follows_device_memory(name: str, size: int) -> None:
    assert plan(hardware=assumed_hardware(name)).chunked_prefill_size.value == size


def test_sizes_that_follow_from_several_decisions() -> None:
    settled = plan(max_running_requests=3, chunked_prefill_size=8, max_model_len=50, page_size=16)
    assert (settled.num_rows, settled.most_step_tokens, settled.max_pages) == (4, 11, 4)


def test_asks_are_kept() -> None:
    asked = {
        "page_size": 1,
        "chunked_prefill_size": 7,
        "max_running_requests": 3,
        "mem_fraction": 0.5,
        "max_total_tokens": 9000,
    }
    settled = plan(enable_overlap=True, enable_prefix_cache=False, **asked)
    for name, value in asked.items():
        decision = getattr(settled, name)
        assert (decision.value, decision.asked) == (value, True), name
    assert (settled.overlap.value, settled.overlap.asked) == (True, True)
    assert (settled.prefix_cache.value, settled.prefix_cache.asked) == (False, True)


def test_attention_is_chosen_or_the_one_asked_for() -> None:
    assert plan().decode_attention.value == "torch_native"
    assert not plan().decode_attention.asked
    asked = plan(hardware=H100, attention_backend="torch_native")
    assert asked.prefill_attention.value == asked.decode_attention.value == "torch_native"
    assert asked.decode_attention.asked
    one = plan(hardware=H100, prefill_attention_backend="torch_native")
    assert one.prefill_attention.asked
    assert not one.decode_attention.asked
    with pytest.raises(UnsupportedError, match="Unknown attention backend 'nothing'"):
        plan(attention_backend="nothing")


@pytest.fixture
def odd_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends for a CPU that take few page sizes: `large` and `small` have none in common."""
    monkeypatch.setattr(ATTENTION_BACKENDS, "_entries", dict(ATTENTION_BACKENDS._entries))
    for name, sizes in (("large", {32, 128}), ("small", {1, 4})):
        capabilities = replace(TorchNativeBackend.capabilities, page_sizes=frozenset(sizes))
        kind = type(name, (TorchNativeBackend,), {"capabilities": capabilities})
        register_attention_backend(name)(kind)


@pytest.mark.usefixtures("odd_pages")
def test_a_named_backend_has_a_say_in_the_page_size() -> None:
    large = plan(attention_backend="large").page_size
    assert (large.value, large.asked) == (32, False)
    assert "large" in large.refused[0].reason
    assert plan(decode_attention_backend="small").page_size.value == 4
    assert plan(hardware=H100, attention_backend="large").page_size.value == 32
    assert plan(attention_backend="torch_native").page_size.value == 16
    with pytest.raises(UnsupportedError, match=r"large cannot serve prefill.*Does not take page"):
        plan(prefill_attention_backend="large", decode_attention_backend="small")


@pytest.mark.usefixtures("odd_pages")
def test_a_backend_that_serves_no_phase_is_told_of_both() -> None:
    with pytest.raises(UnsupportedError) as caught:
        plan(attention_backend="large", page_size=16)
    assert "large cannot serve prefill here" in str(caught.value)
    assert "large cannot serve decode here" in str(caught.value)
    assert str(caught.value).count("Does not take page size 16") == 1


def test_prefill_graphs_are_breakable_on_a_gpu_and_what_is_asked_is_kept() -> None:
    auto = plan(hardware=H100).prefill_graph
    assert (auto.value, auto.asked) == ("breakable", False)
    assert auto.refused[0].subject == "piecewise"
    for kind in ("breakable", "piecewise"):
        asked = plan(hardware=H100, prefill_graph=kind).prefill_graph
        assert (asked.value, asked.asked) == (kind, True)
    with pytest.raises(UnsupportedError, match=r"products of experts(.|\n)*breakable"):
        plan(persona(QWEN3_MOE), H100, prefill_graph="piecewise")
    assert plan(persona(QWEN3_MOE), H100).prefill_graph.value == "breakable"
    bare = replace(H100, packages=frozenset())
    assert "written in Triton" in plan(hardware=bare).prefill_graph.refused[0].reason
    with pytest.raises(UnsupportedError, match="writes Triton for a GPU") as caught:
        plan(hardware=bare, prefill_graph="piecewise")
    assert "pip install" in caught.value.remedy


def test_graphs_are_off_with_a_refusal_and_off_can_be_asked() -> None:
    settled = plan()
    for name in ("decode_graph", "prefill_graph", "cpu_graph"):
        decision = getattr(settled, name)
        assert (decision.value, decision.asked) == ("off", False)
        assert decision.refused[0].reason
        off = getattr(plan(**{name: "off"}), name)
        assert (off.value, off.asked, off.refused) == ("off", True, ())


def test_decode_graphs_have_sizes_where_they_can_be_captured() -> None:
    auto = plan(hardware=H100, max_running_requests=100).decode_graph
    assert auto.value[:5] == (1, 2, 4, 8, 16)
    assert auto.value[-1] == 100
    asked = plan(hardware=H100, decode_graph=(8, 2, 2)).decode_graph
    assert (asked.value, asked.asked) == ((2, 8), True)
    eager = plan(hardware=H100, decode_attention_backend="torch_native").decode_graph
    assert eager.value == "off"
    assert "torch_native cannot be captured" in eager.refused[0].reason
    with pytest.raises(UnsupportedError, match="At most 4 sequences"):
        plan(hardware=H100, decode_graph=(8,), max_running_requests=4)
    with pytest.raises(UnsupportedError, match="CUDA device"):
        plan(decode_graph=(1, 2))
    assert plan(hardware=H100, capture="all").decode_graph.value[0] == 1
    with pytest.raises(ConfigError, match="nothing is captured: the device is a cpu"):
        plan(capture="all")
    with pytest.raises(ConfigError, match="nothing is captured: both graphs are off"):
        plan(hardware=H100, capture="all", decode_graph="off", prefill_graph="off")
    plan(hardware=H100, capture="all", decode_graph="off")  # there are prefill graphs


def test_layers_whose_states_graphs_keep() -> None:
    none = plan(hardware=H100).hidden_state_layers
    assert (none.value, none.asked) == ((), False)
    last = persona(LLAMA).traits.num_layers
    asked = plan(persona(LLAMA), H100, hidden_state_layers=(2, -last - 1, -1, 0))
    assert (asked.hidden_state_layers.value, asked.hidden_state_layers.asked) == ((0, 2), True)
    traits, rows = persona(LLAMA).traits, asked.decode_graph.value[-1]
    fixed = fixed_bytes(traits, asked)["hidden states of graphs"]
    assert fixed == 2 * rows * traits.hidden_size * 2  # two layers of bfloat16
    assert "hidden states of graphs" not in fixed_bytes(traits, plan(persona(LLAMA), H100))


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"prefill_graph": "breakable"}, "prefill_graph breakable"),
        ({"prefill_graph": "piecewise"}, "prefill_graph piecewise"),
        ({"cpu_graph": "on"}, "cpu_graph on"),
    ],
)
def test_what_cannot_be_is_refused_by_name(asked, named: str) -> None:
    with pytest.raises(UnsupportedError, match=named) as caught:
        plan(**asked)
    assert caught.value.why
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("asked", "hardware", "model", "reason"),
    [
        ({"device": "cuda"}, CPU, LLAMA, "device cuda was asked"),
        ({"device": "cpu"}, H100, LLAMA, "the assumed hardware is cuda"),
        ({"dtype": "bfloat16"}, TURING, LLAMA, "compute capability 8.0"),
        ({"dtype": "float16"}, H100, GEMMA3, "65504"),
        ({"kv_cache_dtype": "float16"}, CPU, LLAMA, "differs from dtype float32"),
        ({"max_model_len": 16385}, CPU, LLAMA, "beyond the 16,384 positions"),
        ({"max_model_len": 100, "max_total_tokens": 99}, CPU, LLAMA, "cannot hold one sequence"),
        (
            {"attention_backend": "torch_native", "decode_attention_backend": "triton"},
            H100,
            LLAMA,
            "names both phases",
        ),
        ({"load_format": "gguf"}, CPU, LLAMA, "the checkpoint is safetensors"),
        ({"hidden_state_layers": (0,)}, CPU, LLAMA, "about decode graphs, and the device is a cpu"),
        (
            {"hidden_state_layers": (0,), "decode_graph": "off"},
            H100,
            LLAMA,
            "about decode graphs, and they are off",
        ),
        (
            {"hidden_state_layers": (0, 99)},
            H100,
            LLAMA,
            r"0,99 was asked, the model has \d+ layers",
        ),
        ({"numeric_canary": 9}, H100, QWEN3_MOE, "nearly tied"),
        ({"numeric_canary_mode": "raise"}, H100, LLAMA, "numeric_canary is off"),
        ({"split_prefill_layers": 999}, H100, LLAMA, "no prompt would be split"),
    ],
)
def test_conflicts(asked, hardware, model, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        plan(persona(model), hardware, **asked)


def test_the_numeric_canary_is_a_decision_and_has_its_memory() -> None:
    settled = plan(hardware=H100, numeric_canary=50, numeric_canary_mode="raise")
    decision = settled.numeric_canary
    assert (decision.value, decision.asked) == (50, True)
    assert "every 50 steps" in decision.reason
    assert "raise" in decision.reason
    traits = persona().traits
    without = fixed_bytes(traits, plan(hardware=H100))
    with_canary = fixed_bytes(traits, settled)
    assert set(with_canary) - set(without) == {"numeric canary"}
    assert with_canary["numeric canary"] > 0
    assert not plan(hardware=H100).numeric_canary.value
    experts = plan(persona(QWEN3_MOE), H100, numeric_canary=9, dtype="float32")
    assert experts.numeric_canary.value == 9


def test_every_conflict_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        plan(device="cuda", max_model_len=99999, kv_cache_dtype="float16", attention_backend="x")
    message = str(caught.value)
    assert message.startswith("4 of the options")
    for part in ("device cuda", "99,999", "kv_cache_dtype float16", "Unknown attention backend"):
        assert part in message


def test_window_layers_share_the_pool_and_the_plan_says_what_that_costs() -> None:
    settled = plan(persona(GEMMA3), H100).window_pool
    # 5 of 6 layers keep 16384 - 512 tokens too many: 2 KV heads x (16 + 16) x 2 bytes each
    assert f"save {5 * (16384 - 512) * 2 * 32 * 2 / 2**20:.1f} MiB" in settled.reason
    assert settled.value == "shared"
    assert settled.refused
    assert plan().window_pool.reason == "no window layers"


def test_dummy_weights_need_no_matching_format() -> None:
    assert plan(load_format="dummy").load_format.value == "dummy"
    assert plan(facts=CheckpointFacts(load_format="gguf")).load_format.value == "gguf"


def test_rocm_presents_itself_as_cuda() -> None:
    settled = cases.plan(hardware=assumed_hardware("mi300x"))
    assert settled.device.value == "cuda"
    assert settled.dtype.value == "bfloat16"
