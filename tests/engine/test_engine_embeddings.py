"""Embeddings beside generation: on every path that runs prompts, retracted, aborted."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from operator_recorder import as_if_on_a_gpu
from tiny_engine import make_engine

from headrace.batch.facts import HiddenMode
from headrace.engine.engine import Engine
from headrace.engine.requests import RequestHandle
from headrace.request.pooling_params import PoolingParams
from headrace.request.sampling_params import SamplingParams

LAST, MEAN = (PoolingParams(pooling=each, normalize=False) for each in ("last", "mean"))
SAMPLED = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=0)  # a seed drawn by the engine


def ids(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(256) for _ in range(length)]


PROMPTS = [ids(length, length) for length in (1, 5, 17, 40, 64, 65, 90)]


def submit(engine: Engine, prompt: list[int], pooling: PoolingParams) -> RequestHandle:
    return engine.submit(engine.prepare_embedding(prompt, pooling))


def finish(engine: Engine, handles: list[RequestHandle]) -> None:
    while not all(handle.is_finished for handle in handles):
        engine.step()
    engine.settle()
    engine.scheduler.check_integrity()


def vectors(engine: Engine, pooling: PoolingParams) -> list[Any]:
    """Of each prompt alone."""
    made = []
    for prompt in PROMPTS:
        handle = submit(engine, prompt, pooling)
        finish(engine, [handle])
        made.append(handle.embedding_output().embedding)
    return made


def check(handles: list[RequestHandle], expected: list[Any]) -> None:
    for handle, vector in zip(handles, expected, strict=True):
        output = handle.embedding_output()
        assert output.finish_reason == "stop"
        np.testing.assert_allclose(output.embedding, vector, rtol=0, atol=2e-5)


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
def test_rows_that_generate_do_not_notice(llama_folder: Path, overlap: bool) -> None:
    options = {"enable_overlap": overlap, "chunked_prefill_size": 24}
    alone = make_engine(llama_folder, **options)
    expected = {pooling: vectors(alone, pooling) for pooling in (LAST, MEAN)}
    outputs = []
    for embeds in (False, True):
        engine = make_engine(llama_folder, **options)
        generating, embedding, wanted = [], [], []
        for place, prompt in enumerate(PROMPTS):
            generating.append(engine.add(ids(9 + place, 50 + place), SAMPLED))
            for pooling in (LAST, MEAN) if embeds else ():
                embedding.append(submit(engine, prompt, pooling))
                wanted.append(expected[pooling][place])
            engine.step()
        finish(engine, [*generating, *embedding])
        check(embedding, wanted)
        outputs.append([handle.output().outputs[0].token_ids for handle in generating])
        counts = engine.stats()
        assert counts["output_tokens"] == sum(len(each) for each in outputs[-1])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("kind", ["breakable", "piecewise"])
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_prefill_graphs(
    family: str, kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_on_a_gpu(monkeypatch)
    monkeypatch.setattr(
        "headrace.execution.compiled_pieces.compile_piece", lambda piece, _: piece.graph
    )
    folder = request.getfixturevalue(f"{family}_folder")
    eager = make_engine(folder, prefill_graph="off")
    expected = {pooling: vectors(eager, pooling) for pooling in (LAST, MEAN)}
    engine = make_engine(folder, prefill_graph=kind, chunked_prefill_size=64)
    for pooling in (LAST, MEAN):
        handles = [submit(engine, prompt, pooling) for prompt in PROMPTS]
        finish(engine, handles)
        check(handles, expected[pooling])
    paths = {path for handle in handles for path, _ in handle.embedding_output().paths}
    assert paths == {"prefill_graph"}


def test_retracted_in_mid_prompt(llama_folder: Path) -> None:
    alone = make_engine(llama_folder)
    generates = SamplingParams(max_tokens=12, ignore_eos=True)
    for pooling in (LAST, MEAN):
        whole = submit(alone, ids(36, 40), pooling)
        finish(alone, [whole])
        engine = make_engine(
            llama_folder,
            max_model_len=64,
            max_total_tokens=68,
            page_size=1,
            chunked_prefill_size=8,
        )
        generating = [engine.add(ids(5, seed), generates) for seed in range(4)]
        while not all(handle.output_tokens for handle in generating):
            engine.step()
        handle = submit(engine, ids(36, 40), pooling)
        finish(engine, [*generating, handle])
        assert engine.stats()["retractions"] == 1
        prompt_steps = sum(steps for _, steps in handle.embedding_output().paths)
        assert prompt_steps > 5, "it had begun when it was retracted"
        check([handle], [whole.embedding_output().embedding])


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_aborted_at_any_time(llama_folder: Path, turns: int) -> None:
    engine = make_engine(llama_folder, chunked_prefill_size=32)
    handles = [submit(engine, PROMPTS[-1], pooling) for pooling in (LAST, MEAN)]
    for _ in range(turns):
        engine.step()
    engine.abort([handle.request_id for handle in handles])
    for handle in handles:
        output = handle.embedding_output()
        assert output.embedding is None
        assert output.finish_reason == "abort"
    assert not engine.has_work
    assert not engine.scheduler.chooser.running
    engine.scheduler.check_integrity()


def test_a_decode_step_without_embeddings_asks_for_nothing(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(llama_folder)
    asked = []
    forward = engine.worker.runner.forward

    def watch(batch: Any) -> Any:
        asked.append((batch.facts.hidden, batch.side.hidden is not None))
        return forward(batch)

    monkeypatch.setattr(engine.worker.runner, "forward", watch)
    handle = engine.add(ids(5, 1), SAMPLED)
    finish(engine, [handle])
    assert set(asked) == {(HiddenMode.NONE, False)}
    asked.clear()
    finish(engine, [submit(engine, ids(5, 1), LAST), submit(engine, ids(5, 2), MEAN)])
    assert asked == [(HiddenMode.ALL, True)]
