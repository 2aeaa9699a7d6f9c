"""Clients over tiny checkpoints, and what tests ask of their streams."""

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from headrace.config.engine_config import EngineConfig
from headrace.engine.client import EngineClient
from headrace.request.messages import Delta, Submit
from headrace.request.outcome import Finished
from headrace.request.sampling_params import SamplingParams

FAULTY = (sys.executable, str(Path(__file__).with_name("faulty_engine.py")))
SETTINGS: dict[str, Any] = {
    "load_format": "dummy",
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 256,
    "max_running_requests": 16,
    "seed": 3,
}
LONG = SamplingParams(max_tokens=240, temperature=0.0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)

_numbers = count()


def tiny_config(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(model=str(folder), **(SETTINGS | options))


def request(
    tokens: Sequence[int] = (1, 2, 3), params: SamplingParams = LONG, **options: Any
) -> Submit:
    options.setdefault("request_id", f"test-{next(_numbers)}")
    return Submit(prompt_token_ids=list(tokens), params=params, **options)


@dataclass
class Answer:
    """What came of a request, its continuations apart."""

    deltas: list[Delta] = field(default_factory=list)

    def of(self, index: int) -> list[Delta]:
        return [delta for delta in self.deltas if delta.index == index]

    def text(self, index: int = 0) -> str:
        return "".join(delta.text for delta in self.of(index))

    def token_ids(self, index: int = 0) -> list[int]:
        return [token for delta in self.of(index) for token in delta.token_ids]

    def endings(self, index: int = 0) -> list[Finished]:
        return [delta.finished for delta in self.of(index) if delta.finished is not None]


async def answer(client: EngineClient, submit: Submit) -> Answer:
    return Answer([delta async for delta in client.generate(submit)])


@asynccontextmanager
async def running(client: EngineClient, submit: Submit) -> AsyncIterator[AsyncIterator[Delta]]:
    """A stream that has given tokens already."""
    stream = client.generate(submit)
    try:
        while not (await anext(stream)).token_ids:
            pass
        yield stream
    finally:
        await stream.aclose()


async def exhaust(stream: AsyncIterator[Delta]) -> None:
    async for _ in stream:
        pass


def is_gone(pid: int) -> bool:
    """It has ended; whoever adopted it may not have looked yet."""
    return not Path(f"/proc/{pid}").exists() or is_a_zombie(pid)


def is_a_zombie(pid: int) -> bool:
    """It has ended, and its parent has not looked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return False
