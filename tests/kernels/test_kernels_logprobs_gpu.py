"""Logprobs by kernels at the size of a real vocabulary: the twin's bits, and never waiting."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need the triton package")

from headrace.kernels import logprobs
from headrace.kernels.logprobs_triton import LogprobScratch, token_logprobs
from headrace.kernels.support_triton import has_dependent_launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
VOCABULARY = 151936


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("scale", [0.01, 2.0, 40.0])
@pytest.mark.parametrize(("rows", "top", "named"), [(1, 5, 0), (3, 20, 2), (256, 32, 31)])
def test_bits_are_those_of_torch(rows: int, top: int, named: int, scale: float, pdl: bool) -> None:
    if pdl and not has_dependent_launch(CUDA):
        pytest.skip("programmatic dependent launch needs capability 9.0")
    scratch = LogprobScratch.allocate(rows, CUDA)
    for seed in range(3):
        torch.manual_seed(seed)
        logits = torch.randn(rows + 2, VOCABULARY, device=CUDA) * scale
        if seed == 1:
            logits = logits.round()  # many ties
        logits[0, ::3] = float("-inf")
        chosen = torch.randint(0, VOCABULARY, (rows + 2,), device=CUDA)
        index = torch.randperm(rows + 2, device=CUDA)[:rows]
        names = torch.randint(-1, VOCABULARY, (rows, named), device=CUDA) if named else None
        torch.cuda.set_sync_debug_mode("error")
        try:
            ours = token_logprobs(logits, chosen, top, names, index=index, scratch=scratch, pdl=pdl)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        theirs = logprobs.token_logprobs(logits[index], chosen[index], top, names)
        for mine, other in zip(ours, theirs, strict=True):
            assert (mine is None) == (other is None)
            if mine is not None and other is not None:
                assert torch.equal(mine, other)
    for counts in (scratch.mass, scratch.before, scratch.arrived):
        assert not counts.any()
