"""What compiled decode steps were measured to gain on this CPU.

`python -m headrace.bench.cpu_graph MODEL` measures and writes what `auto` reads: a few numbers for
this CPU, this torch, these threads, a model's shape and a dtype.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from headrace.base import env
from headrace.base.errors import ConfigError
from headrace.config.persona import ModelTraits

PAYS = 0.97  # time over eager's from which compiling is worth its start
MEASURE = "python -m headrace.bench.cpu_graph MODEL"


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuGraphGain:
    """Median milliseconds of a decode step, measured interleaved.

    Attributes:
        cpu, torch, threads, shape, dtype: what they hold for; a later one replaces an earlier one.
        rows: rows of the step -> [eager, compiled].
        day: date of the measurement.
    """

    cpu: str
    torch: str
    threads: int
    shape: str
    dtype: str
    rows: dict[str, list[float]]
    day: str

    @property
    def key(self) -> tuple[str, str, int, str, str]:
        return self.cpu, self.torch, self.threads, self.shape, self.dtype

    @property
    def pays(self) -> bool:
        """With every number of rows that was measured."""
        return all(ours <= PAYS * eager for eager, ours in self.rows.values())

    def __str__(self) -> str:
        times = ", ".join(
            f"{rows} rows {eager:.1f} to {ours:.1f} ms" for rows, (eager, ours) in self.rows.items()
        )
        return f"measured {self.day}: {times}"


def shape_of(traits: ModelTraits) -> str:
    """What of a model a step's time depends on."""
    heads = traits.attention
    return (
        f"{traits.family} {traits.num_layers} x {traits.hidden_size}, {traits.intermediate_size} "
        f"inside, {heads.num_heads}/{heads.num_kv_heads} heads of {heads.head_dim}, "
        f"{traits.vocab_size} words"
    )


def gains_file() -> Path:
    return env.cache_dir() / "cpu_graph.json"


def read_gains(cpu: str) -> tuple[CpuGraphGain, ...]:
    """Measurements that hold here: on this CPU, with this torch and these threads.

    Raises:
        ConfigError: the file is not what `write_gain` writes.
    """
    here = (cpu, torch.__version__, torch.get_num_threads())
    return tuple(gain for gain in _read(gains_file()) if gain.key[:3] == here)


def write_gain(gain: CpuGraphGain) -> Path:
    """Keep a measurement, in place of an older one of the same thing."""
    path = gains_file()
    kept = [other for other in _read(path) if other.key != gain.key]
    with env.using_cache():
        path.write_text(json.dumps([asdict(entry) for entry in (*kept, gain)], indent=1))
    return path


def _read(path: Path) -> list[CpuGraphGain]:
    if not path.exists():
        return []
    try:
        return [CpuGraphGain(**entry) for entry in json.loads(path.read_text())]
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{path} does not hold measurements of cpu_graph",
            why=str(error),
            remedy=f"Delete it; {MEASURE} makes it anew",
        ) from error
