"""Options that choose tokens, asked through `LLM`."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_llm import GREEDY, PRINTABLE, ids, make_llm, one, tokens

from headrace import LLM, SamplingParams

PROMPT = ids(1, 20)
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_copies_of_a_prompt_give_one_answer(llm: LLM, size: int) -> None:
    alone = tokens(llm, PROMPT, GREEDY)[0]
    assert tokens(llm, [PROMPT] * size, GREEDY) == [alone] * size


def test_prompts_with_one_start_and_another_end(llm: LLM, folder: Path) -> None:
    # Batch and cache together gave answers of the wrong prompt
    texts = [f"The passphrase is cobalt fig {number}" for number in (41, 913, 768, 9687, 8578)]
    with make_llm(folder, enable_prefix_cache=False) as other:
        alone = [tokens(other, text, GREEDY)[0] for text in texts]
    assert tokens(llm, texts, GREEDY) == alone
    assert tokens(llm, texts, GREEDY) == alone  # all cached now


def test_the_same_request_again_and_again(llm: LLM, folder: Path) -> None:
    # The cache changed a repeated answer; also prompts of whole pages, all cached
    with make_llm(folder, enable_prefix_cache=False) as other:
        for length in (15, 16, 17, 32, 48):
            prompt = ids(length, length)
            expected = tokens(other, prompt, GREEDY)
            for _ in range(3):
                assert tokens(llm, prompt, GREEDY) == expected
                tokens(llm, ids(99, 9), GREEDY)
            (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
            assert output.cached_tokens == (length - 1) // 16 * 16


def test_generate_twice_keeps_order(llm: LLM) -> None:
    # The second call of an engine lost or mixed up results
    prompts = [ids(seed, 5 + 7 * seed) for seed in range(3)]
    first = llm.generate(prompts, GREEDY, use_tqdm=False)
    again = llm.generate(prompts[::-1], GREEDY, use_tqdm=False)
    assert [list(output.prompt_token_ids) for output in first] == prompts
    assert [list(output.prompt_token_ids) for output in again] == prompts[::-1]
    assert [o.outputs[0].token_ids for o in first] == [o.outputs[0].token_ids for o in again[::-1]]
    assert len({output.request_id for output in [*first, *again]}) == 6


def test_every_row_has_its_own_options(llm: LLM) -> None:
    # Options of one row reached its mates
    each = [
        SEEDED,
        replace(SEEDED, top_p=0.5),
        replace(SEEDED, temperature=0.0),
        replace(SEEDED, min_p=0.2, seed=3),
        replace(SEEDED, repetition_penalty=3.0),
        replace(SEEDED, logit_bias={9: 8.0}),
        replace(SEEDED, allowed_token_ids=[1, 2, 3]),
        replace(SEEDED, top_k=2, bad_words=["a", "bc"]),
    ]
    alone = [tokens(llm, PROMPT, params)[0] for params in each]
    assert tokens(llm, [PROMPT] * len(each), each) == alone
    assert len({tuple(made) for made in alone}) == len(each)


def test_seeds(llm: LLM) -> None:
    # Honoured, also twice in one batch
    again, twin, other = tokens(llm, [PROMPT] * 3, [SEEDED, SEEDED, replace(SEEDED, seed=8)])
    assert again == twin == tokens(llm, PROMPT, SEEDED)[0]
    assert other != again


def test_without_a_seed_draws_differ(llm: LLM) -> None:
    # The same text at a high temperature
    params = SamplingParams(temperature=1.5, max_tokens=8, ignore_eos=True)
    made = Counter(map(tuple, tokens(llm, [PROMPT] * 20, params)))
    assert len(made) == 20


@pytest.mark.parametrize("overlap", [False, True])
def test_several_continuations(folder: Path, overlap: bool) -> None:
    # n with a seed differs within, repeats across calls, with and without the cache
    params = replace(SEEDED, n=3)
    found = []
    for cache in (True, False):
        with make_llm(folder, enable_prefix_cache=cache, enable_overlap=overlap) as llm:
            for prompt in (PROMPT, ids(5, 64), [3]):
                for _ in range(2):
                    (output,) = llm.generate(prompt, params, use_tqdm=False)
                    assert [each.index for each in output.outputs] == [0, 1, 2]
                    found.append([each.token_ids for each in output.outputs])
                assert found[-1] == found[-2]
                assert found[-1][0] == tokens(llm, prompt, SEEDED)[0]
                assert len({tuple(made) for made in found[-1]}) == 3
            (output,) = llm.generate(PROMPT, replace(params, seed=None), use_tqdm=False)
            assert len({tuple(each.token_ids) for each in output.outputs}) == 3
            (output,) = llm.generate(PROMPT, replace(GREEDY, n=2), use_tqdm=False)
            assert output.outputs[0].token_ids == output.outputs[1].token_ids
    assert found[:6] == found[6:]


def test_bias_and_allowed_ids(llm: LLM) -> None:
    assert one(llm, PROMPT, replace(GREEDY, logit_bias={42: 1e4})).token_ids == [42] * 8
    banned = set(one(llm, PROMPT, GREEDY).token_ids)
    made = one(llm, PROMPT, replace(GREEDY, logit_bias=dict.fromkeys(banned, -1e4))).token_ids
    assert not banned & set(made)
    made = one(llm, PROMPT, replace(SEEDED, allowed_token_ids=[5, 6], max_tokens=40)).token_ids
    assert set(made) == {5, 6}
    params = replace(SEEDED, allowed_token_ids=[5, 6], logit_bias={6: 1e4, 7: 1e6})
    assert set(one(llm, PROMPT, params).token_ids) == {6}


@pytest.mark.parametrize("length", [1, 2, 3])
def test_bad_words_never_appear(llm: LLM, length: int) -> None:
    params = replace(SEEDED, allowed_token_ids=PRINTABLE, temperature=0.0, max_tokens=30)
    mates = [ids(seed, 30) for seed in range(3)]
    text = one(llm, PROMPT, params).text
    words = []
    while len(words) < 4:  # each time a word of what is left is forbidden too
        words.append(text[5 : 5 + length])
        params = replace(params, bad_words=words)
        outputs = llm.generate([*mates, PROMPT], params, use_tqdm=False)
        for output in outputs:
            assert not any(word in output.outputs[0].text for word in words)
        text = outputs[-1].outputs[0].text
    assert one(llm, PROMPT, params).text == text


@pytest.mark.parametrize("word", ["\n", " ", "\n\n"])
def test_white_space_is_a_word_too(llm: LLM, word: str) -> None:
    (token,) = llm.get_tokenizer().encode(word[0])
    allowed = (*PRINTABLE, token)  # others have no text
    params = replace(SEEDED, logit_bias={token: 100.0}, allowed_token_ids=allowed, max_tokens=6)
    assert word in one(llm, PROMPT, params).text
    assert word not in one(llm, PROMPT, replace(params, bad_words=[word])).text


@pytest.mark.parametrize(
    "options", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}, {"temperature": 1e-6}]
)
def test_the_narrowest_filters_are_greedy(llm: LLM, options: dict[str, Any]) -> None:
    assert tokens(llm, PROMPT, replace(SEEDED, **options)) == tokens(
        llm, PROMPT, replace(SEEDED, temperature=0.0)
    )


@pytest.mark.parametrize("options", [{"top_k": 0}, {"top_k": 2**31 - 1}, {"min_p": 0.0}])
def test_filters_that_are_off_change_nothing(llm: LLM, options: dict[str, Any]) -> None:
    assert tokens(llm, PROMPT, replace(SEEDED, **options)) == tokens(llm, PROMPT, SEEDED)
