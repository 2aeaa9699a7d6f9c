"""Random paged batches with NaN wherever no live query may look, and a float64 reference."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.attention.backend import AttentionBackend, AttentionSetting
from headrace.batch.facts import BatchFacts
from headrace.batch.forward_batch import ForwardBatch, HostBounds, KvGroup
from headrace.batch.forward_mode import ForwardMode
from headrace.batch.protocols import KvPool
from headrace.config.persona import AttentionTraits, KvGroupTraits, KvKind

NAN = float("nan")
SPARE_PAGES = 3
LARGE = 1000.0


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

    pool: KvPool
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

    @property
    def group(self) -> KvGroupTraits:
        kind = KvKind.FULL if self.window is None else KvKind.WINDOW
        return KvGroupTraits(name="full", kind=kind, window=self.window, layers=(0,))

    @property
    def attention(self) -> AttentionTraits:
        (heads, kv_heads), (dim, v_dim) = self.heads, self.dims
        return AttentionTraits(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            v_head_dim=v_dim,
            scale=dim**-0.5,
            soft_cap=self.soft_cap,
            sinks=self.sinks,
        )


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
    fresh: tuple[Tensor, Tensor]  # k [T, K, D] and v [T, K, Dv] of the new tokens

    def backend(self, kind: type[AttentionBackend], *, longest: int = 1) -> AttentionBackend:
        """A backend for this batch and others like it, of up to `longest` tokens a row."""
        case = self.case
        setting = AttentionSetting(
            group=case.group,
            attention=case.attention,
            page_size=case.page_size,
            max_sequences=max(1, len(case.rows)),
            max_model_len=max(longest, *(prefix + new for prefix, new in case.rows), 1),
            dtype=case.dtype,
            device=torch.device(case.device),
        )
        return kind(setting)


def make_scene(case: Case) -> Scene:
    """A batch over a pool that is NaN but for the keys that some live query may see."""
    draw = torch.Generator().manual_seed(case.seed)
    (heads, kv_heads), (dim, v_dim) = case.heads, case.dims
    kv_dtype = case.kv_dtype or case.dtype
    owned, spare = _deal_pages(case, draw)
    pool = _empty_pool(case, 1 + sum(map(len, owned)) + len(spare))
    # Past a row's pages the table holds spare pages, full of NaN.
    width = max(map(len, owned), default=1) + 2
    table = torch.tensor([[*own, *spare * width][:width] for own in owned], dtype=torch.int32)
    layer = _layer(case, pool, draw)
    q = torch.full((case.tokens, heads, dim), NAN, dtype=case.dtype)
    fresh = (
        torch.full((case.tokens, kv_heads, dim), NAN, dtype=kv_dtype),
        torch.full((case.tokens, kv_heads, v_dim), NAN, dtype=kv_dtype),
    )
    expected = torch.zeros(case.tokens, heads, v_dim, dtype=torch.float64)
    expected_lse = torch.full((case.tokens, heads), -math.inf, dtype=torch.float64)
    live = torch.zeros(case.tokens, dtype=torch.bool)
    start = 0
    for index, (prefix, new) in enumerate(case.rows):
        total, span = prefix + new, slice(start, start + new)
        k = torch.randn(total, kv_heads, dim, generator=draw).to(kv_dtype).double()
        v = torch.randn(total, kv_heads, v_dim, generator=draw).to(kv_dtype).double()
        q[span] = torch.randn(new, heads, dim, generator=draw).to(case.dtype)
        if total > 0:
            fresh[0][span], fresh[1][span] = k[prefix:], v[prefix:]
        if index not in case.ended and total > 0:
            out, lse = reference(q[span].double(), k, v, prefix, layer)
            expected[span], expected_lse[span], live[span] = out, lse, True
        # Pages that fell out of the window of every query stay NaN, as a window pool may leave
        # them; so does the last token of a row that has ended: its slot was never written. Keys
        # behind the window that share a page with seen ones are still there: large, so that one
        # that is looked at shows.
        oldest = prefix - (index in case.ended)
        low = 0 if case.window is None else max(0, oldest - case.window + 1)
        for position in range(
            low // case.page_size * case.page_size, total - (index in case.ended)
        ):
            page, place = owned[index][position // case.page_size], position % case.page_size
            old = LARGE if position < low else 1.0
            pool.keys[page, place], pool.values[page, place] = old * k[position], old * v[position]
        start += new
    pool.keys = pool.keys.to(case.device, kv_dtype)
    pool.values = pool.values.to(case.device, kv_dtype)
    if layer.sinks is not None:
        layer.sinks = layer.sinks.to(case.device)
    return Scene(
        case=case,
        layer=layer,
        batch=make_batch(case, table.view(len(case.rows), width).to(case.device)),
        q=q.to(case.device),
        expected=expected,
        expected_lse=expected_lse,
        live=live,
        fresh=(fresh[0].to(case.device), fresh[1].to(case.device)),
    )


def _deal_pages(case: Case, draw: torch.Generator) -> tuple[list[list[int]], list[int]]:
    """The pages of each row, and a few that belong to nobody."""
    widths = [-(-(prefix + new) // case.page_size) for prefix, new in case.rows]
    count = sum(widths) + SPARE_PAGES
    order = torch.randperm(count, generator=draw) if case.shuffled else torch.arange(count)
    pages = iter((order + 1).tolist())
    owned = [[next(pages) for _ in range(width)] for width in widths]
    return owned, list(pages)


def _empty_pool(case: Case, pages: int) -> Pool:
    (_, kv_heads), (dim, v_dim) = case.heads, case.dims
    shape = (pages, case.page_size, kv_heads)
    return Pool(
        page_size=case.page_size,
        keys=torch.full((*shape, dim), NAN, dtype=torch.float64),
        values=torch.full((*shape, v_dim), NAN, dtype=torch.float64),
    )


def _layer(case: Case, pool: Pool, draw: torch.Generator) -> Layer:
    (heads, kv_heads), (dim, v_dim) = case.heads, case.dims
    return Layer(
        pool=pool,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        v_head_dim=v_dim,
        scale=dim**-0.5,
        window=case.window,
        soft_cap=case.soft_cap,
        sinks=torch.randn(heads, generator=draw) if case.sinks else None,
    )


def make_batch(case: Case, table: Tensor) -> ForwardBatch:
    """The step of a case over page tables [B, max pages]."""
    ended = torch.tensor(
        [index in case.ended for index in range(len(case.rows))], dtype=torch.int32
    )
    rows = torch.tensor(case.rows, dtype=torch.int32).view(-1, 2)
    prefix, new = rows.T.contiguous()
    starts = torch.cumsum(new, 0, dtype=torch.int32) - new
    mode = _mode(case)
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
            has_prefix=any(prefix > 0 for prefix, _ in case.rows),
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


def _mode(case: Case) -> ForwardMode:
    if case.decode:
        return ForwardMode.DECODE
    decodes = any(prefix > 0 and new == 1 for prefix, new in case.rows)
    return ForwardMode.MIXED if decodes else ForwardMode.EXTEND


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
# Of float16 and bfloat16, kernels may take a GPU's own tanh for the soft cap: 2^-11 exact.
LSE_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-3, torch.float16: 1e-3}


def check(case: Case, kind: type[AttentionBackend], *, with_lse: bool = False) -> None:
    """Result, and lse where it is asked, are the reference's, whatever lies around live tokens."""
    scene = make_scene(case)
    out, lse = run(scene, scene.backend(kind), with_lse=with_lse)
    assert out.dtype == case.dtype, f"result in {out.dtype}"
    agree(out, scene)
    if lse is not None:
        tolerance = LSE_TOLERANCE[case.dtype]
        torch.testing.assert_close(
            lse[scene.live].double(), scene.expected_lse[scene.live], rtol=tolerance, atol=tolerance
        )


