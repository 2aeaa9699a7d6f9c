"""What a step's info says, and what the host forbids."""

from typing import Any

import pytest
import torch
from sampling_cases import mask_line

from headrace.batch.sampling_batch_info import SamplingBatchInfo
from headrace.request.sampling_params import SamplingParams
from headrace.sampling.bad_words import BadWords
from headrace.sampling.requirements import sampling_batch_info

FLAGS = ("all_greedy", "any_penalties", "any_bias", "any_filters", "any_min_tokens")


def info_of(*params: SamplingParams, masks: Any = ()) -> SamplingBatchInfo:
    count = len(params)
    return sampling_batch_info(
        params,
        [9 + index for index in range(count)],
        [2 * index for index in range(count)],
        [5 * index + 1 for index in range(count)],
        torch.device("cpu"),
        [mask_line(mask, 40) for mask in masks],
    )


def flags_of(*params: SamplingParams) -> set[str]:
    info = info_of(*params)
    return {flag for flag in FLAGS if getattr(info, flag)}


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({}, set()),
        ({"temperature": 0}, {"all_greedy"}),
        ({"temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1}, {"all_greedy"}),
        ({"top_k": 3}, {"any_filters"}),
        ({"top_p": 0.9}, {"any_filters"}),
        ({"min_p": 0.1}, {"any_filters"}),
        ({"presence_penalty": -0.1}, {"any_penalties"}),
        ({"frequency_penalty": 0.1}, {"any_penalties"}),
        ({"repetition_penalty": 1.1}, {"any_penalties"}),
        ({"logit_bias": {1: 1.0}}, {"any_bias"}),
        ({"allowed_token_ids": [1]}, {"any_bias"}),
        ({"min_tokens": 1}, {"any_min_tokens"}),
    ],
)
def test_flags(options: dict[str, Any], flags: set[str]) -> None:
    assert flags_of(SamplingParams(**options)) == flags
    beside = flags_of(SamplingParams(temperature=0), SamplingParams(**options))
    assert beside == flags


def test_places() -> None:
    info = info_of(SamplingParams(), SamplingParams(), SamplingParams())
    assert info.rows.tolist() == [9, 10, 11]
    assert info.sequence_index.tolist() == [0, 2, 4]
    assert info.token_index.tolist() == [1, 6, 11]
    assert info.rows.dtype == info.sequence_index.dtype == info.token_index.dtype == torch.int64
    assert info.mask is None
    assert info.logprobs is None


def test_logprob_request_holds_the_widest() -> None:
    request = info_of(
        SamplingParams(logprobs=2),
        SamplingParams(),
        SamplingParams(logprobs=5, logprobs_mode="processed", logprob_token_ids=[7, 8]),
        SamplingParams(logprob_token_ids=[3]),
    ).logprobs
    assert request is not None
    assert request.top == 5
    assert request.token_ids is not None
    assert request.token_ids.tolist() == [[-1, -1], [7, 8], [3, -1]]
    assert request.processed is not None
    assert request.processed.tolist() == [False, True, False]
    assert request.places == (0, 2, 3), "the others ask for nothing"
    assert request.index.tolist() == [0, 2, 3]


def test_a_mode_without_logprobs_asks_for_nothing() -> None:
    assert info_of(SamplingParams(logprobs_mode="processed")).logprobs is None
    request = info_of(
        SamplingParams(logprobs_mode="processed"), SamplingParams(logprobs=0)
    ).logprobs
    assert request is not None
    assert (request.top, request.token_ids, request.processed) == (0, None, None)


def test_masks() -> None:
    params = [SamplingParams()] * 3
    mask = info_of(*params, masks=[{0, 33}, None, set()]).mask
    assert mask is not None
    assert (mask.bits.dtype, mask.index.dtype) == (torch.int32, torch.int64)
    assert mask.places == (0, 2)
    assert mask.index.tolist() == [0, 2]
    assert mask.bits.tolist() == [[-2, -3], [-1, -1]]
    assert info_of(*params, masks=[None, None, None]).mask is None


def test_bad_words_forbid_what_would_complete_them() -> None:
    words = BadWords([[5], [1, 2], [1, 3, 4], [3, 4, 6]])
    assert words.needs_last_token
    assert words.forbidden([]) == {5}
    assert words.forbidden([1]) == {5, 2}
    assert words.forbidden([9, 1, 3]) == {5, 4}
    assert words.forbidden([1, 3, 4]) == {5, 6}
    assert words.forbidden([2, 1, 9]) == {5}
    assert words.forbidden([3]) == {5}


def test_single_tokens_need_no_last_token() -> None:
    assert not BadWords([[5], [6]]).needs_last_token
    assert BadWords([[5], [6]]).forbidden([1, 2]) == {5, 6}
    assert not BadWords([]).needs_last_token


def test_an_empty_word_is_our_own_bug() -> None:
    with pytest.raises(AssertionError, match="empty word"):
        BadWords([[1], []])
