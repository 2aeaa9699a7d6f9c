"""What the conformance kit does with a case. Every check raises where the backend is wrong."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from headrace.attention.backend import AttentionBackend
from headrace.base.errors import UnsupportedError
from headrace.batch.facts import BatchFacts, Bucket
from headrace.batch.forward_batch import ForwardBatch, HostBounds, KvGroup
from headrace.batch.forward_mode import ForwardMode
from headrace.testing.paged_batches import (
    NAN,
    Case,
    Layer,
    Pool,
    Scene,
    agree,
    check,
    make_scene,
    run,
)

Kind = type[AttentionBackend]
WARM_UPS = 2


def plain(kind: Kind, case: Case) -> None:
    """The result alone."""
    check(case, kind)


def with_lse(kind: Kind, case: Case) -> None:
    """Result and lse."""
    check(case, kind, with_lse=True)


def no_rows(kind: Kind, case: Case) -> None:
    """A step of nothing is legal."""
    scene = make_scene(replace(case, rows=[]))
    out, _ = run(scene, scene.backend(kind))
    shape = (0, case.heads[0], case.dims[1])
    assert out.shape == shape, f"shape {tuple(out.shape)} instead of {shape}"


def forgets(kind: Kind, case: Case) -> None:
    """A later step does not see the plan of an earlier one."""
    first = make_scene(case)
    rows = [(prefix + new, 1) for prefix, new in case.rows]
    second = make_scene(replace(case, rows=rows, decode=True, seed=3))
    backend = first.backend(kind, longest=1 + max(prefix + new for prefix, new in case.rows))
    for scene in (first, second, first):
        agree(run(scene, backend)[0], scene)


def own_window(kind: Kind, case: Case) -> None:
    """Layers of one group may have windows of their own."""
    scene = make_scene(case)
    backend = scene.backend(kind)
    backend.prepare_metadata(scene.batch)
    whole = backend.forward(scene.q, scene.layer, scene.batch)
    scene.layer.window = 8
    short = backend.forward(scene.q, scene.layer, scene.batch)
    agree(whole.cpu(), scene)
    agree(short.cpu(), make_scene(replace(case, window=8)))


def strided_in_and_out(kind: Kind, case: Case) -> None:
    """Queries may be part of a wider tensor; a given `out` is written and returned."""
    scene = make_scene(case)
    tokens, heads, dim = scene.q.shape
    wide = torch.full((tokens, heads * dim + 64), NAN, dtype=case.dtype, device=case.device)
    wide[:, : heads * dim] = scene.q.flatten(1)
    q = wide[:, : heads * dim].view(tokens, heads, dim)
    assert not q.is_contiguous()
    backend = scene.backend(kind)
    backend.prepare_metadata(scene.batch)
    out = torch.full((tokens, heads, case.dims[1]), NAN, dtype=case.dtype, device=case.device)
    assert backend.forward(q, scene.layer, scene.batch, out=out) is out, "out is not returned"
    agree(out.cpu(), scene)


def fresh_keys(kind: Kind, case: Case) -> None:
    """A prefill without prefix may be handed its keys and values."""
    scene = make_scene(case)
    backend = scene.backend(kind)
    backend.prepare_metadata(scene.batch)
    out = backend.forward(scene.q, scene.layer, scene.batch, kv=scene.fresh)
    agree(out.cpu(), scene)


def same_bits(kind: Kind, case: Case) -> None:
    """A row's result has the same bits whatever else is in the batch, and every time."""
    scene = make_scene(case)
    backend = scene.backend(kind)
    together = [run(scene, backend)[0] for _ in range(2)]
    assert torch.equal(*together), "two runs of one batch differ"
    start = 0
    for index, (_, new) in enumerate(case.rows):
        alone = _row_alone(scene, index, start)
        out = run(alone, alone.backend(kind))[0]
        assert torch.equal(out, together[0][start : start + new]), f"row {index} alone differs"
        start += new


def same_bits_one_by_one(kind: Kind, case: Case) -> None:
    """A token has the same bits in a prompt, whole or in chunks, as where it is decoded."""
    scene = make_scene(case)
    owners = [index for index, (_, new) in enumerate(case.rows) for _ in range(new)]
    places = [prefix + step for prefix, new in case.rows for step in range(new)]
    other = make_scene(replace(case, rows=[(place, 1) for place in places], decode=True))
    table = scene.batch.kv["full"].page_table[owners]
    other.batch.kv["full"] = replace(other.batch.kv["full"], page_table=table)
    other = replace(other, layer=scene.layer, q=scene.q[: len(places)])
    decoded = run(other, other.backend(kind))[0]
    extended = run(scene, scene.backend(kind))[0][: len(places)]
    differ = (decoded != extended).flatten(1).any(1).nonzero().flatten().tolist()
    assert not differ, f"tokens {differ[:5]} differ where they are decoded"


