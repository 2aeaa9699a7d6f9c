"""The pools of a runner, as its plan has them: KV, the canary beside it, page tables."""

import torch

from headrace.config.persona import ModelTraits
from headrace.config.plan import OFF, Plan
from headrace.memory.arena import Arena
from headrace.memory.kv_pool import MHATokenToKVPool
from headrace.memory.req_to_token import ReqToTokenPool
from headrace.observers.kv_canary import KvCanary


def build_kv_pool(
    plan: Plan, traits: ModelTraits, arena: Arena, num_pages: int
) -> MHATokenToKVPool:
    """One pool for all layers, those with windows too; `num_pages`: page 0 included."""
    dtype: torch.dtype = getattr(torch, plan.kv_cache_dtype.value)
    return MHATokenToKVPool(
        arena,
        num_layers=traits.num_layers,
        num_pages=num_pages,
        page_size=plan.page_size.value,
        num_kv_heads=traits.attention.num_kv_heads,
        head_dim=traits.attention.head_dim,
        v_head_dim=traits.attention.v_head_dim,
        dtype=dtype,
    )


def build_kv_canary(
    plan: Plan, traits: ModelTraits, pool: MHATokenToKVPool, arena: Arena
) -> KvCanary | None:
    """The canary of a pool; `None` where the plan has none."""
    if plan.kv_canary.value == OFF:
        return None
    most = plan.most_step_tokens
    return KvCanary(
        arena,
        pool,
        {group.name: group.layers for group in traits.kv_groups},
        real_data=plan.kv_canary_real_data.value,
        max_sequences=plan.num_rows + -(-most // plan.max_model_len.value),
        max_tokens=most,
    )


def build_page_tables(plan: Plan, traits: ModelTraits, arena: Arena) -> ReqToTokenPool:
    """A table per KV group, [rows and the padding row, pages of the longest sequence]."""
    return ReqToTokenPool(
        arena,
        num_rows=plan.num_rows,
        max_pages=plan.max_pages,
        groups=tuple(group.name for group in traits.kv_groups),
    )
