"""On a CUDA device: the KV canary's kernels give the bits of their twin, inside a graph too."""

import random

import pytest
import torch
from canary_cases import found, make_pool, make_step, write_model_output

from headrace.kernels import kv_canary
from headrace.kernels.kv_canary import CHAIN, DATA, chain_of

pytest.importorskip("triton", reason="the kernels need the triton package")

from headrace.kernels import kv_canary_triton

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SEQUENCES = 24


@pytest.mark.parametrize("real_data", ["off", "partial", "all"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_many_sequences_in_and_outside_a_graph(page_size: int, real_data: str) -> None:
    shape = {
        "page_size": page_size,
        "pages": 1 + SEQUENCES * (768 // page_size),
        "layers": tuple(range(1, 12)),
        "heads": 4,
        "dims": (64, 32),
        "real_data": real_data,
    }
    pools = [make_pool(SEQUENCES, device=device, **shape) for device in ("cpu", "cuda")]  # type: ignore[arg-type]
    draw = random.Random(page_size)
    first = [draw.choice((1, 63, 64, 65, 300, 600)) for _ in range(SEQUENCES)]
    for number, new in enumerate((first, [1] * SEQUENCES, [draw.randint(0, 9) for _ in first])):
        for pool, kernels in zip(pools, (kv_canary, kv_canary_triton), strict=True):
            step = make_step(pool, list(new), random.Random(number))
            report = pool.report(tokens=16384)
            kernels.begin_step(step, pool.records, report)
            write_model_output(pool, step, number)
            kernels.end_step(step, pool.records, report)
            assert found(report) == []
            ends = [chain_of(tokens) for tokens in pool.tokens]
            assert report.ends[:SEQUENCES].tolist() == ends
        for name in ("marks", "chains", "prints"):
            twin, mine = (getattr(pool.records, name) for pool in pools)
            # slot 0 takes whatever padding leaves there
            assert twin is mine is None or torch.equal(twin[1:], mine[1:].cpu()), name
    pool = pools[1]
    step, report = make_step(pool, [1] * SEQUENCES, draw), pool.report(tokens=16384)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kv_canary_triton.begin_step(step, pool.records, report)
        kv_canary_triton.end_step(step, pool.records, report)
    graph.replay()
    assert found(report) == []
    for _ in range(3):  # the same launches fit lengths that have changed meanwhile
        later = make_step(pool, [1] * SEQUENCES, draw)
        for name in ("seq_lens", "input_ids", "positions", "out_cache_loc"):
            getattr(step, name).copy_(getattr(later, name))
        graph.replay()
        assert found(report) == []
        assert report.ends[:SEQUENCES].tolist() == [chain_of(tokens) for tokens in pool.tokens]
    pool.records.chains[pool.slot(7, 0)] += 1
    pool.keys[4].flatten(0, 1)[pool.slot(9, 0), 0, 0] += 1
    graph.replay()
    kinds = {(line["place"], line["position"]): line["kinds"] for line in found(report)}
    expected = {(7, 0): CHAIN, (7, 1): CHAIN, (9, 0): DATA}
    if real_data == "off":
        del expected[9, 0]
    assert kinds == expected
