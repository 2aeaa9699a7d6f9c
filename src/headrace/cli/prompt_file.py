"""Files of prompts."""

from pathlib import Path

from headrace.base.errors import ConfigError


def prompt_lines(file: str) -> list[str]:
    """The lines that are not blank, as they stand there.

    Only a newline ends a line, with or without a carriage return before it: what else Unicode
    counts as one may be part of a prompt. A byte order mark is none.

    Raises:
        ConfigError: the file cannot be read or holds no prompt.
    """
    try:
        text = Path(file).read_bytes().decode("utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a name no file can have
        raise ConfigError(f"The prompt file {file} cannot be read", why=str(error)) from None
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    lines = [line for line in lines if line.strip()]
    if not lines:
        raise ConfigError(f"The prompt file {file} is empty", remedy="Write one prompt per line")
    return lines
