"""Raw and processed logprobs of sampled tokens, and the dicts made of them."""

import pytest
import torch
from sampling_cases import Case, random_logits, sample

from headrace.batch.outputs import TokenLogprobs
from headrace.request.outcome import Logprob
from headrace.request.sampling_params import SamplingParams
from headrace.sampling.host_logprobs import logprob_dicts
from headrace.sampling.requirements import wanted_logprobs

INF = float("inf")


def logprobs_of(case: Case) -> TokenLogprobs:
    output = sample(case)
    assert output.logprobs is not None
    return output.logprobs


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=1e-6)


def test_raw_logprobs_do_not_see_the_parameters() -> None:
    """Temperature, filters, penalties and bias change nothing."""
    logits = random_logits()
    plain = logprobs_of(Case(params=SamplingParams(temperature=0, logprobs=5), logits=logits))
    expected = logits.double().log_softmax(-1).topk(5)
    assert plain.top_ids[0].tolist() == expected.indices.tolist()
    close(plain.top_values[0].double(), expected.values)
    for options in (
        {"temperature": 0.5},
        {"top_p": 0.3},
        {"top_k": 2, "repetition_penalty": 2.0},
        {"presence_penalty": 1.0, "logit_bias": {3: 10.0}},
        {"allowed_token_ids": [3, 4]},
        {"min_tokens": 3},
    ):
        case = Case(params=SamplingParams(logprobs=5, **options), logits=logits, stop_ids=[1])
        got = logprobs_of(case)
        assert torch.equal(got.top_values, plain.top_values)
        assert torch.equal(got.top_ids, plain.top_ids)
        chosen = int(sample(case).next_token_ids)
        close(got.chosen[0].double(), logits.double().log_softmax(-1)[chosen])


@pytest.mark.parametrize("temperature", [0.5, 0.6, 2.0])
def test_processed_logprobs_are_after_the_temperature(temperature: float) -> None:
    logits = random_logits()
    params = SamplingParams(temperature=temperature, logprobs=8, logprobs_mode="processed")
    got = logprobs_of(Case(params=params, logits=logits))
    expected = (logits.double() / temperature).log_softmax(-1).topk(8)
    assert got.top_ids[0].tolist() == expected.indices.tolist()
    close(got.top_values[0].double(), expected.values)


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_greedy_logprobs_are_not_all_zero(mode: str) -> None:
    """Temperature 0 with top_k 3 reported 0.0 everywhere. Greedy rows have no filters."""
    logits = random_logits()
    params = SamplingParams(temperature=0, top_k=3, logprobs=5, logprobs_mode=mode)
    got = logprobs_of(Case(params=params, logits=logits))
    expected = logits.double().log_softmax(-1).topk(5).values
    close(got.top_values[0].double(), expected)
    assert float(got.chosen) == float(got.top_values[0, 0]) < -0.1
    assert int(got.rank) == 1


def test_processed_greedy_logprobs_are_after_penalties_and_mask() -> None:
    logits = random_logits()
    best = int(logits.argmax())
    params = SamplingParams(
        temperature=0, logit_bias={5: 1.0}, logprobs=2, logprobs_mode="processed"
    )
    got = logprobs_of(Case(params=params, logits=logits, forbidden={best}))
    changed = logits.double()
    changed[best] = -INF
    changed[5] += 1.0
    close(got.top_values[0].double(), changed.log_softmax(-1).topk(2).values)


def test_filtered_tokens_are_minus_infinity_in_processed() -> None:
    logits = random_logits()
    params = SamplingParams(
        top_k=2, logprobs=3, logprobs_mode="processed", logprob_token_ids=[int(logits.argmin())]
    )
    got = logprobs_of(Case(params=params, logits=logits))
    two = logits.double().topk(2).values.log_softmax(-1)
    close(got.top_values[0, :2].double(), two)
    assert float(got.top_values[0, 2]) == -INF
    assert got.extra is not None
    assert float(got.extra) == -INF


