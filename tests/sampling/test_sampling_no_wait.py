"""Nothing between logits and rows asks a device for a value.

Tensors of the meta device have none: whatever would make the host wait for a GPU (`.item()`,
`nonzero`, boolean indexing, a branch on a value, a copy to the host) raises there.
"""

import pytest
import torch
from sampling_cases import mask_line

from headrace.batch.rows import Rows, RowStart
from headrace.kernels.batch_preparation import (
    advance_length,
    advance_token,
    gather_decode,
    gather_extend,
    write_slots,
)
from headrace.request.sampling_params import SamplingParams
from headrace.sampling.requirements import sampling_batch_info, wanted_logprobs
from headrace.sampling.sampler import Sampler

META = torch.device("meta")
VOCABULARY = 300
EVERYTHING = [
    SamplingParams(temperature=0, logprobs=3, presence_penalty=0.5),
    SamplingParams(top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.2, logprobs=0),
    SamplingParams(logit_bias={3: 1.0}, min_tokens=3, logprob_token_ids=[5, 6]),
    SamplingParams(allowed_token_ids=[1, 2], logprobs=2, logprobs_mode="processed"),
    SamplingParams(),
]


@pytest.fixture(autouse=True)
def _no_pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)


def rows_of(params: list[SamplingParams]) -> Rows:
    rows = Rows(9, VOCABULARY, lambda _, shape, dtype: torch.empty(shape, dtype=dtype, device=META))
    rows.admit(
        [
            RowStart(
                row=index + 1,
                length=0,
                tokens=[1, 2, 3],
                prompt_length=2,
                seed=index,
                params=each,
                stop_ids=[7],
            )
            for index, each in enumerate(params)
        ]
    )
    return rows


def test_this_device_notices_a_wait() -> None:
    values = torch.empty(3, device=META)
    for wait in (lambda: values.sum().item(), lambda: values[values > 0], values.cpu):
        with pytest.raises((RuntimeError, NotImplementedError)):
            wait()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("params", [EVERYTHING, EVERYTHING[:1]])
def test_sampling_asks_for_no_value(params: list[SamplingParams], masked: bool) -> None:
    count = len(params)
    rows = rows_of(params)
    places = list(range(1, count + 1))
    masks = [mask_line({1, 2}, VOCABULARY), *[None] * (count - 1)] if masked else []
    info = sampling_batch_info(params, places, places, places, META, masks)
    positions = rows.length[info.rows].long()
    output = Sampler().sample(torch.empty(count, VOCABULARY, device=META), info, rows, positions)
    assert output.next_token_ids.shape == output.finite.shape == (count,)
    assert output.logprobs is not None
    asking = sum(wanted_logprobs(each) is not None for each in params)
    assert output.logprobs.top_ids.shape == (asking, 3)


def test_preparation_and_advance_ask_for_no_value() -> None:
    rows = rows_of(EVERYTHING)
    index = torch.tensor([1, 2, 0]).to(META)
    gathered = gather_decode(index, rows.last_token, rows.length, rows.active)
    assert [tensor.shape for tensor in gathered] == [(3,)] * 3
    new_tokens = torch.tensor([4, 1, 2], dtype=torch.int32).to(META)
    prompt = torch.empty(7, dtype=torch.int64, device=META)
    *_, owner, _, _, _ = parts = gather_extend(
        index, new_tokens, prompt, rows.last_token, rows.length, rows.active
    )
    assert owner.shape == (7,)
    table = torch.empty(9, 4, dtype=torch.int32, device=META)
    assert write_slots(index[owner], parts[1], rows.active, table, 16).shape == (7,)
    advance_length(index, new_tokens, rows.length, rows.active)
    advance_token(
        index,
        torch.empty(3, dtype=torch.int64, device=META),
        torch.empty(3, dtype=torch.bool, device=META),
        last_token=rows.last_token,
        active=rows.active,
        stop_ids=rows.stop_ids,
        penalised=rows.penalised,
        token_counts=rows.token_counts,
    )
