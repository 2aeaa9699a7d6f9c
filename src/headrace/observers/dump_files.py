"""What a dump is on disk: one safetensors file a step.

Tensors of a file, over T tokens of which S sample:

| name | shape | what |
|---|---|---|
| `input_ids`, `positions` | [T] int64 | |
| `sequence` | [T] int64 | place in the metadata's `sequences` |
| `live` | [T] bool | false for rows that have ended: their other numbers mean nothing |
| `k.N`, `v.N` | [T, K, D], [T, K, Dv] | what layer N wrote to the KV pool |
| `stream.N` | [T, H] | the residual stream behind layer N |
| `logits` | [S, V] float32 | |
| `logit_token` | [S] int64 | place of the token behind which they come |

The metadata are texts; what is no text is JSON.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headrace.base.errors import ConfigError
from headrace.base.shown import shown
from headrace.base.whole_file import whole_file
from headrace.observers.tolerances import TOLERANCES

K, V, STREAM, LOGITS = NAMES = ("k", "v", "stream", "logits")
COLUMNS = ("input_ids", "positions", "sequence", "live")
LOGIT_TOKEN = "logit_token"
SCHEMA = 1
_FLOATS = ("F16", "BF16", "F32", "F64")
_DTYPES = {
    **dict.fromkeys((*COLUMNS, LOGIT_TOKEN), ("I64",)),
    **dict.fromkeys((K, V, STREAM), _FLOATS),
    "live": ("BOOL",),
    LOGITS: ("F32",),
}
"""As safetensors names them, by how the name begins."""
_OF_LAYER = re.compile(r"(k|v|stream)\.(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """The metadata of a file.

    Attributes:
        step: counts dumped steps from 1. model, dtype: of the model. backend: of attention.
        bucket: tokens, rows and variant. sequences: their names; rows: their rows.
    """

    step: int
    model: str
    dtype: str
    path: str
    bucket: tuple[int, int, str]
    backend: str
    mode: str
    sequences: tuple[str, ...]
    rows: tuple[int, ...]

    def texts(self) -> dict[str, str]:
        told = {name: json.dumps(getattr(self, name)) for name in self.__slots__}
        return {"headrace_dump": str(SCHEMA), **told}

    @classmethod
    def of(cls, texts: Mapping[str, str], path: Path) -> "StepFacts":
        """Raises `ConfigError` for a file that is no dump of this version, ValueError or KeyError
        for one that says what no step is like."""
        if texts.get("headrace_dump") != str(SCHEMA):
            raise ConfigError(f"{path} is no dump of this version of headrace")
        values: dict[str, Any] = {name: json.loads(texts[name]) for name in cls.__slots__}
        for name, value in values.items():
            if not _LIKE_A_STEP[name](value):
                raise ValueError(f"its {name} is {shown(value)}")
            values[name] = tuple(value) if isinstance(value, list) else value
        return cls(**values)


def _is_number(value: object) -> bool:
    return type(value) is int


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _lists(kind: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(map(kind, value))


_LIKE_A_STEP: dict[str, Callable[[object], bool]] = {
    "step": _is_number,
    "dtype": lambda value: _is_text(value) and value in TOLERANCES,
    **dict.fromkeys(("model", "path", "backend", "mode"), _is_text),
    "bucket": lambda value: isinstance(value, list) and [*map(type, value)] == [int, int, str],
    "sequences": _lists(_is_text),
    "rows": _lists(_is_number),
}


def write_step(folder: Path, facts: StepFacts, tensors: Mapping[str, Tensor]) -> Path:
    """Write one step, whole or not at all; its file. Raises OSError or SafetensorError."""
    path = folder / f"step-{facts.step:06}.safetensors"
    own = {name: _own(each) for name, each in tensors.items()}
    with whole_file(path) as place:
        place.touch()
        usual = place.stat().st_mode
        save_file(own, place, metadata=facts.texts())
        place.chmod(usual)  # safetensors makes files that nobody else may read
    return path


def _own(tensor: Tensor) -> Tensor:
    """Alone in its memory, as the format wants it: what was small came together with others."""
    is_alone = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if is_alone else tensor.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpedStep:
    """One file of a dump; tensors are read when asked for."""

    path: Path
    facts: StepFacts
    names: frozenset[str]

    def read(self, *names: str) -> list[Tensor]:
        with safe_open(self.path, framework="pt") as file:
            return [file.get_tensor(name) for name in names]


def open_dump(folder: str | Path) -> list[DumpedStep]:
    """The steps of a dump in their order.

    Raises:
        ConfigError: it is no folder with a dump, or a file cannot be read.
    """
    try:
        files = sorted(Path(folder).expanduser().glob("step-*.safetensors"))
    except RuntimeError:  # "~" of a user that there is not
        files = []
    if not files:
        raise ConfigError(
            f"{folder} holds no dump",
            why="a dump is a folder with files like step-000001.safetensors",
        )
    return list(_opened(files))


def _opened(files: Sequence[Path]) -> Iterator[DumpedStep]:
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                facts = StepFacts.of(file.metadata() or {}, path)
                names = frozenset(file.keys())
                _check_tensors(file, names, facts)
        except (OSError, SafetensorError, KeyError, ValueError, RecursionError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{path} cannot be read", why=str(error)) from error
        yield DumpedStep(path=path, facts=facts, names=names)


def _check_tensors(file: Any, names: frozenset[str], facts: StepFacts) -> None:
    """Raises ValueError or SafetensorError for tensors that are not as the table has them."""
    counts = {"": file.get_slice("input_ids").get_shape()}
    if LOGITS in names:
        counts[LOGITS] = counts[LOGIT_TOKEN] = file.get_slice(LOGIT_TOKEN).get_shape()
    for name in sorted({*COLUMNS, *names}):
        part, kind = file.get_slice(name), layer_of(name)[0]
        shape, dtype = part.get_shape(), part.get_dtype()
        is_column = kind in (*COLUMNS, LOGIT_TOKEN)
        is_right = shape[:1] == counts.get(kind, counts[""]) and (len(shape) == 1) == is_column
        if kind in _DTYPES and not (is_right and dtype.startswith(_DTYPES[kind])):
            raise ValueError(f"its {name} is {dtype} of shape {shape}")
    for name, end in (("sequence", len(facts.sequences)), (LOGIT_TOKEN, counts[""][0])):
        if name in names and not all(0 <= place < end for place in file.get_tensor(name).tolist()):
            raise ValueError(f"its {name} leads beyond the {end} that there are")


def layer_of(name: str) -> tuple[str, int | None]:
    """("k", 3) of "k.3"; ("logits", None)."""
    match = _OF_LAYER.fullmatch(name)
    return (match[1], int(match[2])) if match else (name, None)


def in_order(names: Sequence[str]) -> list[str]:
    """Tensors that are compared, in the order in which a forward makes them."""
    known = [name for name in names if layer_of(name)[0] in NAMES]

    def place(name: str) -> tuple[float, int]:
        kind, layer = layer_of(name)
        return (float("inf") if layer is None else layer, NAMES.index(kind))

    return sorted(known, key=place)
