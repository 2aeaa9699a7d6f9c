"""The sampler on a CUDA device: no wait of the host, rows alone and in a batch, CPU's answers."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from sampling_cases import CPU, random_logits

from headrace.batch.outputs import SampleOutput
from headrace.batch.rows import Rows, RowStart
from headrace.kernels.batch_preparation import advance_length, advance_token
from headrace.request.sampling_params import SamplingParams
from headrace.sampling.host_mask import mask_line
from headrace.sampling.requirements import sampling_batch_info
from headrace.sampling.sampler import Sampler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCABULARY = 49152
PARAMS = [
    SamplingParams(temperature=0, logprobs=3),
    SamplingParams(logprobs=3),
    SamplingParams(top_k=50, temperature=0.7, logprobs=3, logprobs_mode="processed"),
    SamplingParams(top_p=0.9, repetition_penalty=1.3, logprobs=3),
    SamplingParams(min_p=0.05, logit_bias={5: 3.0}, min_tokens=4, logprobs=3),
    SamplingParams(allowed_token_ids=[3, 7, 49151], logprobs=3, logprob_token_ids=[2, 7]),
    SamplingParams(temperature=0, logprobs=3),
]
MASKED = {6: mask_line(range(1, VOCABULARY - 3), VOCABULARY)}  # what the host allows: row -> mask


def sample_on(device: torch.device, chosen: list[int]) -> SampleOutput:
    rows = Rows(
        16,
        VOCABULARY,
        lambda _, shape, dtype: torch.zeros(tuple(shape), dtype=dtype, device=device),
    )
    places = [index + 1 for index in range(len(chosen))]
    logits = torch.stack([random_logits(VOCABULARY, seed=index, scale=3.0) for index in chosen])
    logits = logits.to(device)
    positions = torch.full((len(chosen),), 3, device=device)
    params = [PARAMS[index] for index in chosen]
    with never_waiting(device):
        admit(rows, places, chosen)
        masks = [MASKED.get(index) for index in chosen]
        info = sampling_batch_info(params, places, places, places, device, masks)
        output = Sampler().sample(logits, info, rows, positions)
        tokens, finite = output.next_token_ids, output.finite
        advance_length(info.rows, torch.ones_like(tokens).int(), rows.length, rows.active)
        advance_token(
            info.rows,
            tokens,
            finite,
            last_token=rows.last_token,
            active=rows.active,
            stop_ids=rows.stop_ids,
            penalised=rows.penalised,
            token_counts=rows.token_counts,
        )
    return output


@contextmanager
def never_waiting(device: torch.device) -> Iterator[None]:
    """An error where the host would wait for the device."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def admit(rows: Rows, places: list[int], chosen: list[int]) -> None:
    rows.admit(
        [
            RowStart(
                row=place,
                length=0,
                tokens=[1, 2, 3],
                prompt_length=3,
                seed=index,
                params=PARAMS[index],
                stop_ids=[7],
            )
            for place, index in zip(places, chosen, strict=True)
        ]
    )


def test_tokens_are_those_of_the_cpu_and_the_host_never_waits() -> None:
    everything = list(range(len(PARAMS)))
    there, here = sample_on(torch.device("cuda"), everything), sample_on(CPU, everything)
    assert there.next_token_ids.tolist() == here.next_token_ids.tolist()
    assert there.finite.tolist() == here.finite.tolist()
    assert there.logprobs is not None
    assert here.logprobs is not None
    torch.testing.assert_close(there.logprobs.top_values.cpu(), here.logprobs.top_values)
    assert there.logprobs.rank.tolist() == here.logprobs.rank.tolist()


def test_a_row_alone_is_the_row_in_the_batch_bit_for_bit() -> None:
    """Sums over the vocabulary are of whole numbers (`kernels.mass`), so no reduction that torch
    picks by the number of rows can show; everything else is taken element by element."""
    device = torch.device("cuda")
    batch = sample_on(device, list(range(len(PARAMS))))
    assert batch.logprobs is not None
    for index in range(len(PARAMS)):
        alone = sample_on(device, [index])
        assert alone.logprobs is not None
        assert torch.equal(alone.next_token_ids[0], batch.next_token_ids[index])
        assert torch.equal(alone.logprobs.chosen[0], batch.logprobs.chosen[index])
        assert torch.equal(alone.logprobs.top_values[0], batch.logprobs.top_values[index])
