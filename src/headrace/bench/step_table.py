"""What `bench step` prints: times of decode steps and prefills beside their floors."""

from collections.abc import Iterator, Sequence

from headrace.base.layout import WIDEST, hanging
from headrace.bench.step import Decode, Prefill, Steady
from headrace.bench.trace import TraceReport


def table(found: Sequence[Decode | Prefill], width: int = WIDEST) -> str:
    """Decode by batch size, then prefill; notes are cut into lines of `width`."""
    lines: list[str] = []
    decodes = [entry for entry in found if isinstance(entry, Decode)]
    if decodes:
        lines += _decode_lines(decodes)
        notes = [
            *(_states_note(entry, entry.states) for entry in decodes if entry.states is not None),
            *_refusals(decodes),
            *(note for entry in decodes for note in _calls(entry)),
        ]
        for note in notes:
            lines += hanging(note, head="  ", indent=6, width=width)
    prefills = [entry for entry in found if isinstance(entry, Prefill)]
    if prefills:
        lines.append(
            f"{'prefill':>7}{'length':>9}{'ms':>10}{'floor':>9}{'ratio':>7}{'tokens/s':>11}  path"
        )
        lines += map(_prefill_line, prefills)
    return "\n".join(lines)


def _decode_lines(decodes: Sequence[Decode]) -> Iterator[str]:
    """Where nothing was traced there are no gaps to show."""
    traced = any(each.steady.trace or each.mixed_trace for each in decodes)
    gaps = f"{'gap us':>9}{'mixed gap':>11}" if traced else ""
    yield (
        f"{'decode':>7}{'context':>9}{'ms/step':>10}{'floor':>9}{'ratio':>7}"
        f"{'steady ms':>11}{'ratio':>7}{gaps}  path"
    )
    for entry in decodes:
        steady = entry.steady
        gaps = f"{_gap(steady.trace):>9}{_gap(entry.mixed_trace):>11}" if traced else ""
        yield (
            f"{entry.batch:>7}{entry.context:>9.0f}{entry.step * 1e3:>10.3f}"
            f"{entry.floor * 1e3:>9.3f}{entry.step / entry.floor:>7.2f}"
            f"{steady.median * 1e3:>11.3f}{steady.median / steady.floor:>7.2f}{gaps}"
            f"  {_paths(steady.paths)}"
        )


def _states_note(entry: Decode, states: Steady) -> str:
    more = states.median / entry.steady.median - 1
    return (
        f"{entry.batch}: every row with hidden states: steady {states.median * 1e3:.3f} ms, "
        f"{more:+.1%}, gap {_gap(states.trace)}, {_paths(states.paths)}"
    )


def _paths(paths: dict[str, int]) -> str:
    return ", ".join(f"{path} x{steps}" for path, steps in paths.items())


def _gap(trace: TraceReport | None) -> str:
    if trace is None:
        return "-"
    return "unseen" if trace.gap is None else f"{trace.gap:.1f}"


def _refusals(decodes: Sequence[Decode]) -> Iterator[str]:
    """Why better paths were not taken, each reason once with the batch sizes it holds for."""
    batches: dict[str, list[str]] = {}
    for entry in decodes:
        for reason in entry.steady.refused:
            batches.setdefault(reason, []).append(str(entry.batch))
    for reason, sizes in batches.items():
        yield f"{', '.join(sizes)}: not {reason}"


def _calls(entry: Decode) -> Iterator[str]:
    for name, trace in (("", entry.steady.trace), (", mixed", entry.mixed_trace)):
        if trace is not None:
            calls = ", ".join(f"{call} {count}" for call, count in sorted(trace.calls.items()))
            noted = calls or "no wait, no allocation, no pageable copy"
            yield f"{entry.batch}{name}: in {trace.turns} turns {noted}"


def _prefill_line(entry: Prefill) -> str:
    return (
        f"{entry.prompts:>7}{entry.length:>9}{entry.median * 1e3:>10.2f}{entry.floor * 1e3:>9.2f}"
        f"{entry.median / entry.floor:>7.2f}{entry.tokens_per_second:>11,.0f}"
        f"  {_paths(entry.paths)}"
    )
