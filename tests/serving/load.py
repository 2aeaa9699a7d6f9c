"""Many streams at once, some of them left, aborted or senseless, on `headrace serve`.

    python tests/serving/load.py                      # a tiny random model, 500 streams, 120 s
    python tests/serving/load.py --streams 50 --seconds 10
    python tests/serving/load.py --device cuda --dtype bfloat16      # other flags are the server's

Starts a server of its own on a free port, prints what became of the requests, and ends with
status 1 where one was lost or ended twice, the server failed, pages were held at the end, memory
grew, or /health was slow. Clients and server share the machine: nothing else should run on it.
"""

import argparse
import asyncio
import http.client
import json
import multiprocessing
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))  # the tiny checkpoints live there

from running_server import RunningServer
from tiny_engine import write_checkpoint

HEALTH_EVERY = 0.05  # seconds
KEEP_ALIVE = 2.0  # seconds; less than the server's: who reuses a connection as it is closed loses
# Bytes, of server and engine together, from half of the time on; allocators take them in steps.
MOST_GROWTH = 64 * 2**20
POOL_TOKENS = 32_768  # 32 MiB
BAD_BODIES = (
    b"{",
    b"[]",
    b'{"prompt": 5}',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": [-1]}',
    b'{"prompt": "a", "n": 0}',
    b'{"prompt": [' + b"[]," * 400_000,
    b'{"prompt": "' + b"a" * 2_000_000 + b'"}',
    b'{"messages": [{"role": "user"}], "tools": "none"}',
)


@dataclass(slots=True)
class Findings:
    """What was seen.

    Attributes:
        counts: requests by what became of them: done, left, aborted, refused, busy (503 as the
            queue is full), and what should not be: lost, doubled, failed.
        examples: of what should not be, a few.
        health: seconds that /health took, sorted.
        memory: resident bytes of server and engine, early and at the end.
        pages: held at the end by nobody who is there.
    """

    counts: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    memory: tuple[int, int] = (0, 0)
    pages: int = 0

    def wrong(self, kind: str, told: str) -> None:
        self.counts[kind] += 1
        if len(self.examples) < 10:
            self.examples.append(f"{kind}: {told[:300]}")

    def quantile(self, share: float) -> float:
        return self.health[min(int(share * len(self.health)), len(self.health) - 1)]

    def faults(self, most_health: float) -> list[str]:
        """What is not as it should be, in words."""
        told = [f"{self.counts[name]} {name}" for name in ("lost", "doubled", "failed")]
        told = [each for each in told if not each.startswith("0 ")]
        if self.pages:
            told.append(f"{self.pages} pages held")
        if self.memory[1] - self.memory[0] > MOST_GROWTH:
            told.append("memory grew")
        if self.quantile(0.99) > most_health:
            told.append(f"/health took {self.quantile(0.99) * 1000:.0f} ms")
        return told + self.examples


class Crowd:
    """Clients of one server."""

    def __init__(self, url: str, session: aiohttp.ClientSession, found: Findings) -> None:
        self._url, self._session, self._found = url, session, found

    async def keep_going(self, seed: int, until: float) -> None:
        chance = random.Random(seed)
        while time.monotonic() < until:
            how = chance.choice(["stay", "stay", "stay", "leave", "abort", "nonsense"])
            if how == "nonsense":
                await self._talk_nonsense(chance)
            elif chance.random() < 0.2 and how == "stay":
                await self._ask_whole(chance)
            else:
                await self._stream(chance, how, f"{seed}-{time.monotonic_ns()}")

    async def _stream(self, chance: random.Random, how: str, name: str) -> None:
        path, body = _request(chance)
        body |= {"stream": True, "rid": name}
        patience, lines = chance.randrange(1, 30), 0
        endings: Counter[int] = Counter()
        is_aborted = is_closed = False
        try:
            async with self._session.post(self._url + path, json=body) as answer:
                if answer.status != 200:
                    self._refused(answer.status, await answer.text())
                    return
                async for line in answer.content:
                    if not line.startswith(b"data: "):
                        continue
                    if line.startswith(b"data: [DONE]"):
                        is_closed = True
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        self._found.wrong("failed", str(event))
                        return
                    for choice in event["choices"]:
                        endings[choice["index"]] += choice["finish_reason"] is not None
                    lines += 1
                    if lines == patience and how == "leave":
                        self._found.counts["left"] += 1
                        return
                    if lines == patience and how == "abort":
                        is_aborted = await self._abort(name)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self._found.wrong("lost", repr(error))
            return
        self._judge(endings, body["n"], is_closed=is_closed, is_aborted=is_aborted)

    def _judge(
        self, endings: Counter[int], count: int, *, is_closed: bool, is_aborted: bool
    ) -> None:
        told = f"{dict(endings)} of {count}, [DONE]: {is_closed}"
        if any(number > 1 for number in endings.values()):
            self._found.wrong("doubled", told)
        elif not is_closed or sum(endings.values()) != count:
            self._found.wrong("lost", told)
        else:
            self._found.counts["aborted" if is_aborted else "done"] += 1

    async def _abort(self, name: str) -> bool:
        async with self._session.post(f"{self._url}/abort_request", json={"rid": name}) as answer:
            return bool((await answer.json())["aborted"])

    async def _ask_whole(self, chance: random.Random) -> None:
        path, body = _request(chance)
        try:
            async with self._session.post(self._url + path, json=body) as answer:
                if answer.status != 200:
                    self._refused(answer.status, await answer.text())
                    return
                choices = (await answer.json())["choices"]
        except (aiohttp.ClientError, OSError) as error:
            self._found.wrong("lost", repr(error))
            return
        endings = Counter(choice["index"] for choice in choices if choice["finish_reason"])
        self._judge(endings, body["n"], is_closed=True, is_aborted=False)

    async def _talk_nonsense(self, chance: random.Random) -> None:
        path = chance.choice(["/v1/completions", "/v1/chat/completions", "/generate"])
        headers = {"content-type": "application/json"}
        data = chance.choice(BAD_BODIES)
        async with self._session.post(self._url + path, data=data, headers=headers) as answer:
            told = await answer.text()
            if not 400 <= answer.status < 500:
                self._found.wrong("failed", f"{answer.status} for nonsense: {told}")
            else:
                self._found.counts["refused"] += 1

    def _refused(self, status: int, told: str) -> None:
        if status == 503 and "queue_full" in told:
            self._found.counts["busy"] += 1
        else:
            self._found.wrong("failed", f"{status} {told}")


