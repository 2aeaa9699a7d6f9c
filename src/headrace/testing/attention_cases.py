"""The cases of the conformance kit: from capabilities to checks."""

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from headrace.attention.backend import AttentionBackend
from headrace.config.engine_config import PAGE_SIZES
from headrace.testing import attention_checks as checks
from headrace.testing.paged_batches import Case

Kind = type[AttentionBackend]
Run = Callable[[Kind, Case], None]
Rows = list[tuple[int, int]]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DIMS = (
    (16, 16),
    (32, 32),
    (64, 64),
    (96, 96),
    (128, 128),
    (192, 128),
    (256, 256),
    (80, 48),
    (7, 9),
)
# Of the dtypes that tensor cores take, the one that leaves faults less room.
ON_A_DEVICE = "float16"
HEADS = ((4, 4), (6, 2), (5, 1), (9, 3), (16, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One case and what is done with it. `graph`: it needs what `graph_decode` claims."""

    subject: str
    case: Case
    run: Run
    graph: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Untested:
    subject: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Rows (prefix, new tokens) of the kinds of steps."""

    decode: Rows
    fresh: Rows
    extend: Rows
    mixed: Rows


LARGE = Steps(
    decode=[(length - 1, 1) for length in (1, 15, 16, 17, 64, 200)],
    fresh=[(0, length) for length in (1, 15, 16, 17, 200)],
    extend=[(16, 17), (15, 2), (64, 100), (1, 33)],
    mixed=[(0, 17), (199, 1), (16, 15), (0, 1), (31, 2), (5, 200), (64, 1)],
)
SMALL = Steps(
    decode=[(0, 1), (16, 1), (40, 1)],
    fresh=[(0, 1), (0, 20)],
    extend=[(16, 5), (15, 2)],
    mixed=[(0, 5), (17, 3), (20, 1)],
)


def cases_of(kind: Kind, device: str, *, thorough: bool) -> Iterator[Check | Untested]:
    """Everything that a backend's capabilities claim, and what they do not."""
    maker = _Maker(kind, device, thorough)
    yield from maker.modes()
    yield from maker.page_sizes()
    yield from maker.dtypes()
    yield from maker.heads()
    yield from maker.habits()
    yield from maker.padding_and_ended()
    yield from maker.arguments()
    yield from maker.determinism()
    yield from maker.graphs()


class _Maker:
    """Cases of one backend; the plainest claimed shape is what others vary."""

    def __init__(self, kind: Kind, device: str, thorough: bool) -> None:
        self.claims, self.thorough = kind.capabilities, thorough
        self.steps = LARGE if thorough else SMALL
        claims = self.claims
        self.dtype_names = [name for name in DTYPES if name in claims.dtypes]
        self.dims = [
            dims
            for dims in DIMS
            if _takes(claims.head_dims, dims[0]) and _takes(claims.head_dims, dims[1])
        ]
        self.pages = [page for page in PAGE_SIZES if _takes(claims.page_sizes, page)]
        if claims.page_sizes is None:
            self.pages.append(48)
        assert self.dtype_names, "the backend claims none of the dtypes that models have"
        assert self.dims, "the backend claims none of the head dimensions that the kit has"
        assert self.pages, "the backend claims none of the page sizes that an engine has"
        self.plain: dict[str, Any] = {
            "dtype": DTYPES[self._plain_dtype(device)],
            "dims": (32, 32) if (32, 32) in self.dims else self.dims[0],
            "page_size": 16 if 16 in self.pages else self.pages[0],
            "device": device,
        }

    def _plain_dtype(self, device: str) -> str:
        """The first claimed, but on a device one that engines run in there: kernels of float32
        products also take a compiler several times as long."""
        if device != "cpu" and ON_A_DEVICE in self.dtype_names:
            return ON_A_DEVICE
        return self.dtype_names[0]

    def case(self, step: str, **options: Any) -> Case:
        rows = options.pop("rows", None) or getattr(self.steps, step)
        return Case(rows=rows, decode=step == "decode", **(self.plain | options))

    def both(self, subject: str, run: Run = checks.plain, **options: Any) -> Iterator[Check]:
        """A decode and a mixed step."""
        for step in ("decode", "mixed"):
            yield Check(subject=subject, case=self.case(step, **options), run=run)

    def modes(self) -> Iterator[Check]:
        for step in ("decode", "fresh", "extend", "mixed"):
            yield Check(subject=f"mode {step}", case=self.case(step), run=checks.plain)
        yield Check(subject="no rows", case=self.case("extend"), run=checks.no_rows)
        yield Check(subject="one step after another", case=self.case("mixed"), run=checks.forgets)

    def page_sizes(self) -> Iterator[Check]:
        pages = self.pages if self.thorough else sorted({self.pages[0], self.pages[-1]})
        for page in pages:
            yield from self.both("page size", page_size=page)
        for step in ("decode", "fresh"):
            # pages that follow each other, of one row alone
            rows = [(150, 1)] if step == "decode" else [(0, 150)]
            if self.thorough:
                case = self.case(step, rows=rows, shuffled=False)
                yield Check(subject="one row, pages in order", case=case, run=checks.plain)

    def dtypes(self) -> Iterator[Check | Untested]:
        names = self.dtype_names
        for name in names if self.thorough else names[:2]:
            if name in self.claims.kv_dtypes:
                yield from self.both(f"dtype {name}", dtype=DTYPES[name], seed=1)
        if not self.claims.mixed_dtypes:
            yield Untested(subject="pool of another dtype", reason="mixed_dtypes is False")
            return
        kv_names = [name for name in DTYPES if name in self.claims.kv_dtypes]
        for name, kv_name in ((a, b) for a in names for b in kv_names if a != b):
            yield from self.both(
                "pool of another dtype", dtype=DTYPES[name], kv_dtype=DTYPES[kv_name]
            )

    def heads(self) -> Iterator[Check]:
        for heads in HEADS if self.thorough else HEADS[3:4]:
            yield from self.both("head counts", heads=heads, run=checks.with_lse)
        for dims in self.dims if self.thorough else ():
            yield from self.both("head dimensions", dims=dims)

    def habits(self) -> Iterator[Check | Untested]:
        """Windows, soft cap and sinks, alone and together, with and without lse."""
        claims = self.claims
        every: dict[str, Any] = {}
        windows = (1, 16, 100) if self.thorough else (7,)
        for subject, claimed, variants in (
            ("window", claims.sliding_window, [{"window": window} for window in windows]),
            ("soft cap", claims.soft_cap, [{"soft_cap": 2.0}]),
            ("sinks", claims.sinks, [{"sinks": True}]),
        ):
            if not claimed:
                yield Untested(subject=subject, reason="its capability is False")
                continue
            for options in variants:
                yield from self.both(subject, **options)
                yield from self.both(f"{subject}, lse", run=checks.with_lse, **options)
            every |= variants[-1]
        if len(every) > 1:
            yield from self.both("all habits, lse", run=checks.with_lse, **every)
        if claims.sliding_window:
            case = self.case("mixed")
            yield Check(subject="a layer's own window", case=case, run=checks.own_window)

    def padding_and_ended(self) -> Iterator[Check | Untested]:
        padded = [(-1, 1), *self.steps.decode, (-1, 1)]
        yield Check(
            subject="padding rows", case=self.case("decode", rows=padded), run=checks.with_lse
        )
        yield Check(
            subject="padding tokens", case=self.case("mixed", padding=3), run=checks.with_lse
        )
        if self.claims.needs_exact_host_lengths:
            yield Untested(subject="ended rows", reason="needs_exact_host_lengths is True")
            return
        for ended in (frozenset({1}), frozenset({0, 2})):
            yield from self.both("ended rows", run=checks.with_lse, ended=ended)

    def arguments(self) -> Iterator[Check]:
        yield from self.both("out given, q strided", run=checks.strided_in_and_out)
        case = self.case("fresh")
        yield Check(subject="fresh keys and values", case=case, run=checks.fresh_keys)

    def determinism(self) -> Iterator[Check | Untested]:
        if self.claims.deterministic:
            yield from self.both("deterministic", run=checks.same_bits)
            for window in (None, 16) if self.claims.sliding_window else (None,):
                case = replace(self.case("mixed"), window=window)
                yield Check(subject="deterministic", case=case, run=checks.same_bits_one_by_one)
        else:
            yield Untested(subject="deterministic", reason="its capability is False")

    def graphs(self) -> Iterator[Check | Untested]:
        case = self.case("decode")
        if not self.claims.graph_decode:
            yield Check(subject="refuses graphs", case=case, run=checks.refuses_graphs)
            return
        yield Check(
            subject="metadata in graph", case=case, run=checks.metadata_in_graph, graph=True
        )
        if case.device != "cuda":
            yield Untested(subject="capture and replay", reason="needs a CUDA device")
            return
        for options in self._graph_options():
            yield Check(
                subject="capture and replay",
                case=replace(case, **options),
                run=checks.capture_and_replay,
                graph=True,
            )

    def _graph_options(self) -> Iterator[dict[str, Any]]:
        yield {}
        if self.claims.sliding_window:
            yield {"window": 16}
        for page in self.pages if self.thorough else ():
            yield {"page_size": page}


def _takes(sizes: Container[int] | None, size: int) -> bool:
    return sizes is None or size in sizes
