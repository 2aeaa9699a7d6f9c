"""A request gives the same answer alone or in any batch, chunked or not, cached or not, retracted
or not, at any page size, with or without overlap.
"""

import random
from pathlib import Path

import pytest
from same_answer import Comparison
from tiny_engine import VOCAB, make_engine, run_all, run_alone

from headrace.request.sampling_params import SamplingParams

NEW_TOKENS = 14
LENGTHS = (1, 5, 15, 16, 17, 33, 64, 100)
PAGE_SIZES = (1, 16, 64)
CHUNKS = (1, 7, 64, 512)

GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2)
SAMPLED = [
    SamplingParams(
        temperature=0.9,
        top_p=0.9 if index % 2 else 1.0,
        top_k=40 if index % 3 else -1,
        min_p=0.02 if index % 4 == 1 else 0.0,
        seed=index,
        presence_penalty=0.5 if index % 2 else 0.0,
        frequency_penalty=0.3 if index % 3 == 0 else 0.0,
        repetition_penalty=1.2 if index % 4 == 0 else 1.0,
        logit_bias={7: 2.0} if index == 3 else None,
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
        logprobs=0,
    )
    for index in range(len(LENGTHS))
]
PARAMS = {"greedy": [GREEDY] * len(LENGTHS), "sampled": SAMPLED}


def prompts() -> list[list[int]]:
    draw = random.Random(11)
    shared = [draw.randrange(256) for _ in range(40)]
    lists = [[draw.randrange(256) for _ in range(length)] for length in LENGTHS]
    lists[-1][:40] = lists[-2][:40] = shared
    return lists


@pytest.fixture(scope="module", params=["llama", "gemma"])
def folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"{request.param}_folder")


Case = tuple[list[SamplingParams], Comparison]


@pytest.fixture(scope="module")
def cases(folder: Path) -> list[Case]:
    engine = make_engine(folder, enable_prefix_cache=False, page_size=16)
    return [
        (params, Comparison(run_alone(engine, prompts(), params))) for params in PARAMS.values()
    ]


@pytest.fixture(scope="module", params=range(len(PARAMS)), ids=list(PARAMS))
def case(request: pytest.FixtureRequest, cases: list[Case]) -> Case:
    return cases[request.param]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_batch_of_eight_in_chunks(
    folder: Path, cases: list[Case], page_size: int, chunk: int
) -> None:
    """Greedy and sampled in turn, and where one family is greedy, the other is sampled."""
    turn = PAGE_SIZES.index(page_size) + CHUNKS.index(chunk) + ("gemma" in folder.name)
    params, comparison = cases[turn % len(cases)]
    engine = make_engine(folder, page_size=page_size, chunked_prefill_size=chunk)
    outputs = run_all(engine, prompts(), params)
    comparison.check(outputs)


def test_cache_cold_warm_and_fully_hit(folder: Path, case: Case) -> None:
    params, comparison = case
    for page_size in (1, 16):
        engine = make_engine(folder, page_size=page_size)
        comparison.check(run_alone(engine, prompts(), params))
        again = run_alone(engine, prompts(), params)
        comparison.check(again)
        for prompt, output in zip(prompts(), again, strict=True):
            assert output.cached_tokens == (len(prompt) - 1) // page_size * page_size
        comparison.check(run_all(engine, prompts(), params))


@pytest.mark.parametrize("overlap", [False, True])
def test_forced_retraction(folder: Path, case: Case, overlap: bool) -> None:
    params, comparison = case
    engine = make_engine(
        folder, retract_every=2, page_size=4, chunked_prefill_size=16, enable_overlap=overlap
    )
    for _ in range(2):  # the second time out of the cache
        comparison.check(run_all(engine, prompts(), params))
    assert engine.stats()["retractions"] > 5


def test_pool_too_small_for_all(folder: Path, case: Case) -> None:
    params, comparison = case
    engine = make_engine(folder, page_size=8, max_total_tokens=256, chunked_prefill_size=32)
    comparison.check(run_all(engine, prompts(), params))


def test_overlap(folder: Path, case: Case) -> None:
    params, comparison = case
    engine = make_engine(folder, page_size=16, chunked_prefill_size=64, enable_overlap=True)
    comparison.check(run_all(engine, prompts(), params))
    comparison.check(run_alone(engine, prompts(), params))


def test_arrivals_while_others_decode(folder: Path, case: Case) -> None:
    # Graph or plan of a decode batch used for a step that also holds prompt chunks.
    params, comparison = case
    engine = make_engine(folder, chunked_prefill_size=32, enable_overlap=True)
    handles = []
    for prompt, each in zip(prompts(), params, strict=True):
        handles.append(engine.add(prompt, each))
        engine.step()
        engine.step()
    while not all(handle.is_finished for handle in handles):
        engine.step()
    comparison.check([handle.output() for handle in handles])


def test_nan_in_padding_and_unused_memory_changes_nothing(folder: Path, case: Case) -> None:
    params, comparison = case
    for page_size in (1, 16, 64):
        engine = make_engine(folder, page_size=page_size, chunked_prefill_size=48)
        pool = engine.worker.runner.token_to_kv_pool
        for layer in range(pool.num_layers):
            for tensor in pool.key_value(layer):
                tensor.fill_(float("nan"))
        comparison.check(run_all(engine, prompts(), params))


def test_output_is_a_prefix_of_a_longer_one(llama_folder: Path) -> None:
    engine = make_engine(llama_folder)
    prompt = prompts()[3]
    texts = [
        run_all(
            engine,
            [prompt],
            [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)],
        )[0]
        .outputs[0]
        .token_ids
        for length in (20, 30, 40)
    ]
    assert texts[0] == texts[1][:20]
    assert texts[1] == texts[2][:30]
    assert len(texts[2]) == 40
    assert all(0 <= token < VOCAB for token in texts[2])
