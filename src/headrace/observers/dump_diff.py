"""Two dumps side by side: the first layer that differs, and by how much each one does.

Tokens are paired by sequence and position, so the runs may have cut their prompts, shared their
batches and taken their paths as they liked. Where the tokens of a sequence part, nothing behind is
compared: it should differ.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, sqrt
from typing import Any

import torch
from torch import Tensor

from headrace.base.errors import ConfigError
from headrace.base.shown import first_of
from headrace.observers.closeness import logit_errors, token_errors, worst
from headrace.observers.dump_files import LOGITS, DumpedStep, in_order, layer_of
from headrace.observers.dump_pairs import Pair, Parting, pair_tokens
from headrace.observers.tolerances import TOLERANCES, Tolerance

SHOWN = 6  # names of a list
COARSEST_FIRST = ("bfloat16", "float16", "float32")


@dataclass(slots=True, kw_only=True)
class Compared:
    """One tensor over all paired tokens; the first dump is the measure.

    What is no number in one dump differs without end from what is one in the other; what is none
    in both is left out.

    Attributes:
        tokens: paired ones, or rows of logits. max_abs: largest difference of two numbers.
        relative: size of all differences to that of all numbers. cosine: of the two, as one vector.
        worst: of the worst token, to its size; of logits the root mean square to their spread.
        allowed: bound on `worst`. differs: it is above, or a single logit is.
        sequence, position: the worst token.
    """

    name: str
    tokens: int = 0
    max_abs: float = 0.0
    relative: float = 0.0
    cosine: float = 1.0
    worst: float = 0.0
    allowed: float = 0.0
    differs: bool = False
    sequence: str = ""
    position: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpDiff:
    """What `headrace diff` tells.

    Attributes:
        dtype: whose tolerance holds. tensors: in the order in which a forward makes them.
        paths: of the steps of each dump. partings: where tokens differ.
        paired_by: "name" or "order" of the sequences. missing: tensors that one dump has alone.
        tokens: that were compared. alone: tokens of each dump that were not.
    """

    dtype: str
    tokens: int
    alone: tuple[int, int]
    paired_by: str
    paths: tuple[str, str]
    tensors: tuple[Compared, ...]
    partings: tuple[Parting, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def first(self) -> Compared | None:
        """The first tensor that differs."""
        return next((each for each in self.tensors if each.differs), None)

    @property
    def agrees(self) -> bool:
        return self.first is None

    def as_dict(self) -> dict[str, Any]:
        """Plain types, ready for JSON: what is infinite is `None`."""
        first = self.first
        tensors = [
            {name: None if value in (inf, -inf) else value for name, value in asdict(each).items()}
            for each in self.tensors
        ]
        return {
            "agrees": self.agrees,
            "first": None if first is None else first.name,
            **asdict(self),
            "tensors": tensors,
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.tokens} tokens paired by {self.paired_by}; paths {' and '.join(self.paths)}"
        if any(self.alone):
            yield "not in both: {} tokens of the first dump, {} of the second".format(*self.alone)
        for parting in self.partings:
            yield (
                f"{parting.sequence}: token {parting.token} and {parting.other} at position "
                f"{parting.position}; nothing from there on is compared"
            )
        if self.missing:
            yield f"in one dump only: {first_of(self.missing, SHOWN)}"
        yield ""
        yield (
            f"{'tensor':<12}{'tokens':>8}{'max abs':>11}{'relative':>11}{'cosine':>12}"
            f"{'worst':>11}{'allowed':>11}  worst token"
        )
        for each in self.tensors:
            mark = "  DIFFERS" if each.differs else ""
            yield (
                f"{each.name:<12}{each.tokens:>8}{each.max_abs:>11.2e}{each.relative:>11.2e}"
                f"{each.cosine:>12.8f}{each.worst:>11.2e}{each.allowed:>11.2e}"
                f"  {each.sequence} at {each.position}{mark}"
            )
        yield ""
        first = self.first
        if first is None:
            yield f"the dumps agree within the rounding of {self.dtype}"
        else:
            yield (
                f"{first.name} differs first: by {first.worst:.2g} of its size at position "
                f"{first.position} of {first.sequence} (allowed: {first.allowed:.2g})"
            )


def diff_dumps(ours: Sequence[DumpedStep], theirs: Sequence[DumpedStep]) -> DumpDiff:
    """Compare two dumps; the first is the measure.

    Raises:
        ConfigError: they have no token or no tensor in common.
    """
    pairing = pair_tokens(ours, theirs)
    pairs = pairing.pairs
    both = [frozenset().union(*(step.names for step in dump)) for dump in (ours, theirs)]
    known = in_order(sorted(both[0] & both[1]))
    if not pairs or not known:
        raise ConfigError(
            "The dumps have nothing in common",
            why="no token of the same sequence, position and id is in both, or no tensor",
            remedy="Dump the same prompts with the same names",
        )
    dtype = min((step.facts.dtype for step in (*ours, *theirs)), key=COARSEST_FIRST.index)
    return DumpDiff(
        dtype=dtype,
        tokens=sum(map(len, pairs.values())),
        alone=pairing.alone,
        paired_by=pairing.paired_by,
        paths=(_paths(ours), _paths(theirs)),
        tensors=tuple(_compare(name, pairs, ours, theirs, TOLERANCES[dtype]) for name in known),
        partings=tuple(pairing.partings),
        missing=tuple(in_order(sorted(both[0] ^ both[1]))),
    )


def _paths(steps: Sequence[DumpedStep]) -> str:
    return ", ".join(sorted({step.facts.path for step in steps}))


# ---- measuring


@dataclass(slots=True)
class _Sums:
    """Of squares and products over all pairs; and the largest difference, and that of logits in
    standard deviations."""

    furthest: float = 0.0
    difference: float = 0.0
    ours: float = 0.0
    theirs: float = 0.0
    product: float = 0.0
    single: float = 0.0

    def add(self, a: Tensor, b: Tensor) -> None:
        if not len(a):
            return
        a, b = a.double().flatten(), b.double().flatten()
        self.furthest = max(self.furthest, float((a - b).abs().max()))
        self.difference += float((a - b).square().sum())
        self.ours += float(a.square().sum())
        self.theirs += float(b.square().sum())
        self.product += float(a @ b)


def _compare(
    name: str,
    pairs: Mapping[tuple[int, int], Sequence[Pair]],
    ours: Sequence[DumpedStep],
    theirs: Sequence[DumpedStep],
    tolerance: Tolerance,
) -> Compared:
    result, sums = Compared(name=name), _Sums()
    kind, layer = layer_of(name)
    result.allowed = tolerance.logits
    if layer is not None:  # a stream is what the next layer gets
        result.allowed = tolerance.layer(layer + (kind == "stream"))
    for (mine, other), tokens in pairs.items():
        if name not in ours[mine].names or name not in theirs[other].names:
            continue
        a, b, kept = _rows(name, ours[mine], theirs[other], tokens)
        if not kept:
            continue
        finite = [each.flatten(1).isfinite().all(1) for each in (a, b)]
        both, one = finite[0] & finite[1], finite[0] ^ finite[1]
        if kind == LOGITS:
            errors, single, _ = logit_errors(b.float(), a.float(), both)
            sums.single = max(sums.single, float(single.max()))
        else:
            errors = token_errors(b, a, both)
        largest, place = map(float, worst(errors.masked_fill(one, torch.inf)))
        result.tokens += len(kept)
        sums.add(a[both], b[both])
        if one.any():
            sums.furthest = inf
        if largest >= result.worst:
            token = kept[int(place)]
            result.worst, result.sequence, result.position = largest, token.sequence, token.position
    result.max_abs = sums.furthest
    result.relative = sqrt(sums.difference / max(sums.ours, 1e-300))
    result.cosine = sums.product / max(sqrt(sums.ours * sums.theirs), 1e-300)
    result.differs = not (result.worst <= result.allowed and sums.single <= tolerance.single_logit)
    return result


def _rows(
    name: str, ours: DumpedStep, theirs: DumpedStep, tokens: Sequence[Pair]
) -> tuple[Tensor, Tensor, list[Pair]]:
    """The two tensors row by row of the tokens, and those of them that have rows."""
    a, b = ours.read(name)[0], theirs.read(name)[0]
    kept = list(tokens)
    mine, other = [pair.ours[1] for pair in kept], [pair.theirs[1] for pair in kept]
    if name == LOGITS:  # a row for each token that samples
        rows = [
            {token: row for row, token in enumerate(step.read("logit_token")[0].tolist())}
            for step in (ours, theirs)
        ]
        kept = [p for p in tokens if p.ours[1] in rows[0] and p.theirs[1] in rows[1]]
        mine = [rows[0][pair.ours[1]] for pair in kept]
        other = [rows[1][pair.theirs[1]] for pair in kept]
    if a.shape[1:] != b.shape[1:]:
        raise ConfigError(
            f"{name} has shape {list(a.shape[1:])} in one dump, {list(b.shape[1:])} in the other",
            remedy="Compare dumps of one model",
        )
    return a[mine], b[other], kept
