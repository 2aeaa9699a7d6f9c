"""Order of the changes on logits, each against transformers or arithmetic; bad values; mates."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from sampling_cases import Case, processed_logprobs, random_logits, sample
from transformers.generation import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headrace.batch.outputs import SampleOutput
from headrace.kernels import filters, row_selection
from headrace.request.sampling_params import SamplingParams
from headrace.sampling.requirements import wanted_logprobs

INF = float("inf")
VOCABULARY = 500


def processed(**options: Any) -> SamplingParams:
    return SamplingParams(logprobs=VOCABULARY, logprobs_mode="processed", **options)


def token(**options: Any) -> int:
    return int(sample(Case(**options)).next_token_ids)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=3e-6, rtol=1e-6)


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = torch.zeros(VOCABULARY)
    logits[[77, 30, 400]] = 1.5
    assert token(params=SamplingParams(temperature=0), logits=logits) == 30


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    logits, prompt, output = random_logits(), [4, 9, 9, 30], [7, 9]
    got = processed_logprobs(
        Case(
            params=processed(repetition_penalty=penalty),
            logits=logits,
            prompt=prompt,
            output=output,
        )
    )
    seen = torch.tensor([prompt + output])
    expected = RepetitionPenaltyLogitsProcessor(penalty)(seen, logits[None].clone())[0]
    close(got, expected.log_softmax(-1))


def test_presence_and_frequency_count_the_output_only() -> None:
    logits = random_logits()
    got = processed_logprobs(
        Case(
            params=processed(presence_penalty=0.7, frequency_penalty=-0.4),
            logits=logits,
            prompt=[4, 9, 9, 30],
            output=[7, 9, 7, 7],
        )
    )
    expected = logits.clone()
    expected[7] -= 0.7 - 0.4 * 3
    expected[9] -= 0.7 - 0.4
    close(got, expected.log_softmax(-1))


def test_repetition_reaches_the_prompt_at_the_first_step_and_the_others_do_not() -> None:
    logits, prompt = random_logits(), [8, 8, 8, 8]
    plain = processed_logprobs(Case(params=processed(), logits=logits, prompt=prompt))
    repetition = processed_logprobs(
        Case(params=processed(repetition_penalty=2.0), logits=logits, prompt=prompt)
    )
    others = processed_logprobs(
        Case(
            params=processed(presence_penalty=2.0, frequency_penalty=2.0),
            logits=logits,
            prompt=prompt,
        )
    )
    assert abs(float(plain[8] - repetition[8])) > 0.1
    assert torch.equal(plain, others)


def test_bias_is_added_after_penalties_and_allowed_ids_are_the_only_ones() -> None:
    logits = random_logits()
    got = processed_logprobs(
        Case(
            params=processed(
                repetition_penalty=2.0, logit_bias={1: 3.0, 5: -4.0}, allowed_token_ids=[1, 5, 6]
            ),
            logits=logits,
            prompt=[1, 2],
        )
    )
    expected = RepetitionPenaltyLogitsProcessor(2.0)(torch.tensor([[1, 2]]), logits[None].clone())
    bias = SequenceBiasLogitsProcessor({(1,): 3.0, (5,): -4.0})
    expected = bias(torch.tensor([[1, 2]]), expected)[0]
    forbidden = torch.ones(VOCABULARY, dtype=torch.bool)
    forbidden[[1, 5, 6]] = False
    close(got, expected.masked_fill(forbidden, -INF).log_softmax(-1))


def test_a_host_mask_forbids_only_in_its_row() -> None:
    logits = random_logits()
    best = int(logits.argmax())
    greedy = SamplingParams(temperature=0)
    output = sample(
        Case(params=greedy, logits=logits),
        Case(params=greedy, logits=logits, forbidden={best, 3}),
        Case(params=greedy, logits=logits, forbidden=set()),
    )
    second = int(logits.topk(2).indices[1])
    assert output.next_token_ids.tolist() == [best, second, best]


@pytest.mark.parametrize(("made", "masked"), [(0, True), (2, True), (3, False), (4, False)])
def test_stop_ids_wait_for_min_tokens(made: int, masked: bool) -> None:
    logits = random_logits()
    order = logits.argsort(descending=True).tolist()
    got = token(
        params=SamplingParams(temperature=0, min_tokens=3),
        logits=logits,
        output=[11] * made,
        stop_ids=[order[1], order[0], 0],
    )
    assert got == (order[2] if masked else order[0])


def test_min_tokens_touches_no_token_but_the_stop_ids() -> None:
    """The unused places of the stop ids name no token: id 0 stays what it was."""
    logits = torch.zeros(VOCABULARY)
    logits[0] = 1.0
    wait = SamplingParams(temperature=0, min_tokens=5)
    assert token(params=wait, logits=logits, stop_ids=[7]) == 0
    assert token(params=wait, logits=logits, stop_ids=[]) == 0
    assert token(params=wait, logits=logits, stop_ids=[0]) == 1
    output = sample(
        Case(params=SamplingParams(temperature=0), logits=logits, stop_ids=[0]),
        Case(params=wait, logits=logits, stop_ids=[0]),
    )
    assert output.next_token_ids.tolist() == [0, 1]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.6},
        {"temperature": 1.7, "top_k": 40},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.2, "min_p": 0.05},
        {"temperature": 0.7, "top_k": 30, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.2},
    ],
)
def test_the_whole_order_is_that_of_transformers(options: dict[str, float]) -> None:
    logits, prompt = random_logits(), [4, 9, 30]
    got = processed_logprobs(Case(params=processed(**options), logits=logits, prompt=prompt))
    chain = LogitsProcessorList()
    if "repetition_penalty" in options:
        chain.append(RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]))
    chain.append(TemperatureLogitsWarper(options["temperature"]))
    if "top_k" in options:
        chain.append(TopKLogitsWarper(int(options["top_k"])))
    if "top_p" in options:
        chain.append(TopPLogitsWarper(options["top_p"]))
    if "min_p" in options:
        chain.append(MinPLogitsWarper(options["min_p"]))
    expected = chain(torch.tensor([prompt]), logits[None].clone())[0]
    close(got, expected.log_softmax(-1))


def test_min_p_one_is_greedy_and_zero_is_off() -> None:
    logits = random_logits()
    for seed in range(30):
        case = Case(params=SamplingParams(min_p=1.0), logits=logits, seed=seed)
        assert int(sample(case).next_token_ids) == int(logits.argmax())
        plain = Case(params=SamplingParams(), logits=logits, seed=seed)
        off = Case(params=SamplingParams(min_p=0.0, top_k=0, top_p=1.0), logits=logits, seed=seed)
        assert torch.equal(sample(plain).next_token_ids, sample(off).next_token_ids)


@pytest.mark.parametrize("top_k", [2**30, 0, -1, VOCABULARY + 1])
def test_a_one_hot_row_gives_its_token(top_k: int) -> None:
    logits = torch.full((VOCABULARY,), -INF)
    logits[1] = 0.0
    for seed in range(20):
        assert token(params=SamplingParams(top_k=top_k), logits=logits, seed=seed) == 1


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-6])
def test_a_temperature_near_zero_is_greedy_and_finite(temperature: float) -> None:
    logits = random_logits(scale=30.0)
    output = sample(
        Case(params=processed(temperature=temperature), logits=logits),
        Case(params=SamplingParams(), logits=logits),
    )
    assert int(output.next_token_ids[0]) == int(logits.argmax())
    assert output.finite.tolist() == [True, True]
    assert output.logprobs is not None
    assert float(output.logprobs.chosen[0]) == pytest.approx(0.0, abs=1e-6)


def test_a_temperature_that_rounds_to_zero_is_greedy() -> None:
    logits = random_logits()
    assert token(params=SamplingParams(temperature=1e-60), logits=logits) == int(logits.argmax())


MIXED = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(top_k=7, temperature=0.5),
    SamplingParams(top_p=0.8, logprobs=3),
    SamplingParams(min_p=0.1, temperature=1.6, logprobs=5, logprobs_mode="processed"),
    SamplingParams(presence_penalty=1.0, frequency_penalty=0.3),
    SamplingParams(repetition_penalty=1.4, temperature=0, logprobs=2),
    SamplingParams(logit_bias={3: 5.0, 9: -5.0}),
    SamplingParams(allowed_token_ids=[5, 6, 7], logprobs=4, logprobs_mode="processed"),
    SamplingParams(min_tokens=4, temperature=0.9),
    SamplingParams(logprob_token_ids=[3, 1], top_p=0.99),
    SamplingParams(temperature=0, top_p=0.5, logprobs=1, logprobs_mode="processed"),
]


def mixed_cases() -> list[Case]:
    return [
        Case(
            params=params,
            logits=random_logits(5000, seed=index, scale=1.0 + index % 4),
            prompt=[1, 2, 3 + index],
            output=[5] * (index % 3),
            seed=100 + index,
            stop_ids=[0, 2],
            forbidden={1, 2} if index % 5 == 0 else None,
            row=index + 1,
        )
        for index, params in enumerate(MIXED)
    ]


def test_a_row_is_the_same_bit_for_bit_alone_and_in_any_batch() -> None:
    """Neither token nor logprobs see the mates, a mate full of NaN included."""
    cases = mixed_cases()
    broken = Case(params=SamplingParams(), logits=torch.full((5000,), float("nan")), row=30)
    batch = sample(*cases, broken)
    reversed_batch = sample(*reversed(cases))
    asked = [index for index, case in enumerate(cases) if wanted_logprobs(case.params) is not None]
    for index, case in enumerate(cases):
        alone = sample(case)
        for other, place in ((batch, index), (reversed_batch, len(cases) - 1 - index)):
            assert int(alone.next_token_ids) == int(other.next_token_ids[place])
            assert bool(other.finite[place])
            assert (alone.logprobs is not None) == (index in asked)
            if alone.logprobs is None:
                continue
            assert other.logprobs is not None
            assert len(other.logprobs.chosen) == len(asked), "only rows that ask have a line"
            line = asked.index(index)
            place = line if other is batch else len(asked) - 1 - line
            width = alone.logprobs.top_ids.shape[1]
            for name in ("chosen", "rank"):
                mine, theirs = getattr(alone.logprobs, name), getattr(other.logprobs, name)
                assert torch.equal(mine[0], theirs[place])
            for name in ("top_values", "top_ids"):
                mine, theirs = getattr(alone.logprobs, name), getattr(other.logprobs, name)
                assert torch.equal(mine[0], theirs[place, :width])
            if alone.logprobs.extra is not None:
                assert other.logprobs.extra is not None
                assert torch.equal(alone.logprobs.extra[0], other.logprobs.extra[place, :2])
    assert batch.finite.tolist() == [True] * len(cases) + [False]


def same_bits(here: SampleOutput, there: SampleOutput) -> None:
    assert torch.equal(here.next_token_ids, there.next_token_ids)
    assert torch.equal(here.finite, there.finite)
    assert here.logprobs is not None
    assert there.logprobs is not None
    for name in ("chosen", "rank", "top_values", "top_ids", "extra", "extra_rank"):
        mine, theirs = getattr(here.logprobs, name), getattr(there.logprobs, name)
        torch.testing.assert_close(mine, theirs, atol=0, rtol=0, equal_nan=True, msg=name)


def test_the_way_of_a_device_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host must not ask which rows need work, all are worked on and most dropped."""
    cases = mixed_cases()
    cases.append(Case(params=SamplingParams(), logits=torch.full((5000,), float("nan")), row=30))
    here = sample(*cases)
    for module in (row_selection, filters):
        monkeypatch.setattr(module, "host_may_look", lambda _: False)
    same_bits(here, sample(*cases))


