"""Compiles sampling, preparation and advance for a named GPU, without having one.

As `compile_for_gpu`: a process of its own, launches recorded. Prints one line per variant.
"""

import re
import sys
from typing import Any

import torch
from compile_for_gpu import Recorder, waits_first
from sampling_columns import Row, columns_of

from headrace.kernels import batch_preparation_triton, logprobs_triton, sampling_triton
from headrace.kernels.batch_preparation_triton import (
    advance_decode,
    advance_lengths,
    prepare_decode,
    prepare_extend,
)
from headrace.kernels.logprobs_triton import LogprobScratch, token_logprobs
from headrace.kernels.sampling_triton import SamplingScratch, sample_tokens

VOCABULARY = 151936


class EveryVariant(Recorder):
    """Compiles at each launch whose constants were not seen before."""

    def __init__(self, kernel: Any, capability: int) -> None:
        super().__init__(kernel)
        self.capability, self.seen = capability, set()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **named: Any) -> None:
            variant = str(sorted(named.items()))
            if variant in self.seen:
                return
            self.seen.add(variant)
            self.launch = arguments, named
            compiled = self.compile(self.capability)
            assert "cubin" in compiled.asm
            waits = waits_first(compiled)
            meets = meets_before_it_clears(compiled.asm["ptx"])
            print(self.kernel.fn.__name__, compiled.metadata.shared, waits, meets)

        return launch


def meets_before_it_clears(ptx: str) -> bool:
    """Whether threads wait for each other between what they read of others' sums (past the L1) and
    the next write: threads may clear other places than they read."""
    kinds = re.findall(r"ld\.global\.cg|bar\.sync|st\.global", ptx)
    reads = [place for place, kind in enumerate(kinds) if kind == "ld.global.cg"]
    return all(kinds[place + 1] != "st.global" for place in reads)


def main(capability: int, pdl: bool) -> None:
    for module, names in (
        (sampling_triton, ("_score_kernel", "narrow_kernel")),
        (logprobs_triton, ("_count_kernel", "_list_kernel")),
        (
            batch_preparation_triton,
            ("_prepare_kernel", "_advance_kernel", "_lengths_kernel", "_prepare_extend_kernel"),
        ),
    ):
        for name in names:
            setattr(module, name, EveryVariant(getattr(module, name), capability))
    sampling_triton.check_fused = lambda *arguments, **named: None
    logprobs_triton.check_fused = sampling_triton.check_fused
    batch_preparation_triton._check = lambda rows: None
    columns = columns_of([Row()], VOCABULARY, stop_ids=128)
    rows, lens = torch.ones(1, dtype=torch.int64), torch.ones(1, dtype=torch.int32)
    finite, scratch = torch.ones(1, dtype=torch.bool), SamplingScratch.allocate(1, rows.device)
    logits = torch.empty(1, VOCABULARY)
    for filters in (False, True):
        out = {"tokens": rows.clone(), "finite": finite, "scratch": scratch}
        sample_tokens(logits, rows, lens, columns, filters=filters, pdl=pdl, **out)
    meeting = LogprobScratch.allocate(1, rows.device)
    token_logprobs(logits, rows, 5, index=rows, scratch=meeting, pdl=pdl)
    state = {"length": lens, "last_token": rows, "active": finite}
    table = torch.zeros(1, 600, dtype=torch.int32)
    prepare_decode(
        rows,
        **state,
        tables={"full": table},
        page_size=64,
        input_ids=rows,
        positions=rows,
        seq_lens=lens,
        page_tables={"full": table},
        out_cache_locs={"full": rows},
        pdl=pdl,
    )
    counted = {"penalised": finite, "token_counts": columns.token_counts}
    advance_decode(rows, rows, finite, **state, stop_ids=columns.stop_ids, **counted, pdl=pdl)
    advance_lengths(rows, lens, length=lens, active=finite, pdl=pdl)
    prepare_extend(
        *(rows, lens, lens, rows),
        **state,
        tables={"full": table},
        page_size=64,
        max_new=1,
        input_ids=rows,
        positions=rows,
        seq_lens=lens,
        extend_lens=lens,
        prefix_lens=lens,
        out_cache_locs={"full": rows},
        pdl=pdl,
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] == "pdl")