def test_modes_mix_in_a_batch() -> None:
    logits = random_logits()
    raw = Case(params=SamplingParams(temperature=0.5, logprobs=2), logits=logits)
    scaled = Case(
        params=SamplingParams(temperature=0.5, logprobs=2, logprobs_mode="processed"), logits=logits
    )
    output = sample(raw, scaled)
    assert output.logprobs is not None
    close(output.logprobs.top_values[0], logits.log_softmax(-1).topk(2).values)
    close(output.logprobs.top_values[1], (logits / 0.5).log_softmax(-1).topk(2).values)


def host_logprobs() -> TokenLogprobs:
    return TokenLogprobs(
        chosen=torch.tensor([-0.5, -4.0, -1.0]),
        rank=torch.tensor([1, 9, 2]),
        top_values=torch.tensor([[-0.5, -1.0, -2.0], [-0.25, -1.5, -2.0], [-0.5, -1.0, -2.0]]),
        top_ids=torch.tensor([[10, 11, 12], [20, 21, 22], [30, 31, 32]]),
        extra=torch.tensor([[-1.0, -7.0], [0.0, 0.0], [-INF, -4.0]]),
        extra_rank=torch.tensor([[2, 50], [1, 1], [77, 9]]),
    )


def test_dicts_hold_the_top_then_the_chosen_then_the_named() -> None:
    dicts = logprob_dicts(
        host_logprobs(),
        [10, 29, 31],
        [2, 1, 0],
        [[11, 15], [], [40, 41]],
        lambda token: f"<{token}>",
    )
    assert [list(each or ()) for each in dicts] == [[10, 11, 15], [20, 29], [31, 40, 41]]
    first, second, third = (each or {} for each in dicts)
    assert first[10] == Logprob(logprob=-0.5, rank=1, decoded_token="<10>")
    assert first[11] == Logprob(logprob=-1.0, rank=2, decoded_token="<11>")
    assert first[15] == Logprob(logprob=-7.0, rank=50, decoded_token="<15>")
    assert second[29] == Logprob(logprob=-4.0, rank=9, decoded_token="<29>")
    assert third[31] == Logprob(logprob=-1.0, rank=2, decoded_token="<31>")
    assert third[40] == Logprob(logprob=-INF, rank=77, decoded_token="<40>")


def test_rows_that_did_not_ask_get_none() -> None:
    tops = [None, 2, None, 1, 0, None]
    ids: list[list[int]] = [[], [], [], [], [40], []]
    dicts = logprob_dicts(host_logprobs(), [7, 10, 8, 29, 31, 9], tops, ids, str)
    assert [None if each is None else list(each) for each in dicts] == [
        *(None, [10, 11], None),
        *([20, 29], [31, 40], None),
    ]
    with pytest.raises(AssertionError, match="a line for each row"):
        logprob_dicts(host_logprobs(), [10, 29, 31], [None, 1, 2], [[], [], []], str)


def test_no_names_in_the_batch() -> None:
    tensors = host_logprobs()
    plain = TokenLogprobs(
        chosen=tensors.chosen,
        rank=tensors.rank,
        top_values=tensors.top_values,
        top_ids=tensors.top_ids,
    )
    dicts = logprob_dicts(plain, [10, 20, 30], [3, 3, 3], [[], [], []], str)
    assert [len(each or ()) for each in dicts] == [3, 3, 3]
    with pytest.raises(AssertionError, match="travel with the batch"):
        logprob_dicts(plain, [10, 20, 30], [3, 3, 3], [[4], [], []], str)


def test_what_a_row_wants() -> None:
    assert wanted_logprobs(SamplingParams()) is None
    assert wanted_logprobs(SamplingParams(logprobs=0)) == 0
    assert wanted_logprobs(SamplingParams(logprobs=7)) == 7
    assert wanted_logprobs(SamplingParams(logprob_token_ids=[3])) == 0
