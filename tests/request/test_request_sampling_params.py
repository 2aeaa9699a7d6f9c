"""Every bad value of every field is refused by name, value and range; good ones are normalised."""

import dataclasses
from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from headrace.base.errors import RequestError, UnknownFieldError
from headrace.base.unknown_names import OtherWords
from headrace.request.other_words import FORMS, POOLING_WORDS, SAMPLING_WORDS, STRUCTURED_WORDS
from headrace.request.pooling_params import PoolingParams
from headrace.request.sampling_params import (
    MAX_BIASES,
    MAX_LOGPROBS,
    MAX_NEW_TOKENS,
    MAX_SEQUENCES,
    MAX_STATE_LAYERS,
    MAX_STOP_IDS,
    MAX_STRING_CHARACTERS,
    MAX_STRINGS,
    SamplingParams,
)
from headrace.request.structured_output import KINDS, StructuredOutput

INF, NAN = float("inf"), float("nan")
HUGE = 10**400
INT64 = 2**63

ARRAYS: list[Any] = [np.array([1, 2]), np.array(3), np.array("a"), np.array(["a", 1])]
TENSORS: list[Any] = [torch.tensor([1, 2]), torch.tensor(3), torch.zeros(2, 2), torch.tensor(0.5)]
SCALARLESS = [np.array(3), np.array("a"), torch.tensor(3), np.array([[1, 2]]), torch.zeros(2, 2)]

NOT_NUMBERS: list[Any] = [True, False, "1", [1], {}, 1j, object(), b"1", np.bool_(True)]
NOT_NUMBERS += [*ARRAYS, *TENSORS]
NOT_INTEGERS: list[Any] = [*NOT_NUMBERS, 1.0, 1.5, NAN, INF, np.float32(1)]
NOT_ID_LISTS: list[Any] = [7, 1.5, True, "12", b"12", {1: 2}, [1.0], ["1"], [None], [True], [-1]]
NOT_ID_LISTS += SCALARLESS
NOT_STRING_LISTS: list[Any] = [7, True, b"ab", [b"ab"], [1], [None], "", [""], ["a", ""]]
NOT_STRING_LISTS += [*SCALARLESS, np.array([1, 2]), torch.tensor([1, 2])]
NOT_STRING_LISTS += [["a"] * (MAX_STRINGS + 1), "a" * (MAX_STRING_CHARACTERS + 1)]

BAD: dict[str, list[Any]] = {
    "max_tokens": [*NOT_INTEGERS, 0, -1, MAX_NEW_TOKENS + 1, HUGE, -HUGE],
    "min_tokens": [*NOT_INTEGERS, None, -1, MAX_NEW_TOKENS + 1, HUGE],
    "temperature": [*NOT_NUMBERS, None, -0.1, -1, 100.1, NAN, INF, -INF, HUGE, np.float32("nan")],
    "top_p": [*NOT_NUMBERS, None, 0, 0.0, -0.1, 1.0001, 2, NAN, INF, -INF, HUGE],
    "top_k": [*NOT_INTEGERS, None, -2, 2**31, INT64, HUGE, -HUGE],
    "min_p": [*NOT_NUMBERS, None, -0.1, 1.1, NAN, INF, -INF, HUGE],
    "seed": [*NOT_INTEGERS, INT64, -INT64 - 1, HUGE],
    "n": [*NOT_INTEGERS, None, 0, -1, MAX_SEQUENCES + 1, HUGE],
    "stop": NOT_STRING_LISTS,
    "stop_token_ids": [*NOT_ID_LISTS, [2**31], [HUGE], list(range(MAX_STOP_IDS + 1))],
    "ignore_eos": [None, 0, 1, "yes", [], *ARRAYS, *TENSORS],
    "presence_penalty": [*NOT_NUMBERS, None, -2.1, 2.1, NAN, INF, -INF, HUGE],
    "frequency_penalty": [*NOT_NUMBERS, None, -2.1, 2.1, NAN, INF, -INF, HUGE],
    "repetition_penalty": [*NOT_NUMBERS, None, 0, 0.0, 1e-60, -1.0, 100.1, NAN, INF, -INF, HUGE],
    "logit_bias": [
        *[*ARRAYS, *TENSORS, {1: np.array(1.0)}, {1: np.array([1, 2])}, {1: torch.tensor(1.0)}],
        *[7, True, "1", [1], [(1, 1.0)], {"1": 1.0}, {1.0: 1.0}, {True: 1.0}, {-1: 1.0}],
        *[{2**31: 1.0}, {HUGE: 1.0}, {1: NAN}, {1: INF}, {1: -INF}, {1: "1"}, {1: None}],
        *[{1: True}, {1: 1.1e6}, {1: -1.1e6}, {1: HUGE}, dict.fromkeys(range(MAX_BIASES + 1), 1)],
    ],
    "bad_words": NOT_STRING_LISTS,
    "allowed_token_ids": [*NOT_ID_LISTS, [], (), [2**31], [HUGE], [1] * (MAX_BIASES + 1)],
    "structured": [True, "json", {"regex": "a"}, {}, [], 1, b"a", *ARRAYS, *TENSORS],
    "logprobs": [*NOT_INTEGERS, -1, MAX_LOGPROBS + 1, HUGE],
    "prompt_logprobs": [*NOT_INTEGERS, -1, MAX_LOGPROBS + 1, HUGE],
    "logprobs_mode": [None, "", "RAW", "both", 1, True, [], b"raw", *ARRAYS, *TENSORS],
    "logprob_token_ids": [*NOT_ID_LISTS, [2**31], [HUGE], list(range(MAX_LOGPROBS + 1))],
    "return_hidden_states": [None, 0, 1, "yes", "", b"last", ["last"], *ARRAYS, *TENSORS],
    "hidden_state_layers": [
        range(10**9),
        *[None, 1, "1", b"1", {1: 2}, [], [1.0], [True], ["1"], [None], [HUGE], *TENSORS[:1]],
        *[[MAX_STATE_LAYERS + 1], [-MAX_STATE_LAYERS - 1], [0] * (MAX_STATE_LAYERS + 1)],
        *[[3], (-1, 0)],  # without return_hidden_states
    ],
    "return_routed_experts": [None, 0, 1, "yes", *ARRAYS, *TENSORS],
    "include_stop_str_in_output": [None, 0, 1, "yes", *ARRAYS, *TENSORS],
    "skip_special_tokens": [None, 0, 1, "yes", *ARRAYS, *TENSORS],
}

