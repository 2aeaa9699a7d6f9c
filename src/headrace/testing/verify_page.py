"""The report of `verify` as one page of HTML that needs nothing else: no script, no network."""

from collections.abc import Iterator, Sequence
from html import escape

from headrace.testing import plots
from headrace.testing.verify_report import Result, VerifyReport
from headrace.testing.verify_table import SHOWN, paths_text

STYLE = """
:root { --ink:#1c2733; --muted:#5d6b7a; --grid:#dfe5ea; --paper:#ffffff; --soft:#f4f6f8;
  --good:#1f7a4d; --bad:#b3261e; --second:#2b6cb0; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --ink:#e6edf3; --muted:#9aa8b6; --grid:#2f3a45;
  --paper:#12181f; --soft:#1a222b; --good:#4cc38a; --bad:#ff6b61; --second:#6cb2ff; } }
body { font:15px/1.5 system-ui,sans-serif; color:var(--ink); background:var(--paper);
  max-width:1180px; margin:2rem auto; padding:0 1.2rem; }
h1 { font-size:1.5rem; margin:0; } h2 { font-size:1.15rem; margin:2.2rem 0 .5rem; }
h3 { font-size:1rem; margin:1.4rem 0 .3rem; }
.verdict { font-size:1.1rem; padding:.6rem .9rem; border-left:6px solid; background:var(--soft);
  margin:1rem 0; }
.good { color:var(--good); } .bad { color:var(--bad); } .muted { color:var(--muted); }
.wide { overflow-x:auto; }
table { border-collapse:collapse; font-size:13px; width:100%; font-variant-numeric:tabular-nums; }
th,td { text-align:left; padding:.28rem .5rem; border-bottom:1px solid var(--grid);
  vertical-align:top; } th { color:var(--muted); font-weight:600; white-space:nowrap; }
.n { text-align:right; }
code { font:12.5px ui-monospace,monospace; background:var(--soft); padding:.05rem .3rem;
  white-space:pre-wrap; }
svg text { paint-order:stroke; stroke:var(--paper); stroke-width:3px; }
svg { max-width:100%; height:auto; font:12px system-ui,sans-serif; display:block; margin:.4rem 0; }
.box { border:1px solid var(--grid); border-left:4px solid var(--bad); padding:.2rem 1rem .7rem;
  margin:1rem 0; } li { margin:.15rem 0; }
"""
COLUMNS = (
    ("#", "n"),
    ("verdict", ""),
    ("path", ""),
    ("backend", ""),
    ("page", "n"),
    ("chunk", "n"),
    ("cache", ""),
    ("overlap", ""),
    ("retraction", ""),
    ("steps by path", ""),
    ("max |Δlogprob|", "n"),
    ("mean KL", "n"),
    ("top-1", "n"),
    ("excused", "n"),
    ("seconds", "n"),
)


def page_of(report: VerifyReport) -> str:
    """The whole page."""
    title = f"headrace verify {report.model}"
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style><body>"
        f"<h1>{escape(title)}</h1>{''.join(_sections(report))}</body></html>\n"
    )


def _sections(report: VerifyReport) -> Iterator[str]:
    color, word = ("good", "Passed") if report.passed else ("bad", "FAILED")
    yield (
        f'<p class="muted">{escape(report.dtype)} on {escape(report.device)}, against float32 '
        "eager: the same weights, one sequence at a time, no cache, operator by operator</p>"
        f'<p class="verdict {color}"><b>{word}</b>: {escape(report.summary)}</p>'
    )
    if report.common:
        yield f"<p>What fails has <b>{escape(report.common)}</b>; nothing that passes does.</p>"
    yield f'<h2>Configurations</h2><div class="wide">{_table(report.results)}</div>'
    yield (
        "<h2>Largest difference of a logprob</h2>"
        + plots.dots(
            [
                (f"{index}  {result.configuration}", result.max_difference, result.passed)
                for index, result in enumerate(report.results, 1)
            ],
            report.tolerance.logprob,
            label="largest |Δlogprob| over all places (logarithmic)",
        )
    )
    yield from _failures(report)
    yield _places(report)
    yield _held(report)
    yield _refused(report)
    yield _environment(report)


