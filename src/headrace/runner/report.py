"""Persona, hardware, decisions and memory for people (`render`) and for programs (`as_dict`)."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

from headrace.base.decision import Decision
from headrace.base.layout import hanging
from headrace.config.hardware import GIB, Hardware
from headrace.config.persona import LayerTraits, ModelTraits, Persona
from headrace.config.plan import Plan, RopePlan
from headrace.runner.memory_table import MemoryTable
from headrace.version import __version__

LISTED_SIZES = 4  # a longer list would widen the column of values for everybody
SCHEMA = 1  # of `as_dict`; grows when a key changes its meaning or goes
DECIDED_AT_START = ("weight_format", "operators", "kv_tokens")  # only the device at hand can tell


class Explained(Protocol):
    """What there is to show; `measured` is empty before a start."""

    @property
    def persona(self) -> Persona: ...
    @property
    def hardware(self) -> Hardware: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def memory(self) -> MemoryTable: ...
    @property
    def measured(self) -> Sequence[Decision[Any]]: ...


def render(explained: Explained, *, width: int = 100) -> str:
    """Plain text, in lines of about `width` characters."""
    width -= 2  # of the indent below the titles
    decisions = (*explained.plan, *_measured(explained))
    sections = (
        ("Persona", _persona_lines(explained.persona)),
        ("Hardware", _hardware_lines(explained.hardware)),
        ("Plan", _decision_lines(decisions, width)),
        ("Memory", _memory_lines(explained.memory, width)),
    )
    return "\n\n".join(
        "\n".join((title, *(f"  {line}".rstrip() for line in lines))) for title, lines in sections
    )


def summary(explained: Explained) -> str:
    """One line: device, dtype, context, KV tokens."""
    plan = explained.plan
    measured = {decision.name: decision.value for decision in explained.measured}
    tokens = measured.get("kv_tokens", explained.memory.tokens)
    return (
        f"{plan.device.value} ({explained.hardware.name}), {plan.dtype.value}, "
        f"context {plan.max_model_len.value:,}, KV tokens {tokens:,}"
    )


def as_dict(explained: Explained) -> dict[str, Any]:
    """Everything in plain types, ready for JSON; keys stay within one `schema`."""
    memory = explained.memory
    return {
        "schema": SCHEMA,
        "headrace": __version__,
        "persona": asdict(explained.persona),
        "hardware": asdict(explained.hardware) | {"packages": sorted(explained.hardware.packages)},
        "decisions": [_decision_dict(decision) for decision in explained.plan],
        "measured": [_decision_dict(decision) for decision in explained.measured],
        "decided_at_start": [] if explained.measured else list(DECIDED_AT_START),
        "memory": {
            "device_bytes": memory.device_bytes,
            "weights": dict(memory.weights),
            "weight_bytes": memory.weight_bytes,
            "kv_bytes_per_token": memory.kv_bytes_per_token,
            "kv_tokens": memory.tokens,
            "reason": memory.reason,
            "shortage": memory.shortage,
            "lines": [asdict(line) for line in memory.lines],
        },
    }


def _measured(explained: Explained) -> Iterator[Decision[Any]]:
    if explained.measured:
        yield from explained.measured
    else:
        for name in DECIDED_AT_START:
            yield Decision(name=name, value="-", reason="decided at start, on the device")


def _persona_lines(persona: Persona) -> Iterator[str]:
    traits, place = persona.traits, persona.coordinates
    attention = traits.attention
    yield f"family      {traits.family}, {traits.num_layers} layers, hidden {traits.hidden_size:,}"
    heads = f"{attention.num_heads} heads over {attention.num_kv_heads} KV heads"
    habits = [
        name
        for name, present in (
            ("qk norm", attention.qk_norm),
            ("qkv bias", attention.qkv_bias),
            ("output bias", attention.output_bias),
            ("sinks", attention.sinks),
            (f"soft cap {attention.soft_cap}", attention.soft_cap is not None),
        )
        if present
    ]
    yield f"attention   {', '.join([heads, f'head dim {attention.head_dim}', *habits])}"
    yield f"layers      {_layer_kinds(traits)}"
    yield f"mlp         {traits.intermediate_size:,}, {traits.activation}"
    if traits.moe is not None:
        moe, count = traits.moe, len(traits.moe_layers)
        normed = "weights made to sum to 1" if moe.norm_topk_prob else "weights as they come"
        yield (
            f"experts     {moe.num_experts} of {moe.intermediate_size:,}, "
            f"{moe.num_experts_per_tok} for each token, in {count} layers; {normed}"
        )
    for name, rope in traits.ropes.items():
        factor = f", factor {rope.factor:g}" if rope.factor is not None else ""
        yield f"rope        {name}: {rope.kind}, theta {rope.theta:,.0f}{factor}"
    tied = "tied to the embedding" if traits.tie_word_embeddings else "of its own"
    cap = f", soft cap {traits.final_soft_cap:g}" if traits.final_soft_cap is not None else ""
    yield f"vocabulary  {traits.vocab_size:,}, head {tied}{cap}"
    yield f"positions   {traits.max_position:,}"
    yield (
        f"role        {persona.role}, tp {place.tp_rank}/{place.tp_size}, "
        f"pp {place.pp_rank}/{place.pp_size}, dp {place.dp_rank}/{place.dp_size}, "
        f"ep {place.ep_rank}/{place.ep_size}"
    )


def _layer_kinds(traits: ModelTraits) -> str:
    def kind(layer: LayerTraits) -> str:
        return "full" if layer.window is None else f"window {layer.window:,}"

    counts: dict[str, int] = {}
    for layer in traits.layers:
        counts[kind(layer)] = counts.get(kind(layer), 0) + 1
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _hardware_lines(hardware: Hardware) -> Iterator[str]:
    units = "cores" if hardware.platform == "cpu" else "multiprocessors"
    capability = ".".join(map(str, hardware.capability)) if any(hardware.capability) else ""
    origin = "assumed" if hardware.assumed else "detected"
    yield f"device      {hardware.name} ({origin}), {f'{hardware.platform} {capability}'.strip()}"
    yield f"memory      {hardware.memory_bytes / GIB:,.1f} GiB, {hardware.units} {units}"
    if hardware.bandwidth:
        rate = f", {hardware.matrix_rate / 1e12:,.0f} TFLOP/s" if hardware.matrix_rate else ""
        yield f"data sheet  {hardware.bandwidth / 1e12:,.2f} TB/s{rate}"
    yield f"packages    {', '.join(sorted(hardware.packages)) or 'none'}"


def _decision_lines(decisions: tuple[Decision[Any], ...], width: int) -> Iterator[str]:
    name_width = max(len(decision.name) for decision in decisions)
    values = [_value_text(decision) for decision in decisions]
    value_width = max(map(len, values))
    yield f"{'decision':<{name_width}}  {'value':<{value_width}}  {'from':<5}  reason"
    for decision, value in zip(decisions, values, strict=True):
        origin = "asked" if decision.asked else "auto"
        head = f"{decision.name:<{name_width}}  {value:<{value_width}}  {origin:<5}  "
        yield from hanging(decision.reason, head=head, indent=len(head), width=width)
        for refusal in decision.refused:
            text, head = f"not {refusal}", " " * (name_width + 2)
            yield from hanging(text, head=head, indent=name_width + 6, width=width)


def _memory_lines(memory: MemoryTable, width: int) -> Iterator[str]:
    for line in str(memory).splitlines():
        notes = line.rfind("MiB  ")
        yield from hanging(line, indent=notes + len("MiB  ") if notes > 0 else 2, width=width)


def decision_line(decision: Decision[Any]) -> str:
    """A decision as one line of the log, its value written as in the table of the plan."""
    return str(replace(decision, value=_value_text(decision)))


def decision_lines(decisions: Iterable[Decision[Any]]) -> Iterator[str]:
    """Decisions as lines of the log, each with its refusals behind it; what is off because nobody
    asked for it stands together in one line at the end."""
    off = []
    for decision in decisions:
        if _is_off(decision):
            off.append(decision.name)
            continue
        yield decision_line(decision)
        for refusal in decision.refused:
            yield f"{decision.name}: not {refusal}"
    if off:
        yield f"not asked for, so off (headrace explain says more): {', '.join(off)}"


def _is_off(decision: Decision[Any]) -> bool:
    asked = decision.asked or decision.refused
    return not asked and _value_text(decision) in ("off", "none", "0")


def _value_text(decision: Decision[Any]) -> str:
    value = _plain(decision.value)
    if isinstance(value, dict):  # of ropes the names, of sampling defaults the numbers too
        entries = value.items()
        shown = (name if isinstance(of, dict) else f"{name} {of}" for name, of in entries)
        return ", ".join(shown) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "as fits"
    if isinstance(value, list):
        if len(value) > LISTED_SIZES:
            return f"{value[0]}..{value[-1]} ({len(value)} sizes)"
        return ",".join(map(str, value)) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, RopePlan):
        return asdict(value)
    return list(value) if isinstance(value, tuple) else value


def _decision_dict(decision: Decision[Any]) -> dict[str, Any]:
    return {
        "name": decision.name,
        "value": _plain(decision.value),
        "asked": decision.asked,
        "reason": decision.reason,
        "refused": [asdict(refusal) for refusal in decision.refused],
    }