CASES = [(name, value) for name, values in BAD.items() for value in values]


def test_every_field_has_bad_values() -> None:
    assert set(BAD) == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(
    ("name", "value"), CASES, ids=[f"{name}-{place}" for place, (name, _) in enumerate(CASES)]
)
def test_a_bad_value_is_refused_by_name_value_and_range(name: str, value: Any) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is checked below
        SamplingParams(**{name: value})
    error = caught.value
    assert isinstance(error, RequestError)
    assert error.what.startswith(f"{name} is ")
    assert len(error.what) > len(f"{name} is ")
    assert error.remedy.startswith("Allowed: ")
    assert error.remedy in str(error)
    assert len(str(error)) < 300


def test_messages_read_well() -> None:
    with pytest.raises(RequestError, match=r"^top_p is 0\. Allowed: numbers in \(0, 1\]"):
        SamplingParams(top_p=0)
    with pytest.raises(RequestError, match=r"^min_tokens is 9\. Allowed: integers in \[0, 4\]"):
        SamplingParams(min_tokens=9, max_tokens=4)
    with pytest.raises(RequestError, match=r"^n is 0\. Allowed: integers in \[1, 1024\]"):
        SamplingParams(n=0)
    with pytest.raises(RequestError, match=r"^max_tokens is of type int and cannot be printed"):
        SamplingParams(max_tokens=10**5000)


GOOD: dict[str, list[Any]] = {
    "max_tokens": [None, 1, MAX_NEW_TOKENS, np.int32(5)],
    "min_tokens": [0, 5, MAX_NEW_TOKENS],
    "temperature": [0, 0.0, -0.0, 1, 100, 1e-60, np.float32(0.5), np.int64(1), Fraction(1, 2)],
    "top_p": [1e-60, 0.5, 1, 1.0, np.float64(0.9)],
    "top_k": [-1, 0, 1, 2**31 - 1, np.int64(40)],
    "min_p": [0, 0.0, 0.5, 1, 1.0],
    "seed": [None, 0, -1, -INT64, INT64 - 1, np.int64(3), np.uint8(3)],
    "n": [1, MAX_SEQUENCES],
    "presence_penalty": [-2, 0, 2.0],
    "frequency_penalty": [-2.0, 0, 2],
    "repetition_penalty": [0.01, 1, 100],
    "logit_bias": [None, {}, {0: 1}, {5: -1e6, 6: 1e6}, {np.int64(3): np.float32(1)}],
    "allowed_token_ids": [None, [0], (3, 4), {5}, np.array([1, 2]), range(3)],
    "logprobs": [None, 0, MAX_LOGPROBS],
    "prompt_logprobs": [None, 0, MAX_LOGPROBS],
    "stop_token_ids": [None, [], [0, 2**31 - 1], np.array([5])],
    "stop": [None, (), "end", ["a", "b"], ("a",)],
    "return_hidden_states": [True, False, "none", "final", "last", "all"],
    "hidden_state_layers": [(-1,), [-1], np.array([-1])],
}


