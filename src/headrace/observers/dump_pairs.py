"""Which tokens of two dumps belong together: those of one sequence, position and id."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.observers.dump_files import DumpedStep

Place = tuple[int, int]
"""A step of a dump, and a token of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """A sequence whose tokens differ from `position` on."""

    sequence: str
    position: int
    token: int
    other: int


@dataclass(frozen=True, slots=True)
class Pair:
    """One token in both dumps."""

    sequence: str
    position: int
    ours: Place
    theirs: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """All tokens that both dumps have.

    Attributes:
        paired_by: "name" or "order" of the sequences.
        pairs: by the steps of the two dumps.
        partings: where the tokens of a sequence differ.
        alone: tokens of each dump that have no pair.
    """

    paired_by: str
    pairs: dict[tuple[int, int], list[Pair]]
    partings: list[Parting]
    alone: tuple[int, int]


def pair_tokens(ours: Sequence[DumpedStep], theirs: Sequence[DumpedStep]) -> Pairing:
    """Pair the tokens of every sequence up to where they part."""
    a, b = _index(ours), _index(theirs)
    paired_by, names = _paired_names(a, b)
    partings: list[Parting] = []
    pairs: dict[tuple[int, int], list[Pair]] = defaultdict(list)
    for mine, other in names:
        for pair in _common(mine, a[mine], b[other], partings):
            pairs[pair.ours[0], pair.theirs[0]].append(pair)
    common = sum(map(len, pairs.values()))
    return Pairing(
        paired_by=paired_by,
        pairs=dict(pairs),
        partings=partings,
        alone=(_count(a) - common, _count(b) - common),
    )


@dataclass(frozen=True, slots=True)
class _Token:
    """Where a token lies, and its id."""

    place: Place
    id: int


_Index = dict[str, dict[int, _Token]]
"""sequence -> position -> token; of one that ran twice, as after a retraction, the last."""


def _index(steps: Sequence[DumpedStep]) -> _Index:
    found: _Index = defaultdict(dict)
    for number, step in enumerate(steps):
        columns = step.read("sequence", "positions", "input_ids", "live")
        for place, (sequence, position, token, live) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            if live:
                name = step.facts.sequences[sequence]
                found[name][position] = _Token((number, place), token)
    return found


def _count(index: _Index) -> int:
    return sum(map(len, index.values()))


def _paired_names(a: _Index, b: _Index) -> tuple[str, list[tuple[str, str]]]:
    """By name where some name is in both, else in the order in which they came."""
    common = [(name, name) for name in a if name in b]
    return ("name", common) if common else ("order", list(zip(a, b, strict=False)))


def _common(
    sequence: str, a: dict[int, _Token], b: dict[int, _Token], partings: list[Parting]
) -> Iterator[Pair]:
    """Tokens of a sequence that both have, up to where they part."""
    for position in sorted(a.keys() & b.keys()):
        mine, other = a[position], b[position]
        if mine.id != other.id:
            partings.append(
                Parting(sequence=sequence, position=position, token=mine.id, other=other.id)
            )
            return
        yield Pair(sequence, position, mine.place, other.place)
