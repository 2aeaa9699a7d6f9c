"""How embeddings are pooled, as a checkpoint that was trained for them says.

The files are those of sentence-transformers: modules.json lists what comes behind the model, and
the folder of its Pooling holds the mode, as one word since version 5.4 and as flags before.
"""

import os
from pathlib import Path

import msgspec

from headrace.checkpoint.folder_files import decoded_json, read_json

_FLAG = "pooling_mode_"
_LAST = "lasttoken"
GGUF_POOLINGS = {1: "mean", 2: "cls", 3: "last", 4: "rank"}
"""`<architecture>.pooling_type` of GGUF files."""


class _Module(msgspec.Struct):
    type: str
    path: str = ""


class _Pooling(msgspec.Struct):
    """Beside a flag for each mode, where there is no word."""

    pooling_mode: str | list[str] | None = None


def folder_pooling(folder: Path) -> str | None:
    """ "last", "mean", or what else is stated, joined by "and"; `None` where nothing is.

    Raises:
        CheckpointError: a file is not the JSON that it should be.
    """
    file = folder / "modules.json"
    if not os.path.lexists(file):
        return None
    stated: list[str] = []
    for module in decoded_json(file, list[_Module]):
        kind = module.type.rpartition(".")[2]
        if kind == "Pooling":
            stated += _modes(folder / Path(module.path).name / "config.json")
        elif kind not in ("Transformer", "Normalize"):
            stated.append(kind)
    return " and ".join(stated) or None


def _modes(file: Path) -> list[str]:
    config = read_json(file, _Pooling)
    named = config.get("pooling_mode")
    if named is not None:
        modes: list[str] = [named] if isinstance(named, str) else named
    else:
        flags = [key for key, flag in config.items() if key.startswith(_FLAG) and flag is True]
        modes = [key.removeprefix(_FLAG).removesuffix("s").removesuffix("_token") for key in flags]
    return ["last" if mode == _LAST else mode for mode in modes]