def _held(report: VerifyReport) -> str:
    waves = ", ".join(f"{count} {name}" for name, count in report.waves.items())
    bound = report.tolerance
    plain = report.plain
    usual = ["", "", ""]
    if plain is not None:
        usual = [f"{plain.logprob:.2g}", f"{plain.divergence:.2g}", f"{plain.other_tokens:.1%}"]
    lines = (
        (
            "difference of a logprob",
            "at each place, of the token and of the likeliest ones",
            f"{bound.logprob:.2g}",
            usual[0],
        ),
        (
            "mean KL",
            "nats, over the places of a configuration",
            f"{bound.divergence:.2g}",
            usual[1],
        ),
        (
            "excused tokens",
            "tokens that differ where a change of the logits within the bound makes "
            "the reference choose them too",
            f"{bound.excused:.1%}",
            usual[2],
        ),
    )
    head = "<th>what</th><th></th><th class=n>bound</th>"
    if plain is not None:
        head += f"<th class=n>plain {escape(report.dtype)} eager</th>"
    rows = "".join(
        f"<tr><td>{name}</td><td class=muted>{meaning}</td><td class=n>{held}</td>"
        + (f"<td class=n>{is_usual}</td>" if plain is not None else "")
        + "</tr>"
        for name, meaning, held, is_usual in lines
    )
    return (
        f"<h2>What was held</h2><p>{waves} prompts. The reference is forced along the tokens of "
        "each configuration, so that every place is compared with the same tokens before it.</p>"
        f"<table><tr>{head}</tr>{rows}</table>"
    )


def _table(results: Sequence[Result]) -> str:
    head = "".join(f'<th class="{kind}">{name}</th>' for name, kind in COLUMNS)
    return (
        f"<table><tr>{head}</tr>{''.join(map(_row, range(1, len(results) + 1), results))}</table>"
    )


def _row(number: int, result: Result) -> str:
    each = result.configuration
    verdict = '<b class="good">ok</b>' if result.passed else '<b class="bad">FAILED</b>'
    cells = (
        str(number),
        verdict,
        escape(each.path),
        escape(each.attention),
        str(each.page_size),
        str(each.chunk),
        each.cache,
        "yes" if each.overlap else "",
        "yes" if each.retraction else "",
        escape(paths_text(result)),
        plots.number_text(result.max_difference),
        plots.number_text(result.mean_divergence),
        f"{result.top_agreement:.1%}",
        f"{result.excused}/{result.places}",
        f"{result.seconds:.1f}",
    )
    pairs = zip(cells, COLUMNS, strict=True)
    inside = "".join(f'<td class="{kind}">{cell}</td>' for cell, (_, kind) in pairs)
    return f"<tr>{inside}</tr>"


def _failures(report: VerifyReport) -> Iterator[str]:
    if report.failed:
        yield "<h2>What failed</h2>"
    for number, result in enumerate(report.results, 1):
        if result.passed:
            continue
        problems = "".join(f"<li>{escape(problem)}</li>" for problem in result.problems[:SHOWN])
        if len(result.problems) > SHOWN:
            problems += f"<li class=muted>and {len(result.problems) - SHOWN} more</li>"
        yield (
            f'<div class="box"><h3>{number}  {escape(str(result.configuration))}</h3>'
            f"{_deep(result)}<ul>{problems}</ul>{_other(result)}</div>"
        )


def _other(result: Result) -> str:
    found = result.first_other
    if found is None:
        return ""
    sequence, other = found
    return (
        f"<p><b>First other token</b>: {escape(sequence.name)}, {escape(str(other))}<br>"
        f"<span class=muted>token ids before it: {', '.join(map(str, other.context))}</span></p>"
    )


def _deep(result: Result) -> str:
    if result.deep is None:
        return ""
    layers = result.deep.layers
    plot = ""
    if layers is not None:
        plot = plots.layer_lines(
            layers.keys, layers.values, layers.bounds, label="relative rms error by layer"
        )
    return f"<p><b>First divergence</b>: {escape(str(result.deep))}</p>{plot}"


def _places(report: VerifyReport) -> str:
    names = [each.name for each in report.results[0].sequences] if report.results else []
    rows = [
        (f"{number} {result.configuration}", [each.differences for each in result.sequences])
        for number, result in enumerate(report.results, 1)
    ]
    return (
        "<h2>Where</h2><p class=muted>A row per configuration, a block per sequence (g: greedy, "
        "s: sampled, number of the prompt), a cell per token of its output; its color tells the "
        "largest difference of a logprob there. A fault of one path or page size shows as a row, "
        "a hard prompt as a column.</p>"
        + plots.heat_map(rows, names, report.tolerance.logprob, label="difference by place")
    )


def _refused(report: VerifyReport) -> str:
    if not report.refused:
        return ""
    rows = "".join(
        f"<tr><td>{escape(', '.join(subjects))}</td><td>{escape(reason)}</td></tr>"
        for reason, subjects in report.refusals_by_reason().items()
    )
    return (
        "<h2>Not admitted</h2><table><tr><th>what</th><th>why, and what would admit it"
        f"</th></tr>{rows}</table>"
    )


def _environment(report: VerifyReport) -> str:
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>"
        for name, value in report.environment.items()
    )
    return f"<h2>Environment</h2><table>{rows}</table>"
