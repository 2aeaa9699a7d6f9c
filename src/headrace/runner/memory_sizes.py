"""Bytes of everything that lies on a device, by formulas over traits and plan.

Weights and KV are counted exactly; activations and logits are the estimate that the budget sets
aside.
"""

from collections.abc import Mapping

from headrace.batch.rows import MAX_ROW_STOP_IDS
from headrace.config.persona import KvGroupTraits, ModelTraits
from headrace.config.plan import OFF, Plan
from headrace.execution.prefill_graph import BREAKABLE_SIZES, prefill_sizes
from headrace.memory.budget import (
    KvBudget,
    cpu_spendable_bytes,
    gpu_spendable_bytes,
    plan_kv_tokens,
)
from headrace.observers.kv_canary import record_bytes

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CANARY_TOKENS = 1024  # of a step that the numeric canary runs twice: its copies of KV need room
# Rows hold 6 int64/int32 and 6 float32 scalars, 3 flags and the stop ids besides the vocabulary.
_ROW_SCALAR_BYTES = 64 + 8 * MAX_ROW_STOP_IDS

NORMS_OF_LAYER = {"gemma3": 4}  # 2 for the families that are not named


def weight_bytes(traits: ModelTraits, dtype: str) -> dict[str, int]:
    """Bytes of every part of a decoder whose products run in `dtype`."""
    attention, hidden = traits.attention, traits.hidden_size
    query = attention.num_heads * attention.head_dim
    key = attention.num_kv_heads * attention.head_dim
    value = attention.num_kv_heads * attention.v_head_dim
    output = attention.num_heads * attention.v_head_dim
    attention_count = hidden * (query + key + value + output)
    norm_count = NORMS_OF_LAYER.get(traits.family, 2) * hidden
    if attention.qk_norm:
        norm_count += 2 * attention.head_dim
    if attention.qkv_bias:
        attention_count += query + key + value
    if attention.output_bias:
        attention_count += hidden
    mlp_count = 3 * hidden * traits.intermediate_size
    if traits.mlp_bias:
        mlp_count += 2 * traits.intermediate_size + hidden
    routed = len(traits.moe_layers)
    expert_bytes = router_bytes = 0
    if traits.moe is not None:
        experts = traits.moe.num_experts
        expert_bytes = experts * 3 * hidden * traits.moe.intermediate_size * ITEM_BYTES[dtype]
        router_bytes = experts * hidden * ITEM_BYTES["float32"]  # the choice is made in float32
    embedding = traits.vocab_size * hidden
    size = ITEM_BYTES[dtype]
    # norms that store deviations from 1 are kept in float32, or the small ones would be lost
    norm_size = size if traits.norm_offset == 0.0 else ITEM_BYTES["float32"]
    parts = {
        "embedding": embedding * size,
        "attention": attention_count * traits.num_layers * size,
        "mlp": mlp_count * (traits.num_layers - routed) * size,
        "experts": expert_bytes * routed,
        "routers": router_bytes * routed,
        "norms": (norm_count * traits.num_layers + hidden) * norm_size,
        "head": 0 if traits.tie_word_embeddings else embedding * size,
    }
    return {name: count for name, count in parts.items() if count}


def kv_bytes_per_token(traits: ModelTraits, dtype: str) -> int:
    """Bytes one token takes in the pools of all groups."""
    return sum(group_bytes_per_token(traits, group, dtype) for group in traits.kv_groups)


def canary_bytes_per_token(traits: ModelTraits, plan: Plan) -> int:
    """Bytes of the KV canary's records beside each place of the pools."""
    if plan.kv_canary.value == OFF:
        return 0
    return record_bytes(len(traits.kv_groups), plan.kv_canary_real_data.value)


def group_bytes_per_token(traits: ModelTraits, group: KvGroupTraits, dtype: str) -> int:
    """Bytes one token takes in the pool of one group."""
    attention = traits.attention
    heads = attention.num_kv_heads * (attention.head_dim + attention.v_head_dim)
    return len(group.layers) * heads * ITEM_BYTES[dtype]


def window_pool_saving(traits: ModelTraits, dtype: str, length: int) -> int:
    """Bytes a sequence of `length` tokens would save if window layers kept their window only."""
    return sum(
        group_bytes_per_token(traits, group, dtype) * max(0, length - group.window)
        for group in traits.kv_groups
        if group.window is not None
    )


