"""What cannot be served is refused before anything runs, by index; the next call works."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_engine import VOCAB, write_checkpoint
from tiny_llm import GREEDY, assert_nothing_is_held, ids, make_llm, one, tokens

from headrace import LLM, SamplingParams
from headrace.base.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    RequestError,
    TooLongError,
    UnknownFieldError,
    UnsupportedError,
)
from headrace.engine.other_words import EMBEDDING_WORDS, LLM_WORDS, OUTPUT_WORDS

GOOD = ids(3, 10)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return make_llm(folder, max_model_len=64)


def assert_nothing_ran(llm: LLM, call: Callable[[], Any], *words: str) -> None:
    """`call` is refused with these words, nothing ran or stays, and the next request works."""
    steps = llm.stats().get("steps", 0)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is checked below
        call()
    assert isinstance(caught.value, RequestError)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)
    assert llm.stats().get("steps", 0) == steps
    assert_nothing_is_held(llm)
    assert len(one(llm, GOOD, GREEDY).token_ids) == 8


BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "empty text": ("", "empty"),
    "empty list": ([], "empty"),
    "vocabulary": ([0, VOCAB], "vocabulary has ids 0 to 271"),
    "far outside": ([0, 999999], "999999"),
    "negative": ([5, -1], "-1"),
    "None": (None, "The prompt is None"),
    "number": (1.5, "The prompt is 1.5"),
    "floats": ([1.0, 2.0], "1.0"),
    "nested": ([[1, 2]], "[1, 2]"),
    "bytes": (b"abc", "b'abc'"),
    "mapping": ({"text": "hello"}, "Send a text or a list of token ids"),
    "vLLM's text": ({"prompt": "hello"}, "Send what stands under 'prompt', by itself"),
    "vLLM's ids": ({"prompt_token_ids": [1]}, "under 'prompt_token_ids', by itself"),
    "set": ({1, 2}, "The prompt is"),
    "truth values": ([True, False], "True"),
    "words": (["a", "b"], "'a'"),
    "mixed": ([1, None], "None"),
    "tensor of fractions": (torch.tensor([1.0, 2.0]), "whole numbers"),
    "tensor of rows": (torch.tensor([[1, 2]]), "[1, 2]"),
    "surrogate": ("a\ud800", "surrogate"),
    "too long": ([1] * 65, "65 tokens"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt_is_named_by_its_index(llm: LLM, name: str) -> None:
    prompt, word = BAD_PROMPTS[name]
    assert_nothing_ran(llm, lambda: llm.generate([GOOD, prompt], GREEDY), "Prompt 1:", word)
    assert_nothing_ran(llm, lambda: llm.stream(prompt, GREEDY), word)


@pytest.mark.parametrize("prompts", [None, 5, 1.5, b"abc", {1, 2}, object()])
def test_prompts_of_no_kind_at_all(llm: LLM, prompts: Any) -> None:
    assert_nothing_ran(llm, lambda: llm.generate(prompts, GREEDY), "prompts is", "Give a text")
    assert_nothing_ran(llm, lambda: llm.chat(prompts, GREEDY), "messages is", "Give a list")


def test_a_dict_alone_is_told_as_a_prompt_is(llm: LLM) -> None:
    told = "Send what stands under 'prompt', by itself"
    assert_nothing_ran(llm, lambda: llm.generate({"prompt": "x"}, GREEDY), told)  # type: ignore[arg-type]


def test_numbers_of_other_libraries_are_taken(llm: LLM) -> None:
    expected = tokens(llm, GOOD, GREEDY)
    tensor = torch.tensor(GOOD)
    for prompts in (
        *(np.array(GOOD), [np.int64(token) for token in GOOD], [np.array(GOOD)]),
        *(tensor, list(tensor), [tensor], tensor[None]),
    ):
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert outputs[0].outputs[0].token_ids == expected[0]
        assert all(type(token) is int for token in outputs[0].prompt_token_ids)
    assert tokens(llm, tuple(GOOD), GREEDY) == expected
    assert tokens(llm, np.array([GOOD, GOOD]), GREEDY) == expected * 2


@pytest.mark.parametrize(
    ("named", "answer"),
    [
        ({"prompt_token_ids": [[1]]}, r"prompt_token_ids \(prompts may be lists of token ids"),
        ({"max_tokens": 3}, r"max_tokens \(use SamplingParams\(max_tokens="),
        ({"max_new_tokens": 3}, r"max_new_tokens \(use SamplingParams\(max_tokens="),
        ({"stream": True}, r"stream \(use LLM\.stream"),
        ({"lora_request": None}, r"lora_request \(this version does not have it"),
    ],
)
def test_arguments_of_other_engines_are_answered(llm: LLM, named: Any, answer: str) -> None:
    with pytest.raises(UnknownFieldError, match=f"^Unknown argument of generate: {answer}"):
        llm.generate([GOOD], **named)


def test_methods_and_results_of_other_engines_are_answered(llm: LLM) -> None:
    (output,) = llm.generate([GOOD], GREEDY, use_tqdm=False)
    embedding = llm.embed([GOOD], use_tqdm=False)[0]
    told = {
        "shutdown": (llm, r"use close\(\)"),
        "reset_prefix_cache": (llm, r"use flush_cache\(\)"),
        "num_cached_tokens": (output, "use cached_tokens"),
        "text": (output, r"those of a continuation: outputs\[0\]"),
        "outputs": (embedding, "use embedding"),
    }
    for name, (owner, answer) in told.items():
        with pytest.raises(AttributeError, match=rf"has no attribute {name} \({answer}\)$"):
            getattr(owner, name)
    for words, owner in ((LLM_WORDS, llm), (OUTPUT_WORDS, output), (EMBEDDING_WORDS, embedding)):
        theirs = (*words.renamed, *words.advice)
        assert not [name for name in theirs if hasattr(owner, name)]
        assert all(hasattr(owner, ours) for ours in words.renamed.values())


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []
    assert llm.generate([], []) == []
    assert llm.chat([]) == []


BAD_PARAMS: dict[str, tuple[dict[str, Any], str]] = {
    "logit_bias": ({"logit_bias": {VOCAB: -100.0}}, "logit_bias"),
    "stop_token_ids": ({"stop_token_ids": [VOCAB + 5], "min_tokens": 4}, "stop_token_ids"),
    "allowed_token_ids": ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids"),
    "logprob_token_ids": ({"logprob_token_ids": [VOCAB]}, "logprob_token_ids"),
    "bad_words": ({"bad_words": ["a\ud800"]}, "surrogate"),
    "max_tokens": ({"max_tokens": 60}, "70 together"),
    "min_tokens": ({"min_tokens": 60}, "70 together"),
    "hidden states": (
        {"return_hidden_states": True, "hidden_state_layers": [1000]},
        "hidden_state_layers",
    ),
    "experts": ({"return_routed_experts": True}, "llama, has no experts"),
}


@pytest.mark.parametrize("name", BAD_PARAMS)
def test_options_the_model_cannot_honour(llm: LLM, name: str) -> None:
    options, word = BAD_PARAMS[name]
    params = [GREEDY, SamplingParams(**options)]
    assert_nothing_ran(llm, lambda: llm.generate([GOOD, GOOD], params), "Prompt 1:", word)
    assert_nothing_ran(llm, lambda: llm.stream(GOOD, params[1]), word)


@pytest.mark.parametrize("params", [[], [GREEDY] * 3, 5, {"temperature": 0}, "greedy"])
def test_params_of_the_wrong_number_or_kind(llm: LLM, params: Any) -> None:
    assert_nothing_ran(llm, lambda: llm.generate([GOOD, GOOD], params), "sampling")
    assert_nothing_ran(llm, lambda: llm.stream(GOOD, [GREEDY] * 2), "2 sampling params")


@pytest.mark.parametrize("bad", [None, {"temperature": 0.0}, 0.5])
def test_one_of_the_params_is_none(llm: LLM, bad: Any) -> None:
    assert_nothing_ran(llm, lambda: llm.generate([GOOD, GOOD], [GREEDY, bad]), "Prompt 1:")


@pytest.mark.parametrize("more", [-2, -1, 0, 1])
@pytest.mark.parametrize("max_tokens", [None, 1, 5])
def test_prompts_about_as_long_as_the_context(llm: LLM, more: int, max_tokens: int | None) -> None:
    # No exception in the middle, both numbers in the refusal
    prompt = [7] * (64 + more)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    if more + (max_tokens or 1) > 0:
        words = (f"{64 + more} tokens", "64")
        assert_nothing_ran(llm, lambda: llm.generate(prompt, params), "Prompt 0:", *words)
        return
    output = one(llm, prompt, params)
    assert output.finish_reason == "length"
    assert len(output.token_ids) == (max_tokens or -more)


BAD_MESSAGES: list[Any] = [
    [[{"role": "user", "content": "x"}], [{"content": "no role"}]],
    [[{"role": "user", "content": "x"}], "hello"],
    [[{"role": "user", "content": "x"}], None],
    [[{"role": "user", "content": "x"}], [{"role": "user", "content": "too long " * 20}]],
]


@pytest.mark.parametrize("place", range(len(BAD_MESSAGES)))
def test_bad_conversations_are_named(llm: LLM, place: int) -> None:
    assert_nothing_ran(llm, lambda: llm.chat(BAD_MESSAGES[place], GREEDY), "Prompt 1:")
    assert_nothing_ran(llm, lambda: llm.stream_chat(BAD_MESSAGES[place][1], GREEDY))


def test_a_checkpoint_without_tokenizer(plain_folder: Path) -> None:
    # What works on text is refused, never ignored
    llm = make_llm(plain_folder)
    output = one(llm, GOOD, SamplingParams(max_tokens=3, seed=0, logprobs=1))
    assert output.text == ""
    assert output.logprobs[0][output.token_ids[0]].decoded_token is None
    text_options = [SamplingParams(stop="a"), SamplingParams(bad_words=["a"])]
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate("hello"),
        lambda: llm.generate(GOOD, text_options[0]),
        lambda: llm.generate(GOOD, text_options[1]),
        lambda: llm.chat([{"role": "user", "content": "x"}]),
        lambda: llm.stream("hello"),
        llm.get_tokenizer,
    ]
    for call in calls:
        assert_nothing_ran(llm, call, "no tokenizer")


def test_a_bias_changed_after_the_check_is_not_seen(llm: LLM) -> None:
    params = replace(GREEDY, logit_bias={65: 1e4})
    stream = llm.stream(GOOD, params)
    assert isinstance(params.logit_bias, dict)
    params.logit_bias[VOCAB] = 1.0
    pieces = list(stream)
    assert pieces[-1].finish_reason == "length"
    assert {token for piece in pieces for token in piece.token_ids} == {65}
    assert_nothing_ran(llm, lambda: llm.generate(GOOD, params), f"logit_bias is {VOCAB}")


def stating_ends(path: Path, count: int) -> Path:
    """A checkpoint with so many end tokens: ids from 0 on, and the tokenizer's own."""
    folder = write_checkpoint(path, "llama")
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": [*range(count)]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_no_more_ends_than_a_row_holds(tmp_path: Path) -> None:
    llm = make_llm(stating_ends(tmp_path, 99), max_model_len=64)
    full = replace(GREEDY, ignore_eos=False, stop_token_ids=[*range(100, 128)])
    over = replace(full, stop_token_ids=[*range(100, 129)])
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate(["good", "also good"], [GREEDY, over], use_tqdm=False),
        lambda: llm.stream("x", over),
    ]
    for call in calls:
        assert_nothing_ran(llm, call, "29 ids", "100 end tokens", "129 together", "at most 128")
    mates = [
        full,
        replace(over, ignore_eos=True),
        replace(over, stop_token_ids=[*range(64)]),
        GREEDY,
    ]
    outputs = llm.generate(["x"] * 4, mates, use_tqdm=False)
    assert {each.outputs[0].finish_reason for each in outputs} <= {"stop", "length"}
    assert len(outputs[3].outputs[0].token_ids) == 8
    assert_nothing_is_held(llm)


