"""From a fresh process to its first token, with an empty kernel cache and with a filled one."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from headrace.base.env import child_environment
from headrace.base.errors import HeadraceError
from headrace.bench.shapes import shown_name

ASSEMBLY = "load and assemble"  # the phase that has parts
# Where compilers keep what they made: Triton, torch.compile, and the driver's own compiler.
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One fresh process; seconds from its launch.

    Attributes:
        cache: "cold" or "warm" kernel cache.
        first_token: seconds to the first token.
        phases: import, load and assemble, first token; the rest is the interpreter's start.
        parts: (name, seconds, bytes) of the parts of assembly.
        kernels: how many were compiled ahead of the first step, or found in the cache.
        captured: seconds until every graph is captured; `None` where there are none.
        graphs: how many there are then.
    """

    model: str
    cache: str
    hardware: str
    dtype: str
    first_token: float
    phases: Mapping[str, float]
    parts: tuple[tuple[str, float, int], ...]
    kernels: str = ""
    captured: float | None = None
    graphs: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "startup", **asdict(self)}


def measure_starts(
    options: Mapping[str, Any], *, input_len: int, repeats: int, graphs: bool
) -> Iterator[Start]:
    """One cold start, then `repeats` warm ones, which find what the cold one compiled.

    Args:
        options: fields of `EngineConfig`, model included.
        input_len: tokens of the one prompt.
        graphs: also capture every graph after the first token.

    Raises:
        HeadraceError: the process ended without a first token.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-kernels-") as folder:
        for cache in ("cold", *["warm"] * repeats):
            yield _start(options, Path(folder), cache, input_len, graphs)


def _start(
    options: Mapping[str, Any], folder: Path, cache: str, input_len: int, graphs: bool
) -> Start:
    asked = {"options": dict(options), "input_len": input_len, "graphs": graphs}
    places = {name: str(folder / name.lower()) for name in CACHES}
    start = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "headrace.bench.first_token"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child_environment(places),
        text=True,
    ) as process:
        assert process.stdin, "a pipe"
        assert process.stdout, "a pipe"
        process.stdin.write(json.dumps(asked))
        process.stdin.close()
        told = _read(process.stdout)
        first_token = time.perf_counter() - start
        count = _read(process.stdout).get("graphs") if graphs and told else None
        captured = None if count is None else time.perf_counter() - start
        status = process.wait()
    if status or not told:
        raise HeadraceError(
            f"A fresh process with {shown_name(options['model'])} ended with status {status}",
            why="its own words are above",
        )
    return Start(
        model=shown_name(options["model"]),
        cache=cache,
        hardware=told["hardware"],
        dtype=told["dtype"],
        first_token=first_token,
        phases=told["phases"],
        parts=tuple((name, seconds, size) for name, seconds, size in told["parts"]),
        kernels=told["kernels"],
        captured=captured,
        graphs=count,
    )


def _read(lines: IO[str]) -> dict[str, Any]:
    """The next line that is ours; libraries may print others. Empty at the end."""
    for line in lines:
        if line.startswith("{"):
            told: dict[str, Any] = json.loads(line)
            return told
    return {}


def table(starts: Sequence[Start]) -> str:
    """Seconds of each start, then where the time of the last one went."""
    lines = [f"{'cache':<6}{'first token':>13}{'all graphs':>12}{'graphs':>8}"]
    for start in starts:
        captured = "-" if start.captured is None else f"{start.captured:.2f}"
        graphs = "-" if start.graphs is None else str(start.graphs)
        lines.append(f"{start.cache:<6}{start.first_token:>13.2f}{captured:>12}{graphs:>8}")
    for start in {start.cache: start for start in starts}.values():
        lines.append(f"seconds of a {start.cache} start")
        lines += _phase_lines(start)
    return "\n".join(lines)


def _phase_lines(start: Start) -> Iterator[str]:
    """What a start did, in its order; the parts of assembly below the phase that they are of."""
    interpreter = start.first_token - sum(start.phases.values())
    for name, took in {"interpreter": interpreter, **start.phases}.items():
        yield f"  {name:<24}{took:>8.2f}"
        if name == ASSEMBLY:
            yield from (f"    {part:<22}{seconds:>8.2f}" for part, seconds, _ in start.parts)
            if start.kernels:
                yield f"    kernels: {start.kernels}"
