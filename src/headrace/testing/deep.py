"""The first layer that diverges: keys and values of a failing sequence against the reference's.

The wave of the sequence runs once more in the same configuration, and after each step that serves
the sequence what lies at its slots is held, layer by layer, against what the reference wrote along
the same tokens. The first step, layer and position beyond the bound are named, and what that says:
keys of a layer come from the output of the layer before, its norm, projection and rotation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.engine.engine import Engine
from headrace.engine.outputs import RequestOutput
from headrace.testing.comparison import ComparedSequence, Tolerance, place_error
from headrace.testing.kv_watch import WatchedStep, kv_of, watched_steps
from headrace.testing.reference import REQUEST, Reference, Scored
from headrace.testing.workload import Wave

KeysValues = tuple[Tensor, Tensor]

# Errors of a key or value relative to the size of its layer's (root mean squares).
FLOORS = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1e-2}
FACTOR = 3.0  # times what plain eager's keys and values of a layer are off by
ALL_AGREE = "keys and values of all layers agree"
BEHIND = "it differs after them: attention or MLP of the last layer, last norm or head"
ALONE = 0.1  # share of the other's error below which keys or values count as wrong alone


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerErrors:
    """Largest error over the positions, by layer, and what it may be."""

    keys: tuple[float, ...]
    values: tuple[float, ...]
    bounds: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepFinding:
    """Where a sequence left the reference.

    Attributes:
        sequence: which. step: the first after which something was wrong, or that made the first
            wrong token; "" where neither was seen.
        layer, position: of the first wrong key or value; `None` where all agree.
        what: "K", "V" or "K and V". error: relative to the layer's own size. bound: of the error.
        meaning: what must have gone wrong. layers: errors after that step, or after the last one.
    """

    sequence: str
    step: str = ""
    layer: int | None = None
    position: int | None = None
    what: str = ""
    error: float = 0.0
    bound: float = 0.0
    meaning: str
    layers: LayerErrors | None = None

    def __str__(self) -> str:
        if self.layer is None:
            step = self.step and f", {self.step}"
            return f"{self.sequence}{step}: {self.meaning}"
        return (
            f"{self.sequence}, {self.step}: {self.what} of layer {self.layer}, position "
            f"{self.position}, rms error {self.error:.2g} ({self.bound:.2g} allowed): "
            f"{self.meaning}"
        )


def errors_of(ours: Tensor, theirs: Tensor) -> Tensor:
    """Relative root mean square errors by position, [n, size] each -> [n] float64 on the host.

    Relative to the vector's own size, or to the layer's where that is larger: the values of some
    positions are nearly nothing.
    """
    own = theirs.double().square().mean(1)
    scale = torch.maximum(own, own.mean()).clamp_min(1e-30)
    return ((ours.double() - theirs.double()).square().mean(1) / scale).sqrt().cpu()


def written_along(
    reference: Reference, wave: Wave, index: int, tokens: Sequence[int] | None
) -> tuple[list[KeysValues], Scored]:
    """What a reference writes for a prompt and `tokens`, or those it chooses, by layer, and what it
    says of them."""
    steps: list[WatchedStep] = []
    with watched_steps(reference.engine, REQUEST, steps.append):
        scored = reference.score(wave.prompts[index], wave.params[index], forced=tokens)
    layers = range(reference.engine.settled.persona.traits.num_layers)
    # Its pages are free by now, and nobody has taken them: one sequence runs at a time.
    return [kv_of(reference.engine, layer, steps[-1]) for layer in layers], scored


def plain_layer_bounds(
    plain: Reference, reference: Reference, wave: Wave, dtype: str
) -> tuple[float, ...]:
    """What keys and values of each layer may be off by: a few times what plain eager's are."""
    largest: Tensor | None = None
    for index in range(len(wave.prompts)):
        wanted, scored = written_along(reference, wave, index, None)
        found, _ = written_along(plain, wave, index, scored.picks)
        errors = torch.stack(
            [_pair_errors(a, b).amax() for a, b in zip(found, wanted, strict=True)]
        )
        largest = errors if largest is None else torch.maximum(largest, errors)
    assert largest is not None, "a wave has prompts"
    return tuple((FACTOR * largest + FLOORS[dtype]).tolist())


def _pair_errors(ours: KeysValues, theirs: KeysValues) -> Tensor:
    """[2, n]: keys, values."""
    return torch.stack([errors_of(a[: len(b)], b) for a, b in zip(ours, theirs, strict=True)])


