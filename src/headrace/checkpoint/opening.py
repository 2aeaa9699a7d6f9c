"""Which reader a path needs."""

from dataclasses import replace
from pathlib import Path

from headrace.base.errors import CheckpointError, ConfigError, NotFoundError, UnsupportedError
from headrace.checkpoint.folder_files import (
    SUPPORTED_FORMATS,
    folder_tokenizer_source,
    named_like,
    text_of,
)
from headrace.checkpoint.gguf_checkpoint import GgufCheckpoint
from headrace.checkpoint.interface import Checkpoint
from headrace.checkpoint.names import resolve_model
from headrace.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from headrace.config.engine_config import EngineConfig
from headrace.config.tokenizer_source import TokenizerSource

_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


def open_checkpoint(path: Path, *, weights: bool = True) -> Checkpoint:
    """Open a .gguf file, or a folder with config.json and .safetensors, or with one .gguf.

    Args:
        path: file or folder; see `resolve_model` for names.
        weights: False accepts a folder that holds only config.json, for a plan or dummy weights.

    Raises:
        NotFoundError: the path does not exist.
        CheckpointError: something is missing or broken; the message names file and tensor.
        UnsupportedError: a format or architecture that is not supported, with what is.
    """
    if path.is_dir():
        return _open_folder(path, weights)
    if not path.exists():
        raise NotFoundError(f"{path} does not exist")
    if path.suffix in _PICKLED:
        raise _pickled(path)
    if path.suffix in (".safetensors", ".json"):
        raise CheckpointError(
            f"{path} is one file of a checkpoint",
            remedy=f"Name its folder, {path.parent}, which also holds config.json",
        )
    return GgufCheckpoint(path)


def open_tokenizer(config: EngineConfig) -> TokenizerSource | None:
    """The tokenizer that `config` names, without weights, or else that of its model.

    It may be a folder that holds a tokenizer and nothing else.

    Raises:
        NotFoundError, CheckpointError, UnsupportedError: as `resolve_model`, `open_checkpoint`.
        ConfigError: as `with_asked_template`.
    """
    return with_asked_template(_open_tokenizer(config), config)


def with_asked_template(
    source: TokenizerSource | None, config: EngineConfig
) -> TokenizerSource | None:
    """The tokenizer with the chat template that `config` names, if it does.

    Raises:
        ConfigError: that is no file, or an empty one, or there is no tokenizer. CheckpointError: it
            cannot be read.
    """
    if config.chat_template is None:
        return source
    file = Path(config.chat_template)
    if not file.is_file():
        raise ConfigError(
            f"chat_template is {str(file)!r}",
            why="there is no such file",
            remedy="Give the path of a file with the template in Jinja",
        )
    template = text_of(file)
    if not template.strip():
        raise ConfigError(f"chat_template is {file}", why="the file is empty")
    if source is None:
        raise ConfigError(
            f"chat_template is {file}",
            why="the checkpoint has no tokenizer, which a chat needs",
            remedy="Name one (tokenizer), or leave the template out",
        )
    return replace(source, chat_template=template, chat_template_file=file)


def _open_tokenizer(config: EngineConfig) -> TokenizerSource | None:
    if config.tokenizer is None:
        path = resolve_model(config.model, config.revision)
        return open_checkpoint(path, weights=False).tokenizer_source
    path = resolve_model(config.tokenizer, config.revision, weights=False)
    if path.is_dir() and not (path / "config.json").is_file():
        alone = folder_tokenizer_source(path, {}, {})
        if alone is not None:
            return alone
    return open_checkpoint(path, weights=False).tokenizer_source


def _open_folder(folder: Path, weights: bool) -> Checkpoint:
    has_config = (folder / "config.json").is_file()
    if not has_config and (folder / "adapter_config.json").is_file():
        raise UnsupportedError(
            f"{folder} holds an adapter (LoRA), not a model",
            why="It has an adapter_config.json and no config.json",
            remedy="Merge it into its base model (peft: merge_and_unload), save that and name it",
        )
    if named_like(folder, "*.safetensors*"):
        return SafetensorsCheckpoint(folder, weights=weights)
    gguf_files = named_like(folder, "*.gguf")
    if len(gguf_files) == 1:
        return GgufCheckpoint(gguf_files[0])
    if gguf_files:
        raise CheckpointError(
            f"{folder} holds {len(gguf_files)} .gguf files",
            remedy=f"Name one of them: {', '.join(file.name for file in gguf_files)}",
        )
    if has_config and not weights:
        return SafetensorsCheckpoint(folder, weights=False)
    pickled = sorted(file for file in folder.iterdir() if file.suffix in _PICKLED)
    if pickled:
        raise _pickled(pickled[0])
    raise CheckpointError(
        f"{folder} holds no checkpoint",
        why="Looked for config.json with *.safetensors, and for one *.gguf",
        remedy="load_format dummy runs this config.json with random weights"
        if has_config
        else "Name the folder that holds these files",
    )


def _pickled(file: Path) -> UnsupportedError:
    return UnsupportedError(
        f"{file} holds pickled weights, which can run code when they are read",
        remedy=f"Convert them to safetensors. {SUPPORTED_FORMATS}",
    )
