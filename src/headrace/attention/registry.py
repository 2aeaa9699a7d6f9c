"""The table of attention backends. A name may have several classes (for MHA and for MLA, say)."""

from collections.abc import Callable
from typing import TypeVar

from headrace.attention.backend import AttentionBackend
from headrace.base.registry import Registry

Backend = TypeVar("Backend", bound=type[AttentionBackend])

ATTENTION_BACKENDS: Registry[type[AttentionBackend]] = Registry(
    "attention backend", group="headrace.attention_backends"
)


def register_attention_backend(name: str) -> Callable[[Backend], Backend]:
    """Class decorator: sets `name` and adds the class to `ATTENTION_BACKENDS`."""

    def add(backend: Backend) -> Backend:
        backend.name = name
        ATTENTION_BACKENDS.register(name)(backend)
        return backend

    return add