def fixed_bytes(traits: ModelTraits, plan: Plan) -> dict[str, int]:
    """Bytes set aside besides weights and KV, by name: the `fixed` of `plan_kv_tokens`."""
    rows, attention = plan.num_rows, traits.attention
    width = (
        3 * traits.hidden_size  # residual, normed, output
        + 3 * traits.intermediate_size  # gate, up, their product
        + attention.num_heads * (attention.head_dim + attention.v_head_dim)
        + attention.num_kv_heads * (attention.head_dim + attention.v_head_dim)
    )
    if traits.moe is not None:  # of each chosen expert: its input, gate, up, their product, answers
        width += traits.moe.num_experts_per_tok * (
            3 * traits.hidden_size + 3 * traits.moe.intermediate_size
        )
    bytes_by_name = {
        "rows": rows * (8 * traits.vocab_size + _ROW_SCALAR_BYTES),
        "page tables": rows * plan.max_pages * 4 * len(traits.kv_groups),
        "activations": plan.most_step_tokens * width * ITEM_BYTES[plan.dtype.value],
        "logits": rows * traits.vocab_size * 4 * 3,  # raw, processed, probabilities
    }
    sizes, layers = plan.decode_graph.value, plan.hidden_state_layers.value
    if layers and not isinstance(sizes, str):
        states = len(layers) * sizes[-1] * traits.hidden_size
        bytes_by_name["hidden states of graphs"] = states * ITEM_BYTES[plan.dtype.value]
    if plan.numeric_canary.value:
        # before, by reference, shaken, by the path
        copies = 4 * kv_bytes_per_token(traits, plan.kv_cache_dtype.value)
        a_token = copies + width * ITEM_BYTES[plan.dtype.value]
        bytes_by_name["numeric canary"] = (
            canary_tokens(plan) * a_token + rows * traits.vocab_size * 4 * 4
        )
    if keeps_routing(plan):
        bytes_by_name["routed experts"] = _routing_bytes(traits, plan)
    return bytes_by_name


def spendable_bytes(plan: Plan, *, free: int, total: int) -> int:
    """What KV and buffers may take.

    Args:
        free: bytes of the device that nobody has taken, the weights being there. total: all of it.
    """
    fraction = plan.mem_fraction.value
    if plan.device.value == "cpu":
        return cpu_spendable_bytes(available=free, mem_fraction=fraction)
    return gpu_spendable_bytes(free_after_load=free, total=total, mem_fraction=fraction)


def kv_budget(
    traits: ModelTraits, plan: Plan, spendable: int, graph_bytes: Mapping[str, int] | None = None
) -> KvBudget:
    """The tokens that fit into so many bytes.

    Args:
        graph_bytes: what captured graphs will take, by name.

    Raises:
        CapacityError: no page fits, or fewer tokens than max_total_tokens asks for.
    """
    return plan_kv_tokens(
        spendable,
        fixed_bytes(traits, plan) | dict(graph_bytes or {}),
        kv_bytes_per_token(traits, plan.kv_cache_dtype.value),
        plan.page_size.value,
        kv_token_cap(plan),
        asked=plan.max_total_tokens.asked,
        canary_per_token=canary_bytes_per_token(traits, plan),
    )


def keeps_routing(plan: Plan) -> bool:
    """Whether the choice of experts leaves the layers."""
    return plan.routed_experts.value or plan.expert_distribution.value != OFF


def routing_tokens(plan: Plan) -> int:
    """Tokens of the largest step, padded as any path may pad it."""
    most = plan.most_step_tokens
    sizes = plan.decode_graph.value
    captured = () if isinstance(sizes, str) else sizes
    return max(most, *prefill_sizes(BREAKABLE_SIZES, most), *captured)


def _routing_bytes(traits: ModelTraits, plan: Plan) -> int:
    if traits.moe is None:
        return 0
    tokens, layers = routing_tokens(plan), len(traits.moe_layers)
    count = tokens * layers * traits.moe.num_experts_per_tok * 4
    if plan.expert_distribution.value != OFF:
        count += 2 * layers * traits.moe.num_experts * 8 + 3 * tokens * 8
    return count


def canary_tokens(plan: Plan) -> int:
    """The largest step that the numeric canary runs twice."""
    return max(CANARY_TOKENS, plan.max_running_requests.value)


def kv_token_cap(plan: Plan) -> int | None:
    """Tokens the pool need not exceed: what was asked, or on a CPU what running sequences can fill,
    their last pages counted whole. Memory that stays unused there is of more use to others."""
    if plan.max_total_tokens.value is not None:
        return plan.max_total_tokens.value
    if plan.device.value != "cpu":
        return None
    return plan.max_running_requests.value * plan.max_pages * plan.page_size.value
