"""Text for people: tables, lines that fit their terminal, progress."""

import shutil
import sys
import textwrap
from collections.abc import Container, Iterator, Sequence

WIDEST = 140  # lines beyond that are hard to follow
USUAL = 100  # where nobody can say, as in a pipe
_LEAST = 24  # columns that text gets, however narrow the terminal


def output_width() -> int:
    """Columns of the terminal that standard output goes to, or what COLUMNS says."""
    return min(shutil.get_terminal_size((USUAL, 24)).columns, WIDEST)


def tell(line: str) -> None:
    """Progress, on standard error: what is measured or found goes elsewhere."""
    print(line, file=sys.stderr, flush=True)


def hanging(text: str, *, indent: int, width: int, head: str = "") -> list[str]:
    """`head` and `text`, cut between words into lines of `width`; those after the first begin with
    `indent` spaces."""
    return textwrap.wrap(
        text,
        width=max(width, indent + _LEAST),
        initial_indent=head,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Container[str] = ()
) -> Iterator[str]:
    """Lines of aligned columns, the names of the columns first and a rule under them.

    Args:
        numbers: columns whose cells stand at the right.
    """
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for cells in (columns, ["-" * width for width in widths], *rows):
        padded = (
            cell.rjust(width) if name in numbers else cell.ljust(width)
            for name, cell, width in zip(columns, cells, widths, strict=True)
        )
        yield "  ".join(padded).rstrip()
