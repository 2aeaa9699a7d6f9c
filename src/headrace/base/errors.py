"""The errors a user or a file can cause. `assert` stays for our own bugs.

Every error says what happened, why, and what to do about it; the three parts are kept apart so
that a server can put them where its clients look.
"""

SPELLED_SMALL = ("capture", "device", "dtype", "headrace", "pip", "python", "triton")


class HeadraceError(Exception):
    """Base of all errors raised on purpose.

    Args:
        what: what is wrong, one sentence, naming the thing (field, file, tensor); it may begin
            with that name and is shown as written.
        why: the rule or fact behind it.
        remedy: what the reader can do.
    """

    def __init__(self, what: str, *, why: str = "", remedy: str = "") -> None:
        self.what, self.why, self.remedy = what, why, remedy
        parts = [_closed(what), *(_closed(_opened(part)) for part in (why, remedy))]
        super().__init__(" ".join(part for part in parts if part))


class ConfigError(HeadraceError, ValueError):
    """An engine option has a bad value, or options that cannot go together were asked for."""


class UnknownOptionError(ConfigError, TypeError):
    """An engine has no such option. A TypeError too, as Python's own for an unknown keyword is."""


class CheckpointError(HeadraceError):
    """A model file is missing, truncated, of the wrong shape, or does not fit the model."""


class UnsupportedError(HeadraceError):
    """A model, format, backend or path that this engine refuses, with the list of what it takes."""


class RequestError(HeadraceError, ValueError):
    """A request that can never be served; nothing ran and no other request is touched."""


class UnknownFieldError(RequestError, TypeError):
    """A request has no such option. A TypeError too, as Python's own for an unknown keyword is."""


class TooLongError(RequestError):
    """Prompt and output exceed what one sequence may hold."""


def longest_context(tokens: int) -> str:
    """The bound in OpenAI's words. Proxies and agents look for them, and not for the code beside
    them, to shorten the prompt or to ask another model."""
    return f"this model's maximum context length is {tokens} tokens"


class CapacityError(HeadraceError):
    """The device has too little memory for what was asked."""


class NotFoundError(HeadraceError):
    """A model name that is neither a path, a short name nor a reachable hub id."""


class CanaryError(HeadraceError):
    """An observer found that a step was computed wrongly, or what it read was damaged."""


class UnavailableError(HeadraceError):
    """The engine takes no requests at this moment: it starts, drains, or is gone. Nothing is wrong
    with the request."""


class EngineDeadError(UnavailableError):
    """The engine's process ended before the request did, or before it was ready."""


def _opened(text: str) -> str:
    """The text as the beginning of a sentence: a capital, except for a name or a command."""
    text = text.strip()
    first = text.partition(" ")[0]
    is_word = first.replace("'", "").rstrip(",;").isalpha()
    return text if not is_word or first in SPELLED_SMALL else text[0].upper() + text[1:]


def _closed(text: str) -> str:
    text = text.strip()
    return text if not text or text.endswith((".", "!", "?")) else text + "."