def _row_alone(scene: Scene, index: int, start: int) -> Scene:
    """One row of a scene over the same pages."""
    case = replace(scene.case, rows=scene.case.rows[index : index + 1])
    other = make_scene(case)
    span = slice(start, start + case.rows[0][1])
    other.batch.kv["full"] = replace(
        other.batch.kv["full"], page_table=scene.batch.kv["full"].page_table[index : index + 1]
    )
    return replace(other, layer=scene.layer, q=scene.q[span])


def refuses_graphs(kind: Kind, case: Case) -> None:
    """A backend that claims no graph says so when it is captured all the same."""
    scene = make_scene(case)
    backend = scene.backend(kind)
    attempts: tuple[Callable[[], None], ...] = (
        partial(backend.capture_buffers, Bucket(tokens=8, sequences=8)),
        partial(backend.prepare_metadata_in_graph, scene.batch),
    )
    for attempt in attempts:
        try:
            attempt()
        except UnsupportedError:
            continue
        raise AssertionError("graph_decode is False, and yet it lets itself be captured")


def metadata_in_graph(kind: Kind, case: Case) -> None:
    """Device-side metadata serves every length, whatever buckets were prepared before and after."""
    scene = make_scene(case)
    longest = max(prefix + new for prefix, new in case.rows)
    backend = scene.backend(kind, longest=5 * longest)
    rows = len(case.rows)
    for size in (rows, 1, rows + 4):
        backend.capture_buffers(Bucket(tokens=size, sequences=size))
    backend.prepare_metadata_in_graph(scene.batch)
    agree(backend.forward(scene.q, scene.layer, scene.batch).cpu(), scene)


def capture_and_replay(kind: Kind, case: Case) -> None:
    """One graph serves other lengths, tables, pool contents and padding than it was captured at."""
    lengths = [prefix + new for prefix, new in case.rows]
    longer = [(length + 300, 1) for length in lengths]
    scenes = [
        make_scene(case),
        make_scene(replace(case, rows=longer, seed=5)),
        make_scene(replace(case, rows=[*case.rows[::-1][:-1], (-1, 1)], seed=6)),
        make_scene(case),
    ]
    backend = scenes[1].backend(kind, longest=2048)
    static = Static.of(scenes)
    static.load(scenes[0])
    backend.capture_buffers(Bucket(tokens=len(lengths), sequences=len(lengths)))

    def step() -> None:
        backend.prepare_metadata_in_graph(static.batch)
        backend.forward(static.q, static.layer, static.batch, out=static.out)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for scene in scenes:
        static.load(scene)
        static.out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        agree(static.out.cpu(), scene)


@dataclass(kw_only=True)
class Static:
    """Tensors that a graph reads, wide enough for each of some decode scenes."""

    pool: Pool
    layer: Layer
    batch: ForwardBatch
    q: Tensor  # [B, N, D]
    out: Tensor  # [B, N, Dv]

    @classmethod
    def of(cls, scenes: list[Scene]) -> "Static":
        first = scenes[0]
        pools = [scene.layer.pool.key_value(0) for scene in scenes]
        pages = max(len(keys) for keys, _ in pools)
        keys, values = (part.new_full((pages, *part.shape[1:]), NAN) for part in pools[0])
        pool = Pool(page_size=first.case.page_size, keys=keys, values=values)
        width = max(scene.batch.kv["full"].page_table.shape[1] for scene in scenes)
        rows, device = len(first.case.rows), first.q.device
        batch = ForwardBatch(
            mode=ForwardMode.DECODE,
            rows=torch.zeros(rows, dtype=torch.int64, device=device),
            bounds=HostBounds(seq_lens=[0] * rows, extend_lens=[0] * rows),
            facts=BatchFacts(
                mode=ForwardMode.DECODE, tokens=rows, live_tokens=0, sequences=rows, max_length=0
            ),
            seq_lens=torch.zeros(rows, dtype=torch.int32, device=device),
            kv={
                "full": KvGroup(
                    name="full",
                    page_size=first.case.page_size,
                    page_table=torch.zeros(rows, width, dtype=torch.int32, device=device),
                    out_cache_loc=torch.zeros(rows, dtype=torch.int64, device=device),
                )
            },
        )
        out = first.q.new_zeros(rows, first.case.heads[0], first.case.dims[1])
        layer = replace(first.layer, pool=pool)
        return cls(pool=pool, layer=layer, batch=batch, q=torch.zeros_like(first.q), out=out)

    def load(self, scene: Scene) -> None:
        """Make the graph's tensors those of a scene; what it does not fill is NaN, or page 0."""
        for mine, theirs in zip(
            (self.pool.keys, self.pool.values), scene.layer.pool.key_value(0), strict=True
        ):
            mine.fill_(NAN)
            mine[: len(theirs)] = theirs
        table = scene.batch.kv["full"].page_table
        mine = self.batch.kv["full"].page_table
        mine.zero_()
        mine[:, : table.shape[1]] = table
        self.batch.seq_lens.copy_(scene.batch.seq_lens)
        self.q.copy_(scene.q)