@pytest.mark.parametrize("rows_at_once", [1, 2, 5])
def test_rows_a_few_at_a_time_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, rows_at_once: int
) -> None:
    cases = mixed_cases()
    here = sample(*cases)
    monkeypatch.setattr(row_selection, "_CPU_ELEMENTS", rows_at_once * 5000)
    there = sample(*cases)
    same_bits(here, there)
    greedy = [replace(case, params=SamplingParams(temperature=0)) for case in cases]
    assert sample(*greedy).logprobs is None


def test_a_seeded_row_draws_the_same_beside_filtered_and_greedy_mates() -> None:
    """24 tokens of A alone, then beside top-p, greedy and min-p."""
    mates = [SamplingParams(top_p=0.9), SamplingParams(temperature=0), SamplingParams(min_p=0.2)]
    for step in range(24):
        case = Case(
            params=SamplingParams(seed=7),
            logits=random_logits(seed=step),
            output=[1] * step,
            seed=7,
        )
        beside = [replace(case, params=params, seed=index) for index, params in enumerate(mates)]
        assert int(sample(case).next_token_ids) == int(sample(case, *beside).next_token_ids[0])


@pytest.mark.parametrize("bad", [float("nan"), INF])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(top_p=0.9)])
def test_a_bad_logit_fails_its_row_alone(bad: float, params: SamplingParams) -> None:
    good = random_logits()
    poisoned = good.clone()
    poisoned[17] = bad
    case = Case(params=params, logits=good, seed=3)
    output = sample(case, replace(case, logits=poisoned), case)
    expected = int(sample(case).next_token_ids)
    assert output.finite.tolist() == [True, False, True]
    assert output.next_token_ids.tolist() == [expected, 0, expected]


