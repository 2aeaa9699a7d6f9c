"""Taps and observers: their order, what they leave, and nothing without them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from headrace.batch.facts import BatchFacts, Bucket
from headrace.batch.forward_batch import ForwardBatch, HostBounds
from headrace.batch.forward_mode import ForwardMode
from headrace.observers.step_observer import Evidence, ForwardRun, Observers
from headrace.observers.tap import NO_TAPS, Taps

BATCH = ForwardBatch(
    mode=ForwardMode.DECODE,
    rows=torch.zeros(1, dtype=torch.int64),
    bounds=HostBounds(seq_lens=[1], extend_lens=[1]),
    facts=BatchFacts(mode=ForwardMode.DECODE, tokens=1, live_tokens=1, sequences=1, max_length=1),
)
RUN = ForwardRun(batch=BATCH, path="eager", bucket=Bucket(tokens=1, sequences=1))


class Noted:
    """Writes down when it is called; as a tap and as an observer."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def before(self, batch: ForwardBatch) -> None:
        self.calls.append(f"before {self.name}")

    def after(self, batch: ForwardBatch) -> None:
        self.calls.append(f"after {self.name}")

    @contextmanager
    def around(self, run: ForwardRun, evidence: Evidence) -> Iterator[None]:
        self.before(run.batch)
        yield
        self.after(run.batch)
        evidence.tensors[f"{self.name}.path"] = torch.tensor([len(run.path)])

    def take(self, host: Mapping[str, torch.Tensor]) -> None:
        self.calls.append(f"took {int(host[f'{self.name}.path'])} for {self.name}")


ORDER = ["before a", "before b", "after b", "after a"]


def test_taps_lie_around_each_other() -> None:
    calls: list[str] = []
    taps = Taps([Noted("a", calls), Noted("b", calls)])
    taps.before(BATCH)
    taps.after(BATCH)
    assert calls == ORDER
    NO_TAPS.before(BATCH)
    NO_TAPS.after(BATCH)
    assert calls == ORDER


def test_observers_lie_around_each_other_and_get_back_what_they_left() -> None:
    calls: list[str] = []
    observers = Observers([Noted("a", calls), Noted("b", calls)])
    with observers.around(RUN) as evidence:
        assert calls == ORDER[:2]
    assert calls == ORDER
    assert set(evidence.tensors) == {"a.path", "b.path"}
    observers.take(evidence.tensors)
    assert calls[len(ORDER) :] == ["took 5 for a", "took 5 for b"]


def test_nobody_watches_unless_asked() -> None:
    with Observers().around(RUN) as evidence:
        pass
    assert not evidence.tensors