def agree(out: Tensor, scene: Scene) -> None:
    """Live tokens are the reference's; nothing is NaN."""
    tolerance = TOLERANCE[scene.case.dtype]
    assert out.isfinite().all(), "the result holds NaN or infinity"
    torch.testing.assert_close(
        out[scene.live].double(), scene.expected[scene.live], rtol=tolerance, atol=tolerance
    )


def reference(q: Tensor, k: Tensor, v: Tensor, prefix: int, layer: Layer) -> tuple[Tensor, Tensor]:
    """All scores at once in float64: q [new, N, D], k and v [total, K, D] -> [new, N, Dv] and lse
    [new, N]."""
    group = layer.num_heads // layer.num_kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qnd,tnd->nqt", q, k) * layer.scale
    if layer.soft_cap is not None:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    behind = prefix + torch.arange(len(q))[:, None] - torch.arange(len(k))  # [new, total]
    seen = behind >= 0
    if layer.window is not None:
        seen &= behind < layer.window
    scores = scores.masked_fill(~seen, -math.inf)
    bottom = scores
    if layer.sinks is not None:
        sink = layer.sinks.double()[:, None, None].expand(-1, len(q), 1)
        bottom = torch.cat((scores, sink), -1)
    lse = torch.logsumexp(bottom, -1)  # [N, new]
    out = torch.einsum("nqt,tnd->qnd", torch.exp(scores - lse[..., None]), v)
    return out, lse.T.contiguous()
