"""The conformance kit of attention backends: `check_attention_backend("mine", "cuda").check()`.

It tests what the capabilities claim, over random paged batches with NaN wherever no query may look,
against a float64 reference. What they do not claim is listed as such; what they claim and the
backend refuses is a failure.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

import headrace.attention.selection  # noqa: F401 (registers the backends of this repository)
from headrace.attention.backend import AttentionBackend
from headrace.attention.capabilities import AttentionNeed, Phase
from headrace.attention.registry import ATTENTION_BACKENDS
from headrace.base.errors import HeadraceError, UnsupportedError
from headrace.base.layout import table
from headrace.config.hardware import Hardware
from headrace.config.persona import KvKind
from headrace.runner.detect import detect
from headrace.testing import attention_cases as cases
from headrace.testing.attention_cases import Check, Untested
from headrace.testing.paged_batches import Case

Kind = type[AttentionBackend]

OK, FAILED, NOT_TESTED = "ok", "FAILED", "not tested"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One case: `verdict` is ok, FAILED or not tested; `detail` says why it is not ok."""

    backend: str
    subject: str
    case: str
    verdict: str
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the kit found."""

    device: str
    findings: tuple[Finding, ...]

    @property
    def failed(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict == FAILED]

    @property
    def passed(self) -> bool:
        return not self.failed and any(finding.verdict == OK for finding in self.findings)

    def check(self) -> None:
        """Raise `AssertionError` with the table unless every case passed."""
        if not self.passed:
            raise AssertionError(f"attention backend does not keep its claims\n{self}")

    def __str__(self) -> str:
        rows = [
            (each.backend, each.subject, each.case, each.verdict, each.detail)
            for each in self.findings
        ]
        seconds = sum(each.seconds for each in self.findings)
        counts = ", ".join(
            f"{sum(each.verdict == verdict for each in self.findings)} {verdict}"
            for verdict in (OK, FAILED, NOT_TESTED)
        )
        lines = table(("backend", "subject", "case", "verdict", "detail"), rows)
        return "\n".join((*lines, "", f"{counts} on {self.device}, {seconds:.1f} s"))


def check_attention_backend(
    backend: Kind | str,
    device: str = "cpu",
    *,
    thorough: bool = True,
    part: tuple[int, int] = (0, 1),
) -> Report:
    """Run every case that the backend's capabilities claim.

    Args:
        backend: a class, or a registered name with all its classes that run on the device.
        device: cpu or cuda.
        thorough: False takes a few small cases, for slow interpreters.
        part: (i, n) takes every n-th case from i on, for n processes side by side: most of the time
            goes into the compiling of kernels.

    Raises:
        UnsupportedError: the name is unknown, no class runs on this device at all (platform
            or package missing), or serves a kind of KV that the kit knows.
    """
    kinds = ATTENTION_BACKENDS.entries(backend) if isinstance(backend, str) else (backend,)
    hardware = detect(device)
    return Report(
        device=hardware.name,
        findings=tuple(
            finding
            for kind in _runnable(kinds, hardware)
            for finding in _findings(kind, device, hardware, thorough, part)
        ),
    )


def _runnable(kinds: Sequence[Kind], hardware: Hardware) -> list[Kind]:
    """The classes that run here; raises what the first one says where none does."""
    found: list[Kind] = []
    errors: list[UnsupportedError] = []
    for kind in kinds:
        try:
            _check_runnable(kind, hardware)
            found.append(kind)
        except UnsupportedError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    return found


def _check_runnable(kind: Kind, hardware: Hardware) -> None:
    """What the machine lacks is no breach of a claim, but nothing can be tested either."""
    capabilities = kind.capabilities
    what = f"Attention backend {kind.name} cannot be checked here"
    if capabilities.platforms is not None and hardware.platform not in capabilities.platforms:
        raise UnsupportedError(what, why=f"it does not run on {hardware.platform}")
    missing = kind.unavailable(hardware)
    if missing is not None:
        raise UnsupportedError(what, why=missing.reason, remedy=missing.remedy)
    if not capabilities.kv_kinds & {KvKind.FULL, KvKind.WINDOW}:
        raise UnsupportedError(what, why="the kit has cases for full and window KV only")


def _findings(
    kind: Kind, device: str, hardware: Hardware, thorough: bool, part: tuple[int, int]
) -> Iterator[Finding]:
    for entry in islice(cases.cases_of(kind, device, thorough=thorough), part[0], None, part[1]):
        if isinstance(entry, Untested):
            yield Finding(
                backend=kind.name,
                subject=entry.subject,
                case="-",
                verdict=NOT_TESTED,
                detail=entry.reason,
            )
        else:
            yield _finding(kind, entry, hardware)


def _finding(kind: Kind, entry: Check, hardware: Hardware) -> Finding:
    start = time.perf_counter()
    detail = _breach(kind, entry, hardware)
    return Finding(
        backend=kind.name,
        subject=entry.subject,
        case=describe(entry.case),
        verdict=FAILED if detail else OK,
        detail=detail,
        seconds=time.perf_counter() - start,
    )


def _breach(kind: Kind, entry: Check, hardware: Hardware) -> str:
    """What is wrong in one case; empty when nothing is. A backend may fail in any way: here, every
    error is an answer."""
    refused = kind.refusals(need_of(entry.case, graph=entry.graph), hardware)
    if refused:
        return f"claimed, then refused: {'; '.join(refusal.reason for refusal in refused)}"
    try:
        entry.run(kind, entry.case)
    except HeadraceError as error:
        return f"claimed, then refused: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ""


def need_of(case: Case, *, graph: bool = False) -> AttentionNeed:
    """What the layers of a case ask of a backend."""
    return AttentionNeed.of(
        Phase.DECODE if case.decode else Phase.PREFILL,
        case.group,
        case.attention,
        dtype=_name(case.dtype),
        kv_dtype=_name(case.kv_dtype or case.dtype),
        page_size=case.page_size,
        graph=graph,
    )


def describe(case: Case) -> str:
    """A case in a line: what is not as in the plainest one."""
    plain = Case(rows=case.rows)
    parts = [f"{'decode' if case.decode else 'extend'} {case.rows}"]
    for name in ("heads", "dims", "page_size", "window", "soft_cap", "sinks", "padding"):
        value = getattr(case, name)
        if value != getattr(plain, name):
            parts.append(f"{name} {value}")
    parts += [_name(dtype) for dtype in (case.dtype, case.kv_dtype) if dtype is not None]
    if case.ended:
        parts.append(f"ended {sorted(case.ended)}")
    return ", ".join(parts)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