class FirstWrong:
    """Looks at the steps of a sequence until something is wrong."""

    def __init__(self, engine: Engine, wanted: list[KeysValues], bounds: Sequence[float]) -> None:
        self._engine, self._wanted = engine, wanted
        self.bounds = torch.tensor(bounds, dtype=torch.float64)
        self._before: WatchedStep | None = None
        self._normed_keys = engine.settled.persona.traits.attention.qk_norm
        self.table = ""  # what a page table said that the host did not
        self.steps: dict[int, WatchedStep] = {}  # the first that brought the sequence to a length
        self.layers: LayerErrors | None = None
        self.step: WatchedStep | None = None
        self.layer = self.position = -1
        self.errors = (0.0, 0.0)  # of the key and the value there
        self.meaning = ""

    def take(self, step: WatchedStep) -> None:
        if self.step is not None:
            return
        self.steps.setdefault(step.length, step)
        self.table = self.table or step.table
        errors = self._errors(step)  # [L, 2, n]
        self.layers = LayerErrors(
            keys=tuple(errors[:, 0].amax(1).tolist()),
            values=tuple(errors[:, 1].amax(1).tolist()),
            bounds=tuple(self.bounds.tolist()),
        )
        wrong = ~(errors.amax(1) <= self.bounds[:, None])  # [L, n]; not a number is wrong
        if wrong.any():
            self.step = step
            self.layer = int(wrong.any(1).nonzero()[0])
            self.position = int(wrong[self.layer].nonzero()[0])
            key, value = errors[self.layer, :, self.position].tolist()
            self.errors = (key, value)
            self.meaning = self._meaning(step)
        self._before = step

    def _errors(self, step: WatchedStep) -> Tensor:
        found = []
        for layer, wanted in enumerate(self._wanted):
            ours = kv_of(self._engine, layer, step)
            shared = min(step.length, len(wanted[0]))
            found.append(
                _pair_errors(
                    (ours[0][:shared], ours[1][:shared]), (wanted[0][:shared], wanted[1][:shared])
                )
            )
        return torch.stack(found)

    @property
    def what(self) -> str:
        key, value = self.errors
        if value <= ALONE * key:
            return "K"
        return "V" if key <= ALONE * value else "K and V"

    def _meaning(self, step: WatchedStep) -> str:
        if self.table:
            return f"the page table is wrong: {self.table}"
        if self.position < step.start:
            return self._meaning_of_old(step)
        if self.what == "K":
            return "keys alone: the position, the rotation or the norm of keys"
        if self.what == "V" and self._normed_keys:  # which forget the size of what they come from
            return "values alone: their projection, their slot, or the size of its input: a norm"
        if self.what == "V":
            return "values alone: their projection or where they were written"
        if self.layer == 0:
            return "wrong from the start: the token, its embedding, or the slot it was written to"
        before = self.layer - 1
        return f"layer {before} went wrong: its attention, MLP or norms"

    def _meaning_of_old(self, step: WatchedStep) -> str:
        place = self.position // self._engine.scheduler.keeper.page_size
        before = self._before
        if before is None or before.length <= self.position:
            return f"it was there before the step: {self._meaning_of_cached()}"
        if before.pages[place] == step.pages[place]:
            return "it was right after the step before: something else has written over it"
        return "it was right on another page: what was put in its place after a retraction is not"

    def _meaning_of_cached(self) -> str:
        if self.layer == 0:
            return "the prefix cache gave a wrong page, or too many, or was filled wrongly"
        # The page is the right one, since the layers before are right.
        return f"layer {self.layer - 1} went wrong when the prefix cache was filled"


def finding_of(first: FirstWrong, compared: ComparedSequence, tolerance: Tolerance) -> DeepFinding:
    """What was found, in words; where keys and values all agree, what is left."""
    if first.step is None:
        place, left = _left(compared, tolerance)
        step = None if place is None else first.steps.get(compared.prompt_tokens + place)
        if first.table:
            left = f"the page table is wrong: {first.table}"
        return DeepFinding(
            sequence=compared.name,
            step="" if step is None else str(step),
            meaning=f"{ALL_AGREE}; {left}",
            layers=first.layers,
        )
    return DeepFinding(
        sequence=compared.name,
        step=str(first.step),
        layer=first.layer,
        position=first.position,
        what=first.what,
        error=max(first.errors),
        bound=float(first.bounds[first.layer]),
        meaning=first.meaning,
        layers=first.layers,
    )


def _left(compared: ComparedSequence, tolerance: Tolerance) -> tuple[int | None, str]:
    """The first wrong place of the output, and what can be wrong behind the last keys and values.

    The token at a place is made by the step that brings the sequence to that length.
    """
    differences = enumerate(compared.differences)
    place = next((at for at, each in differences if not each <= tolerance.logprob), None)
    if place is not None:
        return place, BEHIND
    if compared.differences and compared.other is not None:
        sampling = "what differs is sampling (penalties, filters, noise, seed)"
        return compared.other.place, f"logprobs agree too: {sampling}"
    return None, f"it fails otherwise: {compared.problem or 'many places are a little off'}"


def behind_the_layers(
    ours: RequestOutput, scored: Scored, last: int, *, tolerance: Tolerance, bound: float
) -> str:
    """Whether the first place that is off has a right state before the head; "" where none is off.

    Args:
        ours, scored: with states, along the same tokens. last: number of the last layer.
        bound: of the error of a state.
    """
    output = ours.outputs[0]
    assert output.logprobs is not None, "every request asks for them"
    assert output.hidden_states is not None, "they were asked"
    assert scored.states is not None, "they were asked"
    errors = errors_of(output.hidden_states.states[:, -1].to(scored.states), scored.states)
    for entries, theirs, error in zip(output.logprobs, scored.logprobs, errors, strict=True):
        found = {token: entry.logprob for token, entry in entries.items()}
        if place_error(found, theirs).difference <= tolerance.logprob:
            continue
        if error <= bound:
            return f"{ALL_AGREE}, and so do the states behind them: the head, or the row it takes"
        return (
            f"{ALL_AGREE}, the state behind layer {last} does not (rms error {error:.2g}, "
            f"{bound:.2g} allowed): attention or MLP of layer {last}, or the last norm"
        )
    return ""
