"""What a backend can do and what a model asks of it, both as data, and where they do not meet."""

from collections.abc import Container
from dataclasses import dataclass
from enum import StrEnum

from headrace.base.decision import Refusal
from headrace.config.hardware import Hardware
from headrace.config.persona import AttentionTraits, KvGroupTraits, KvKind


class Phase(StrEnum):
    """PREFILL: rows may have many new tokens (extend and mixed steps). DECODE: one each."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCapabilities:
    """What one backend class takes. Sizes are any container of ints; `None` takes every size.

    Attributes:
        platforms: `Hardware.platform` it runs on; `None` for all.
        dtypes: of the queries. kv_dtypes: of the pool. mixed_dtypes: the two may differ.
        mixed_head_dims: keys and values may be of different dimensions.
        graph_decode, graph_prefill: its forward may be recorded into a graph.
        needs_exact_host_lengths: an upper bound in `ForwardBatch.bounds` is not enough for it.
        deterministic: a row's result has the same bits whatever else is in the batch.
        speculation: several unverified tokens a row.
    """

    kv_kinds: frozenset[KvKind]
    platforms: frozenset[str] | None
    dtypes: frozenset[str]
    kv_dtypes: frozenset[str]
    mixed_dtypes: bool
    page_sizes: Container[int] | None
    head_dims: Container[int] | None
    sliding_window: bool
    soft_cap: bool
    sinks: bool
    graph_decode: bool
    graph_prefill: bool
    needs_exact_host_lengths: bool
    deterministic: bool
    speculation: bool
    mixed_head_dims: bool = True

    def run_on(self, hardware: Hardware) -> bool:
        """Whether the platform is one of theirs."""
        return self.platforms is None or hardware.platform in self.platforms


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionNeed:
    """What the layers of one KV group ask of a backend in one phase.

    Attributes:
        num_heads, num_kv_heads: on this rank.
        dtype, kv_dtype: names without the prefix ("bfloat16").
        graph: the phase is to be captured into a graph.
        exact_host_lengths: the host knows the lengths, not only bounds on them.
    """

    phase: Phase
    kv_kind: KvKind
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    kv_dtype: str
    page_size: int
    window: int | None = None
    soft_cap: bool = False
    sinks: bool = False
    deterministic: bool = False
    graph: bool = False
    exact_host_lengths: bool = True
    speculation: bool = False

    @classmethod
    def of(
        cls,
        phase: Phase,
        group: KvGroupTraits,
        attention: AttentionTraits,
        *,
        dtype: str,
        kv_dtype: str,
        page_size: int,
        deterministic: bool = False,
        graph: bool = False,
    ) -> "AttentionNeed":
        return cls(
            phase=phase,
            kv_kind=group.kind,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            v_head_dim=attention.v_head_dim,
            dtype=dtype,
            kv_dtype=kv_dtype,
            page_size=page_size,
            window=group.window,
            soft_cap=attention.soft_cap is not None,
            sinks=attention.sinks,
            deterministic=deterministic,
            graph=graph,
        )


OTHER = "choose another attention backend"


def refusals(
    subject: str, capabilities: AttentionCapabilities, need: AttentionNeed, hardware: Hardware
) -> list[Refusal]:
    """Every reason why a backend with `capabilities` cannot serve `need` on `hardware`; on another
    platform that alone, since no remedy of the others would help."""
    if not capabilities.run_on(hardware):
        reason = f"does not run on {hardware.platform}, only on {_listed(capabilities.platforms)}"
        return [Refusal(subject=subject, reason=reason, remedy=OTHER)]
    return need_refusals(subject, capabilities, need)


def need_refusals(
    subject: str, capabilities: AttentionCapabilities, need: AttentionNeed
) -> list[Refusal]:
    """The reasons that lie in the model and the plan, whatever the hardware."""
    found: list[Refusal] = []

    def check(admitted: bool, reason: str, remedy: str = OTHER) -> None:
        if not admitted:
            found.append(Refusal(subject=subject, reason=reason, remedy=remedy))

    check(
        need.kv_kind in capabilities.kv_kinds,
        f"reads KV of kind {_listed(capabilities.kv_kinds)}, not {need.kv_kind}",
    )
    check(
        need.dtype in capabilities.dtypes,
        f"has no kernel for {need.dtype}",
        f"set dtype to one of: {_listed(capabilities.dtypes)}",
    )
    check(
        need.kv_dtype in capabilities.kv_dtypes,
        f"cannot read a KV cache of {need.kv_dtype}",
        f"set kv_cache_dtype to one of: {_listed(capabilities.kv_dtypes)}",
    )
    check(
        capabilities.mixed_dtypes or need.dtype == need.kv_dtype,
        f"needs queries ({need.dtype}) and KV cache ({need.kv_dtype}) of one dtype",
        "leave kv_cache_dtype at auto",
    )
    check(
        capabilities.mixed_head_dims or need.head_dim == need.v_head_dim,
        f"needs keys ({need.head_dim}) and values ({need.v_head_dim}) of one dimension",
    )
    check(
        capabilities.page_sizes is None or need.page_size in capabilities.page_sizes,
        f"does not take page size {need.page_size}",
        f"set page_size to one of: {_listed(capabilities.page_sizes)}",
    )
    for what, size in (("head", need.head_dim), ("value head", need.v_head_dim)):
        check(
            capabilities.head_dims is None or size in capabilities.head_dims,
            f"does not take a {what} dimension of {size}, only {_listed(capabilities.head_dims)}",
        )
    check(
        need.num_heads % need.num_kv_heads == 0,
        f"{need.num_heads} query heads cannot share {need.num_kv_heads} KV heads evenly",
        "choose another number of tensor-parallel ranks",
    )
    check(capabilities.sliding_window or need.window is None, "has no sliding window")
    check(capabilities.soft_cap or not need.soft_cap, "has no soft cap on attention logits")
    check(capabilities.sinks or not need.sinks, "has no attention sinks")
    check(
        capabilities.deterministic or not need.deterministic,
        "its results may differ in the last bits with the batch",
        f"leave deterministic off, or {OTHER}",
    )
    decodes = need.phase is Phase.DECODE
    check(
        not need.graph or (capabilities.graph_decode if decodes else capabilities.graph_prefill),
        f"cannot be captured into a {need.phase} graph",
        f"set {need.phase}_graph to off, or {OTHER}",
    )
    check(
        need.exact_host_lengths or not capabilities.needs_exact_host_lengths,
        "needs the exact lengths on the host, which only has bounds",
    )
    check(capabilities.speculation or not need.speculation, "does not verify speculated tokens")
    return found


def _listed(values: Container[int] | frozenset[str] | None) -> str:
    if isinstance(values, range):
        return f"{values.start} to {values.stop - 1}"
    return ", ".join(map(str, sorted(values))) if isinstance(values, frozenset) else str(values)