@pytest.mark.parametrize(("name", "values"), GOOD.items(), ids=list(GOOD))
def test_good_values_pass(name: str, values: list[Any]) -> None:
    for value in values:
        SamplingParams(**{name: value})


def test_values_are_made_plain() -> None:
    """Numbers of other libraries become Python's, lists become tuples, the mapping is copied."""
    bias = {np.int64(3): np.float32(1.5)}
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(4),
        top_p=1,
        stop="end",
        stop_token_ids=np.array([1, 2]),
        allowed_token_ids=iter([3]),
        logit_bias=bias,
    )
    assert type(params.temperature) is float
    assert type(params.top_p) is float
    assert type(params.top_k) is int
    assert params.stop == ("end",)
    assert params.stop_token_ids == (1, 2)
    assert type(params.stop_token_ids[0]) is int
    assert params.allowed_token_ids == (3,)
    bias.clear()
    assert params.logit_bias == {3: 1.5}
    assert SamplingParams(stop=None, bad_words="word").bad_words == ("word",)


def test_a_seed_of_minus_one_is_none() -> None:
    assert SamplingParams(seed=-1) == SamplingParams(seed=np.int64(-1)) == SamplingParams()
    assert SamplingParams(seed=-2).seed == -2


def test_hidden_states_have_one_form() -> None:
    assert not SamplingParams(return_hidden_states=False).wants_hidden_states
    assert SamplingParams() == SamplingParams(return_hidden_states="none")
    assert SamplingParams(return_hidden_states=True).return_hidden_states == "last"
    layers = np.array([0, 3, -1, -4])
    params = SamplingParams(return_hidden_states="all", hidden_state_layers=layers)
    assert params.hidden_state_layers == (0, 3, -1, -4)
    assert params.state_layers(3) == (0, 3, 3, 0)
    for layers in ([4], [-5]):
        params = SamplingParams(return_hidden_states=True, hidden_state_layers=layers)
        with pytest.raises(RequestError, match=r"^hidden_state_layers is .*\[-4, 3\].* 3 layers"):
            params.state_layers(3)


def test_several_greedy_sequences_are_allowed() -> None:
    assert SamplingParams(n=4, temperature=0).greedy


def test_it_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.5  # type: ignore[misc]


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {100: 1.0}},
        {"stop_token_ids": [5, 100]},
        {"allowed_token_ids": [100]},
        {"logprob_token_ids": [99, 100]},
    ],
)
def test_ids_beyond_the_vocabulary_are_refused(options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    params.check_vocabulary(101)
    with pytest.raises(RequestError, match=rf"^{next(iter(options))} is 100\. .*\[0, 100\)"):
        params.check_vocabulary(100)


def test_what_is_on() -> None:
    off = SamplingParams(top_k=0, top_p=1, min_p=0, repetition_penalty=1, logit_bias={})
    assert not any((off.has_filters, off.has_penalties, off.has_bias, off.greedy))
    assert all(SamplingParams(**{name: 0.5}).has_filters for name in ("top_p", "min_p"))
    assert SamplingParams(top_k=1).has_filters
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert SamplingParams(**{name: 0.5}).has_penalties
    assert SamplingParams(allowed_token_ids=[1]).has_bias


@pytest.mark.parametrize(
    ("field", "answer"),
    [
        ("temprature", r"did you mean temperature\?"),
        ("max_new_tokens", "use max_tokens"),
        ("guided_json", r"use structured=StructuredOutput\(json_schema=...\)"),
        ("length_penalty", "it belongs to beam search, which this version does not have"),
        ("logits_processors", "code of requests is not run"),
    ],
)
def test_a_field_that_there_is_not_is_answered(field: str, answer: str) -> None:
    told = rf"field of SamplingParams: {field} \({answer}\)\.$"
    with pytest.raises(UnknownFieldError, match=told):
        SamplingParams(**{field: 0})
    with pytest.raises(UnknownFieldError, match=told):
        replace(SamplingParams(), **{field: 0})


@pytest.mark.parametrize(
    ("words", "params"),
    [
        (SAMPLING_WORDS, SamplingParams),
        (STRUCTURED_WORDS, StructuredOutput),
        (POOLING_WORDS, PoolingParams),
    ],
)
def test_other_words_lead_to_fields_of_ours(words: OtherWords, params: type) -> None:
    ours = {each.name for each in fields(params)}
    assert set(words.renamed.values()) <= ours
    assert not ours & {*words.renamed, *words.switches, *words.advice}


def test_other_forms_lead_to_forms_of_ours() -> None:
    assert set(FORMS.values()) <= set(KINDS)
