"""Steps that between them launch every kernel that a runner's steps can need.

They run on row 0, which is never live, and on page 0. A kernel has a variant for a number of rows,
for whole or split keys, for filters; which step takes which is the business of the kernels' own
tables. So the sizes here are simply those that the graphs have, and a step of each kind between.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import nn

from headrace.batch.facts import BatchFacts, Bucket
from headrace.batch.forward_batch import ForwardBatch, HostBounds
from headrace.batch.forward_mode import ForwardMode
from headrace.batch.outputs import LogitsProcessorOutput
from headrace.batch.sampling_batch_info import LogprobRequest, SamplingBatchInfo
from headrace.config.plan import Plan
from headrace.execution.decode_graph import FILTERS
from headrace.execution.prefill_graph import BREAKABLE_SIZES, prefill_sizes
from headrace.execution.replacing import replaced
from headrace.kernels.compile_ahead_triton import CompiledKernels, compile_ahead
from headrace.models.decoder import CausalDecoder
from headrace.runner.forward_paths import ForwardPaths
from headrace.sampling.kernel_sampler import KernelSampler

LAYERS_OF_A_KIND = 2  # what the first leaves in parts, the second adds


def compile_kernels(
    paths: ForwardPaths,
    sampler: KernelSampler | None,
    plan: Plan,
    model: CausalDecoder,
    device: torch.device,
    *,
    progress: bool = False,
) -> CompiledKernels:
    """Compile and load every kernel that steps of `plan` can need, all at the same time.

    Args:
        paths: over a pool that has page 0 at least; row 0 and page 0 are written.
        progress: show a bar.
    """
    return compile_ahead(
        lambda: dry_steps(paths, sampler, plan, model, device), device, progress=progress
    )


def dry_steps(
    paths: ForwardPaths,
    sampler: KernelSampler | None,
    plan: Plan,
    model: CausalDecoder,
    device: torch.device,
) -> None:
    """Run one step of each kind and size, eagerly, over few layers of the model."""
    with torch.inference_mode(), shortened(model):
        if paths.decode_graph is not None:
            for bucket in _decode_buckets(paths.decode_graph.sizes):
                paths.decode_graph.rehearse(bucket)
        sampled: set[ForwardMode] = set()
        for mode, new, lengths in _eager_steps(plan):
            batch = _batch(mode, new, lengths, device)
            output = paths.eager.run(batch, Bucket(tokens=sum(new), sequences=len(new)))
            if sampler is not None and mode not in sampled:  # its kernels depend on no numbers
                sampled.add(mode)
                _sample(sampler, output, batch)


def _sample(sampler: KernelSampler, output: LogitsProcessorOutput, batch: ForwardBatch) -> None:
    """Sampling without and with filters, with logprobs."""
    assert batch.sampling is not None
    logprobs = LogprobRequest(places=(0,), index=torch.zeros_like(batch.sampling.rows), top=1)
    for filters in (False, True):
        batch.sampling = replace(batch.sampling, any_filters=filters, logprobs=logprobs)
        sampler.sample(output.next_token_logits, batch)


def shortened(model: CausalDecoder) -> AbstractContextManager[None]:
    """The model without most of its layers: what one layer launches, all of its kind launch."""
    decoder, seen = model.model, Counter[object]()
    places = []
    for place, kind in enumerate(model.traits.layers):
        seen[kind] += 1
        if seen[kind] <= LAYERS_OF_A_KIND:
            places.append(place)
    ropes = tuple(decoder.rope_of_layer[place] for place in places)
    layers = nn.ModuleList(decoder.layers[place] for place in places)
    return replaced([(decoder, "layers", layers), (decoder, "rope_of_layer", ropes)])


def _decode_buckets(sizes: tuple[int, ...]) -> Iterator[Bucket]:
    """The largest first: scratch that it allocates serves the others. Of filters one will do:
    sampling has no variants for its rows."""
    for size in reversed(sizes):
        yield Bucket(tokens=size, sequences=size)
    yield Bucket(tokens=sizes[0], sequences=sizes[0], variant=FILTERS)


def _eager_steps(plan: Plan) -> Iterator[tuple[ForwardMode, list[int], list[int]]]:
    """Mode, new tokens and length after the step of each sequence."""
    longest, rows = plan.max_model_len.value, plan.max_running_requests.value
    largest = plan.most_step_tokens
    for tokens in (1, 2, *prefill_sizes(BREAKABLE_SIZES, largest), largest):
        new = [longest] * (tokens // longest)
        if tokens % longest:
            new.append(tokens % longest)
        yield ForwardMode.EXTEND, new, new
    # A row alone, whose keys are shared out over the device; then many rows with few keys each.
    yield ForwardMode.DECODE, [1], [longest]
    for count in {2, rows}:
        yield ForwardMode.DECODE, [1] * count, [1] * count
    if longest > 2:  # a row that decodes, and a chunk behind another
        yield ForwardMode.MIXED, [1, 2], [2, 3]


def _batch(
    mode: ForwardMode, new: list[int], lengths: list[int], device: torch.device
) -> ForwardBatch:
    """A batch of row 0, as often as there are sequences, of which the first samples."""

    def zeros(count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64, device=device)

    tokens, sequences = sum(new), len(new)
    return ForwardBatch(
        mode=mode,
        rows=zeros(sequences),
        bounds=HostBounds(seq_lens=lengths, extend_lens=new, rows=[0] * sequences),
        facts=BatchFacts(
            mode=mode,
            tokens=tokens,
            live_tokens=0,
            sequences=sequences,
            max_length=max(lengths),
            has_prefix=lengths != new,
        ),
        prompt_tokens=None if mode.is_decode else zeros(tokens),
        sampling=SamplingBatchInfo(
            rows=zeros(1), sequence_index=zeros(1), token_index=zeros(1), all_greedy=True
        ),
    )
