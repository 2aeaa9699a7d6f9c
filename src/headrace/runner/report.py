"""What `headrace explain` and `LLM.explain()` show: persona, hardware, decisions, memory.

The text is for people; `as_dict` is the same, complete, with keys that stay.
"""

import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from headrace.base.decision import Decision
from headrace.checkpoint.names import resolve_model
from headrace.checkpoint.opening import open_checkpoint
from headrace.config.engine_config import EngineConfig
from headrace.config.hardware import GIB, Hardware, assumed_hardware
from headrace.config.persona import LayerTraits, ModelTraits, Persona
from headrace.config.plan import Plan, RopePlan
from headrace.runner.detect import detect
from headrace.runner.memory_table import MemoryTable, memory_table
from headrace.runner.persona import facts_of, persona_of
from headrace.runner.resolve import resolve
from headrace.version import __version__

SCHEMA = 1  # of `as_dict`; grows when a key changes its meaning or goes
MEASURED = ("kv_tokens",)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """Everything decided for one runner, and why.

    Attributes:
        measured: decisions of the runner that only measuring could tell; empty before the start.
    """

    config: EngineConfig
    persona: Persona
    hardware: Hardware
    plan: Plan
    memory: MemoryTable
    measured: tuple[Decision[Any], ...] = ()

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = 100) -> str:
        """The report as plain text, lines of at most about `width` characters."""
        sections = (
            ("Persona", _persona_lines(self.persona)),
            ("Hardware", _hardware_lines(self.hardware)),
            ("Plan", _decision_lines((*self.plan, *self._measured()), width)),
            ("Memory", iter(str(self.memory).splitlines())),
        )
        blocks = [f"{self.config.model}, headrace {__version__}"]
        for title, lines in sections:
            blocks.append("\n".join((title, *(f"  {line}".rstrip() for line in lines))))
        return "\n\n".join(blocks)

    def summary(self) -> str:
        """One line: device, dtype, context, KV tokens."""
        tokens = {decision.name: decision.value for decision in self.measured}.get("kv_tokens")
        shown = f"{self.memory.tokens:,} (planned)" if tokens is None else f"{tokens:,}"
        return (
            f"{self.config.model} on {self.plan.device.value} ({self.hardware.name}), "
            f"{self.plan.dtype.value}, context {self.plan.max_model_len.value:,}, "
            f"KV tokens {shown}"
        )

    def as_dict(self) -> dict[str, Any]:
        """The report in plain types, ready for JSON."""
        return {
            "schema": SCHEMA,
            "headrace": __version__,
            "asked": asdict(self.config),
            "persona": asdict(self.persona),
            "hardware": asdict(self.hardware) | {"packages": sorted(self.hardware.packages)},
            "decisions": [_decision_dict(decision) for decision in self.plan],
            "measured": [_decision_dict(decision) for decision in self.measured],
            "decided_at_start": [] if self.measured else list(MEASURED),
            "memory": {
                "device_bytes": self.memory.device_bytes,
                "weights": dict(self.memory.weights),
                "weight_bytes": self.memory.weight_bytes,
                "kv_bytes_per_token": self.memory.kv_bytes_per_token,
                "kv_tokens": self.memory.tokens,
                "reason": self.memory.reason,
                "shortage": self.memory.shortage,
                "lines": [asdict(line) for line in self.memory.lines],
            },
        }

    def _measured(self) -> Iterator[Decision[Any]]:
        if self.measured:
            yield from self.measured
        else:
            for name in MEASURED:
                yield Decision(name=name, value="-", reason="decided at start, from free memory")


def explain(config: EngineConfig, *, assume: str | None = None) -> PlanReport:
    """Plan without loading weights: reads the config and the headers of the tensors only.

    Args:
        assume: name of hardware to plan for ("h100-80gb") in place of the one that is here.

    Raises:
        HeadraceError: the model is not found, not supported, or the asks conflict.
    """
    checkpoint = open_checkpoint(resolve_model(config.model, config.revision), weights=False)
    persona = persona_of(checkpoint.config)
    hardware = detect(config.device) if assume is None else assumed_hardware(assume)
    plan = resolve(config, persona, hardware, checkpoint=facts_of(checkpoint))
    return PlanReport(
        config=config,
        persona=persona,
        hardware=hardware,
        plan=plan,
        memory=memory_table(persona, hardware, plan),
    )


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
    values = [_plain(decision.value) for decision in decisions]
    value_width = max(len(_value_text(value)) for value in values)
    indent = name_width + value_width + 10
    yield f"{'decision':<{name_width}}  {'value':<{value_width}}  {'from':<5} reason"
    for decision, value in zip(decisions, values, strict=True):
        origin = "asked" if decision.asked else "auto"
        head = f"{decision.name:<{name_width}}  {_value_text(value):<{value_width}}  {origin:<5} "
        yield from _wrapped(head, decision.reason, indent, width)
        for refusal in decision.refused:
            yield from _wrapped(" " * indent, f"- not {refusal}", indent + 2, width)


def _wrapped(head: str, text: str, indent: int, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width=max(width - 2, indent + 40),
        initial_indent=head,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [head]


def _value_text(value: Any) -> str:
    if isinstance(value, dict):  # ropes
        return ", ".join(value)
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "as fits"
    if isinstance(value, list):
        return ",".join(map(str, value))
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