def _request(chance: random.Random) -> tuple[str, dict[str, Any]]:
    """Path and body of a request that is in order."""
    fields = {"max_tokens": chance.randrange(1, 100), "n": chance.choice([1, 1, 1, 2])}
    fields |= {"ignore_eos": True, "temperature": chance.choice([0.0, 1.0])}
    if chance.random() < 0.5:
        words = [{"role": "user", "content": "x" * chance.randrange(1, 60)}]
        return "/v1/chat/completions", {**fields, "messages": words}
    ids = [chance.randrange(256) for _ in range(chance.randrange(1, 100))]
    return "/v1/completions", {**fields, "prompt": ids}


def watch_health(url: str, seconds: float, told: Connection) -> None:
    """Ask /health again and again, in a process of its own; the seconds of each answer."""
    place = urlsplit(url)
    taken, until = [], time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.monotonic()
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=30)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()
        taken.append(time.monotonic() - began)
        time.sleep(HEALTH_EVERY)
    told.send(sorted(taken))


def resident(*pids: int) -> int:
    """Bytes in memory."""
    pages = (int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return sum(pages) * resource.getpagesize()


async def put_under_load(server: RunningServer, streams: int, seconds: float) -> Findings:
    """Let `streams` clients ask for `seconds` at a time, and see what becomes of it."""
    found = Findings()
    ours, theirs = multiprocessing.Pipe()
    watcher = multiprocessing.get_context("spawn").Process(
        target=watch_health, args=(server.url, seconds, theirs)
    )
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        pids = (server.process.pid, (await _info(server.url, session))["engine"]["pid"])
        crowd, began = Crowd(server.url, session, found), time.monotonic()
        watcher.start()
        work = [
            asyncio.create_task(crowd.keep_going(seed, began + seconds)) for seed in range(streams)
        ]
        await asyncio.sleep(seconds / 2)
        early = resident(*pids)
        await asyncio.gather(*work)
        info = await _info(server.url, session)
        while info["requests_in_flight"] or info["internal_states"][0]["running"]:
            await asyncio.sleep(0.1)
            info = await _info(server.url, session)
        load = info["internal_states"][0]
        found.pages = load["pages_total"] - load["pages_free"] - load["pages_cached"]
        found.memory = early, resident(*pids)
    found.health = await asyncio.to_thread(ours.recv)
    watcher.join()
    return found


async def _info(url: str, session: aiohttp.ClientSession) -> Any:
    async with session.get(f"{url}/server_info") as answer:
        return await answer.json()


def run(streams: int, seconds: float, flags: Sequence[str] = ()) -> Findings:
    """Start a server of a tiny model and put it under load."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(Path(folder) / "tiny", "llama")
        # A pool that the prefix cache fills soon, so that memory that grows is memory lost.
        pool = ("--max-total-tokens", str(POOL_TOKENS))
        server = RunningServer(model, "--context-length", "512", *pool, *flags)
        try:
            return asyncio.run(put_under_load(server, streams, seconds))
        finally:
            server.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--most-health-ms", type=float, default=100.0, help="99th percentile")
    asked, flags = parser.parse_known_args()
    found = run(asked.streams, asked.seconds, flags)
    print(" ".join(f"{name} {count}" for name, count in sorted(found.counts.items())))
    early, late = (size / 2**20 for size in found.memory)
    print(f"memory {early:.0f} MiB after half of the time, {late:.0f} MiB at the end")
    print(f"pages held at the end {found.pages}")
    shares = (0.5, 0.9, 0.99, 1.0)
    told = ", ".join(f"p{share * 100:g} {found.quantile(share) * 1000:.1f} ms" for share in shares)
    print(f"/health asked {len(found.health)} times: {told}")
    faults = found.faults(asked.most_health_ms / 1000)
    print("\n".join(faults) or "all as it should be")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
