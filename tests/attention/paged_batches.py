"""Random paged batches with NaN wherever no live query may look, and a float64 reference."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.attention.backend import AttentionBackend
from headrace.batch.facts import BatchFacts
from headrace.batch.forward_batch import ForwardBatch, HostBounds, KvGroup
from headrace.batch.forward_mode import ForwardMode
from headrace.config.persona import AttentionTraits, KvGroupTraits, KvKind

NAN = float("nan")


@dataclass(kw_only=True)
class Pool:
    """A KV pool of one layer."""

    page_size: int
    keys: Tensor  # [P, page, K, D]
    values: Tensor  # [P, page, K, Dv]

    def key_value(self, layer: int) -> tuple[Tensor, Tensor]:
        assert layer == 0
        return self.keys, self.values

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        raise AssertionError("backends only read")


@dataclass(kw_only=True)
class Layer:
    """An attention layer as backends see it."""

    pool: Pool
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None
    layer_id: int = 0
    pool_layer: int = 0
    kv_group: str = "full"


@dataclass(kw_only=True)
class Case:
    """What a batch looks like: per row (prefix, new tokens), and the layer's shape and habits.

    `ended` rows were ended on the device: the host counts one token more than the device has. A row
    (-1, 1) of a decode step is padding, of length 0.
    """

    rows: list[tuple[int, int]]
    heads: tuple[int, int] = (6, 2)
    dims: tuple[int, int] = (32, 32)
    page_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    decode: bool = False
    ended: frozenset[int] = field(default_factory=frozenset)
    padding: int = 0
    shuffled: bool = True
    device: str = "cpu"
    seed: int = 0

    @property
    def tokens(self) -> int:
        return sum(new for _, new in self.rows) + self.padding


@dataclass(kw_only=True)
class Scene:
    """A batch with its layer, its queries and what must come out (float64)."""

    case: Case
    layer: Layer
    batch: ForwardBatch
    q: Tensor  # [T, N, D]
    expected: Tensor  # [T, N, Dv] float64
    expected_lse: Tensor  # [T, N] float64
    live: Tensor  # [T] bool, tokens whose result counts

    def backend(self, kind: type[AttentionBackend]) -> AttentionBackend:
        case, layer = self.case, self.layer
        return kind(
            group=KvGroupTraits(
                name="full",
                kind=KvKind.FULL if case.window is None else KvKind.WINDOW,
                window=case.window,
                layers=(0,),
            ),
            attention=AttentionTraits(
                num_heads=layer.num_heads,
                num_kv_heads=layer.num_kv_heads,
                head_dim=layer.head_dim,
                v_head_dim=layer.v_head_dim,
                scale=layer.scale,
                soft_cap=layer.soft_cap,
                sinks=case.sinks,
            ),
            page_size=case.page_size,
            max_sequences=max(1, len(case.rows)),
            max_model_len=max((prefix + new for prefix, new in case.rows), default=1),
            dtype=case.dtype,
            device=torch.device(case.device),
        )


def make_scene(case: Case) -> Scene:
    """A batch over a pool that is NaN but for the keys that some live query may see."""
    draw = torch.Generator().manual_seed(case.seed)
    (heads, kv_heads), (dim, v_dim) = case.heads, case.dims
    page = case.page_size
    totals = [prefix + new for prefix, new in case.rows]
    widths = [-(-total // page) for total in totals]
    pages = 1 + sum(widths) + 3
    keys = torch.full((pages, page, kv_heads, dim), NAN, dtype=torch.float64)
    values = torch.full((pages, page, kv_heads, v_dim), NAN, dtype=torch.float64)
    kv_dtype = case.kv_dtype or case.dtype
    order = torch.randperm(pages - 1, generator=draw) if case.shuffled else torch.arange(pages - 1)
    free = (order + 1).tolist()
    # Past a row's pages the table holds free pages, full of NaN.
    table = torch.full((len(case.rows), max(widths, default=1) + 2), free[-1], dtype=torch.int32)
    q = torch.full((case.tokens, heads, dim), NAN, dtype=case.dtype)
    expected = torch.zeros(case.tokens, heads, v_dim, dtype=torch.float64)
    expected_lse = torch.full((case.tokens, heads), -math.inf, dtype=torch.float64)
    live = torch.zeros(case.tokens, dtype=torch.bool)
    sinks = torch.randn(heads, generator=draw) if case.sinks else None
    scale = dim**-0.5
    layer = Layer(
        pool=Pool(page_size=page, keys=keys, values=values),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        v_head_dim=v_dim,
        scale=scale,
        window=case.window,
        soft_cap=case.soft_cap,
        sinks=sinks,
    )
    start = 0
    for index, (prefix, new) in enumerate(case.rows):
        total = totals[index]
        own, free = free[: widths[index]], free[widths[index] :]
        table[index, : widths[index]] = torch.tensor(own, dtype=torch.int32)
        k = torch.randn(total, kv_heads, dim, generator=draw).to(kv_dtype).double()
        v = torch.randn(total, kv_heads, v_dim, generator=draw).to(kv_dtype).double()
        fresh = torch.randn(new, heads, dim, generator=draw).to(case.dtype)
        q[start : start + new] = fresh
        if index not in case.ended and total > 0:
            out, lse = reference(fresh.double(), k, v, prefix, layer)
            span = slice(start, start + new)
            expected[span], expected_lse[span], live[span] = out, lse, True
        # Keys that fell out of the window of every query stay NaN, as a window pool may leave them;
        # so does the last token of a row that has ended: its slot was never written.
        oldest = prefix - (index in case.ended)
        low = 0 if case.window is None else max(0, oldest - case.window + 1)
        for position in range(low, total - (index in case.ended)):
            keys[own[position // page], position % page] = k[position]
            values[own[position // page], position % page] = v[position]
        start += new
    layer.pool.keys = keys.to(kv_dtype).to(case.device)
    layer.pool.values = values.to(kv_dtype).to(case.device)
    if layer.sinks is not None:
        layer.sinks = layer.sinks.to(case.device)
    return Scene(
        case=case,
        layer=layer,
        batch=make_batch(case, table.to(case.device)),
        q=q.to(case.device),
        expected=expected,
        expected_lse=expected_lse,
        live=live,
    )


def make_batch(case: Case, table: Tensor) -> ForwardBatch:
    """The step of a case over page tables [B, max pages]."""
    ended = torch.tensor(
        [index in case.ended for index in range(len(case.rows))], dtype=torch.int32
    )
    rows = torch.tensor(case.rows, dtype=torch.int32).view(-1, 2)
    prefix, new = rows.T.contiguous()
    starts = torch.cumsum(new, 0, dtype=torch.int32) - new
    mode = ForwardMode.DECODE if case.decode else ForwardMode.EXTEND
    lengths = None if case.decode else [t.to(case.device) for t in (new - ended, prefix, starts)]
    return ForwardBatch(
        mode=mode,
        rows=torch.arange(1, len(case.rows) + 1, device=case.device),
        bounds=HostBounds(
            seq_lens=[prefix + new for prefix, new in case.rows],
            extend_lens=[new for _, new in case.rows],
        ),
        facts=BatchFacts(
            mode=mode,
            tokens=case.tokens,
            live_tokens=case.tokens - case.padding,
            sequences=len(case.rows),
            max_length=max((prefix + new for prefix, new in case.rows), default=0),
        ),
        seq_lens=(prefix + new - ended).to(case.device),
        extend_lens=lengths[0] if lengths else None,
        prefix_lens=lengths[1] if lengths else None,
        extend_start=lengths[2] if lengths else None,
        kv={
            "full": KvGroup(
                name="full",
                page_size=case.page_size,
                page_table=table,
                out_cache_loc=torch.zeros(case.tokens, dtype=torch.int64, device=case.device),
            )
        },
    )


def run(
    scene: Scene, backend: AttentionBackend, *, with_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Output [T, N, Dv] and lse [T, N] of a backend, on the host."""
    lse = None
    if with_lse:
        lse = torch.full(scene.expected_lse.shape, 7.0, device=scene.q.device)
    backend.prepare_metadata(scene.batch)
    out = backend.forward(scene.q, scene.layer, scene.batch, lse=lse)
    return out.cpu(), None if lse is None else lse.cpu()


TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def check(case: Case, kind: type[AttentionBackend], *, with_lse: bool = False) -> None:
    """Live tokens agree with the reference; nothing is NaN, whatever lies around them."""
    scene = make_scene(case)
    out, lse = run(scene, scene.backend(kind), with_lse=with_lse)
    tolerance = TOLERANCE[case.dtype]
    assert out.dtype == case.dtype
    assert out.isfinite().all()
    torch.testing.assert_close(
        out[scene.live].double(), scene.expected[scene.live], rtol=tolerance, atol=tolerance
    )
    if lse is not None:
        torch.testing.assert_close(
            lse[scene.live].double(), scene.expected_lse[scene.live], rtol=1e-5, atol=1e-5
        )


def reference(q: Tensor, k: Tensor, v: Tensor, prefix: int, layer: Layer) -> tuple[Tensor, Tensor]:
    """One query and one head at a time, float64: [new, N, Dv] and lse [new, N]."""
    new, heads, _ = q.shape
    group = heads // layer.num_kv_heads
    out = torch.empty(new, heads, v.shape[2], dtype=torch.float64)
    lse = torch.empty(new, heads, dtype=torch.float64)
    for token in range(new):
        position = prefix + token
        low = 0 if layer.window is None else max(0, position - layer.window + 1)
        for head in range(heads):
            scores = k[low : position + 1, head // group] @ q[token, head] * layer.scale
            if layer.soft_cap is not None:
                scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
            bottom = scores
            if layer.sinks is not None:
                bottom = torch.cat((scores, layer.sinks[head].double()[None]))
            lse[token, head] = torch.logsumexp(bottom, 0)
            weights = torch.exp(scores - lse[token, head])
            out[token, head] = weights @ v[low : position + 1, head // group]
    return out, lse