def test_a_model_with_more_ends_than_a_row_holds(tmp_path: Path) -> None:
    assert len(make_llm(stating_ends(tmp_path / "full", 127)).engine.eos_token_ids) == 128
    with pytest.raises(CheckpointError, match=r"states 129 end tokens.*at most 128"):
        make_llm(stating_ends(tmp_path / "over", 128))


def test_chat_without_a_template(tmp_path: Path) -> None:
    # The refusal says what works
    folder = write_checkpoint(tmp_path, "llama")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    llm = make_llm(folder)
    messages = [{"role": "user", "content": "x"}]
    assert_nothing_ran(llm, lambda: llm.chat(messages), "chat template", "completion")
    assert len(one(llm, "x", GREEDY).token_ids) == 8


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"colour": "red", "pagesize": 16}, ConfigError, ["colour", "pagesize (did you mean"]),
        ({"tensor_parallel_size": 2}, TypeError, ["runs on one device"]),
        ({"dtype": "float8"}, ConfigError, ["dtype", "bfloat16"]),
        ({"decode_graph": (1, 2)}, UnsupportedError, ["decode_graph", "auto or off"]),
        ({"attention_backend": "magic"}, UnsupportedError, ["magic", "torch_native"]),
        ({"page_size": 3}, ConfigError, ["page_size"]),
        ({"max_total_tokens": 10**15}, CapacityError, ["1,000,000,000,000,000 was asked", "fit"]),
        ({"max_model_len": 100_000}, ConfigError, ["100,000", "512"]),
    ],
)
def test_options_of_the_engine_are_kept_or_refused(
    folder: Path, options: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        make_llm(folder, **options)
    for word in words:
        assert word in str(caught.value)


def test_a_generation_config_nobody_could_ask_for(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama")
    (folder / "generation_config.json").write_text('{"top_p": 7}')
    with pytest.raises(CheckpointError, match=r"generation_config.json: top_p is 7"):
        make_llm(folder)


@pytest.mark.parametrize("prompts", [["hello", "A"], [[1, 2], [3]], ["hello"]])
def test_stream_takes_one_prompt(llm: LLM, prompts: list[Any]) -> None:
    assert_nothing_ran(llm, lambda: llm.stream(prompts), "stream takes one prompt", "generate")


@pytest.mark.parametrize(
    ("options", "blamed", "innocent"),
    [
        ({"max_model_len": None, "max_total_tokens": 8}, "max_total_tokens", "max_model_len"),
        ({"max_model_len": None}, "made for 512 positions", "max_model_len"),
        ({"max_model_len": 8}, "max_model_len", "max_total_tokens"),
    ],
)
def test_only_what_was_asked_is_blamed(
    folder: Path, options: dict[str, Any], blamed: str, innocent: str
) -> None:
    with make_llm(folder, **options) as llm, pytest.raises(TooLongError) as caught:
        llm.stream([1] * 600)
    assert blamed in str(caught.value)
    assert innocent not in str(caught.value)