def test_a_bad_logit_under_a_mask_still_fails_the_row() -> None:
    logits = random_logits()
    logits[17] = float("nan")
    case = Case(params=SamplingParams(temperature=0), logits=logits, forbidden={17})
    assert sample(case).finite.tolist() == [False]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nothing_left_fails(temperature: float) -> None:
    logits = random_logits()
    params = SamplingParams(temperature=temperature, allowed_token_ids=[4, 5])
    output = sample(
        Case(params=params, logits=logits, forbidden={4, 5}),
        Case(params=params, logits=logits, forbidden={4}),
        Case(params=params, logits=torch.full((VOCABULARY,), -INF)),
    )
    assert output.finite.tolist() == [False, True, False]
    assert output.next_token_ids.tolist() == [0, 5, 0]


def test_a_dead_row_cannot_fail() -> None:
    poisoned = torch.full((VOCABULARY,), float("nan"))
    params = SamplingParams()
    output = sample(
        Case(params=params, logits=poisoned, live=False), Case(params=params, logits=poisoned)
    )
    assert output.finite.tolist() == [True, False]
    assert output.next_token_ids.tolist() == [0, 0]


def test_types() -> None:
    output = sample(Case(params=SamplingParams(), logits=random_logits()))
    assert output.next_token_ids.dtype == torch.int64
    assert output.finite.dtype == torch.bool
    assert output.logprobs is None
