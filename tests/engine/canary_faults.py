"""Faults that the KV canary must find, planted into a running engine, and what it must say."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.engine.engine import Engine
from headrace.engine.requests import RequestHandle
from headrace.request.sampling_params import SamplingParams
from headrace.scheduler.sequence import Sequence

PAGE = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [list(range(10, 31)), list(range(40, 58)), list(range(70, 93))]
VICTIM, OTHER = 1, 2


def start(engine: Engine, steps: int = 6) -> list[RequestHandle]:
    """Three requests that have decoded a while; the second is the victim."""
    names = ["first", "victim", "other"]
    handles = [
        engine.add(prompt, GREEDY, request_id=name)
        for prompt, name in zip(PROMPTS, names, strict=True)
    ]
    for _ in range(steps):
        engine.step()
    engine.settle()
    return handles


def check_named(message: str, name: str, position: int, kind: str) -> None:
    """The message says who, where and what."""
    start = f"KV canary: sequence {name}, position {position}"
    assert message.startswith(start), message
    assert kind in message.split(": ")[2].split(";")[0], message


def finish(engine: Engine, handles: list[RequestHandle]) -> None:
    for _ in range(500):
        if all(handle.is_finished for handle in handles):
            break
        engine.step()
    else:
        raise AssertionError("the engine makes no progress")
    engine.settle()
    engine.scheduler.check_integrity()


def running(engine: Engine, name: str = "victim") -> Sequence:
    (found,) = (each for each in engine.scheduler.chooser.running if each.name == name)
    return found


def table(engine: Engine) -> torch.Tensor:
    pool = engine.worker.runner.req_to_token_pool
    return pool.table(pool.groups[0])


def slot(sequence: Sequence, position: int) -> int:
    return sequence.pages[position // PAGE] * PAGE + position % PAGE


# ---- the faults: each changes something and returns what must be named: position and kind


def changed_key(engine: Engine) -> tuple[int, str]:
    keys = engine.worker.runner.token_to_kv_pool.keys
    keys[1].flatten(0, 1)[slot(running(engine), 9), 0, 1] += 0.5
    return 9, "real KV"


def changed_value(engine: Engine) -> tuple[int, str]:
    values = engine.worker.runner.token_to_kv_pool.values
    values[0].flatten(0, 1)[slot(running(engine), 17), 0, 0] = float("nan")
    return 17, "real KV"


def other_page(engine: Engine) -> tuple[int, str]:
    """An entry of the page table leads to a page of somebody else, for another position."""
    table(engine)[running(engine).row, 2] = running(engine, "other").pages[3]
    return 2 * PAGE, "position, chain"


def same_page_of_another(engine: Engine) -> tuple[int, str]:
    """As before, but the page holds tokens of the same positions."""
    table(engine)[running(engine).row, 2] = running(engine, "other").pages[2]
    return 2 * PAGE, "chain"


def free_page(engine: Engine) -> tuple[int, str]:
    """An entry leads to a page that nobody has written."""
    table(engine)[running(engine).row, 1] = engine.scheduler.keeper.allocator.free_pages()[0]
    return PAGE, "position, chain"


def swapped_pages(engine: Engine) -> tuple[int, str]:
    row = running(engine).row
    table(engine)[row, :2] = table(engine)[row, :2].flip(0)
    return 0, "position, chain"


def another_history(engine: Engine) -> tuple[int, str]:
    """All entries lead to pages of another sequence, whose records are sound in themselves."""
    victim, other = running(engine), running(engine, "other")
    whole = victim.length_bound // PAGE
    table(engine)[victim.row, :whole] = table(engine)[other.row, :whole]
    return whole * PAGE, "chain"


def wrong_token(engine: Engine) -> tuple[int, str]:
    victim = running(engine)
    tokens = engine.worker.runner.rows.last_token
    tokens[victim.row] = (tokens[victim.row] + 1) % 256
    return victim.length_bound, "token"


def wrong_length(engine: Engine) -> tuple[int, str]:
    """The row's column counts a token less: the newest is written over the one before."""
    victim = running(engine)
    engine.worker.runner.rows.length[victim.row] -= 1
    return victim.length_bound, "position"


def freed_page(engine: Engine) -> tuple[int, str]:
    """A page is given to somebody else while the victim still reads it."""
    victim, keeper = running(engine), engine.scheduler.keeper
    page = next(page for page in victim.pages if page in victim.owned)
    victim.owned.discard(page)
    keeper.allocator.free([page])
    return victim.pages.index(page) * PAGE, "position, chain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`plant` changes something; `real_data`: it is seen only where keys and values are."""

    plant: Callable[[Engine], tuple[int, str]]
    real_data: bool = False

    @property
    def name(self) -> str:
        return self.plant.__name__


FAULTS = [
    Fault(plant=changed_key, real_data=True),
    Fault(plant=changed_value, real_data=True),
    Fault(plant=other_page),
    Fault(plant=same_page_of_another),
    Fault(plant=free_page),
    Fault(plant=swapped_pages),
    Fault(plant=another_history),
    Fault(plant=wrong_token),
    Fault(plant=wrong_length),
    Fault(plant=freed_page),
]
