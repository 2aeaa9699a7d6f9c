"""Packages that a backend needs and Headrace does not: refused with the way to get them."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from headrace.base.decision import Refusal
from headrace.base.errors import UnsupportedError
from headrace.config.hardware import Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionalPackage:
    """One package.

    Attributes:
        backend: name of the attention backend that needs it.
        module: as imported, and as named in `Hardware.packages`.
        install: the command that brings it.
    """

    backend: str
    module: str
    install: str

    def refusal(self, hardware: Hardware) -> Refusal | None:
        """Why it is not to be had on `hardware`, found without importing it."""
        if self.module in hardware.packages:
            return None
        reason = f"{self.module} is not installed"
        if hardware.assumed:
            reason = f"{self.module} is not among the packages of {hardware.name}"
        return Refusal(subject=self.backend, reason=reason, remedy=self.install)

    def load(self, part: str = "") -> Any:
        """The module, or a part of it (".flash_attn").

        Raises:
            UnsupportedError: it, or one that it needs itself, cannot be imported.
        """
        try:
            return import_module(f"{self.module}{part}")
        except ImportError as error:
            raise UnsupportedError(
                f"Attention backend {self.backend} cannot load {self.module}",
                why=f"{type(error).__name__}: {error}",
                remedy=self.install,
            ) from error
