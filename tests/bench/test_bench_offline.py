"""The offline benchmark: its prompts, its order of work, its table."""

import numpy
import pytest

from headrace.base.errors import ConfigError
from headrace.bench.load import Load, Prompts, Tokens
from headrace.bench.offline import Measurement, measure, table


class Recorder:
    """A contestant that notes what it is given, in a list that all share."""

    def __init__(self, name: str, journal: list[tuple[str, str, Prompts]]) -> None:
        self.name, self.journal = name, journal

    def warm_prefix(self, prefix: list[int]) -> None:
        self.journal.append((self.name, "warm", [prefix]))

    def run(self, prompts: Prompts, output_len: int) -> Tokens:
        self.journal.append((self.name, f"run {output_len}", prompts))
        return [[0] * output_len for _ in prompts]


def test_prompts_share_what_they_should_and_repeats_share_nothing() -> None:
    load = Load(num_prompts=3, input_len=10, output_len=1, shared_prefix_len=6)
    first, second = load.prompts(0, 50_000), load.prompts(1, 50_000)
    assert first == load.prompts(0, 50_000)
    assert {tuple(prompt[:6]) for prompt in first} == {tuple(first[0][:6])}
    assert len({tuple(prompt[6:]) for prompt in first}) == 3
    assert first[0][:6] != second[0][:6]
    assert numpy.array(first).shape == (3, 10)
    assert Load(num_prompts=3, input_len=10, output_len=1, seed=1).prompts(0, 50_000) != first


@pytest.mark.parametrize("length", [-1, 10, 11])
def test_a_prefix_longer_than_the_prompt_is_refused(length: int) -> None:
    with pytest.raises(ConfigError, match="shared_prefix_len"):
        Load(num_prompts=1, input_len=10, output_len=1, shared_prefix_len=length)


def test_batches_hold_every_prompt_once() -> None:
    load = Load(num_prompts=5, input_len=4, output_len=1, batch=2)
    prompts = load.prompts(0, 100)
    batches = list(load.batches(prompts))
    assert [len(batch) for batch in batches] == [2, 2, 1]
    assert [prompt for batch in batches for prompt in batch] == prompts


def test_engines_alternate_and_do_the_same_work() -> None:
    journal: list[tuple[str, str, Prompts]] = []
    engines = [Recorder("ours", journal), Recorder("peer", journal)]
    load = Load(num_prompts=2, input_len=8, output_len=3, shared_prefix_len=4)
    found = list(measure(engines, [load], vocab_size=100, repeats=2, first_token_len=16))
    assert [(entry.engine, entry.what) for entry in found] == [
        ("ours", "run"),
        ("peer", "run"),
        ("ours", "first token"),
        ("peer", "first token"),
        ("ours", "first token, cached"),
    ]
    assert all(len(entry.seconds) == 2 for entry in found)
    runs = [(name, prompts) for name, what, prompts in journal if what == "run 3"]
    assert [name for name, _ in runs] == ["ours", "peer", "ours", "peer"]
    assert runs[0][1] == runs[1][1]
    assert runs[0][1] != runs[2][1]
    warmed = [prompts[0] for name, what, prompts in journal if what == "warm" and name == "ours"]
    assert warmed == [runs[0][1][0][:4], runs[2][1][0][:4]]
    one = [prompts for name, what, prompts in journal if what == "run 1" and name == "ours"]
    assert one[:2] == one[2:]  # cached: the same prompts again


def test_table_shows_medians_and_ratios() -> None:
    load = Load(num_prompts=2, input_len=8, output_len=5)
    single = Load(num_prompts=1, input_len=8, output_len=1)
    shown = table(
        [
            Measurement(engine="ours", what="run", load=load, seconds=(1.0, 9.0, 2.0)),
            Measurement(engine="peer", what="run", load=load, seconds=(4.0, 5.0, 3.0)),
            Measurement(engine="ours", what="first token, cached", load=single, seconds=(0.25,)),
        ]
    )
    lines = shown.splitlines()
    assert lines[1].split()[-5:] == ["out", "tokens/s", "5.0", "2.5", "2.00"]
    assert lines[2].split() == ["in+out/s", "13.0", "6.5", "2.00"]  # 2 x (8 + 5) tokens
    assert lines[3].split()[-2:] == ["ms", "250.0"]
