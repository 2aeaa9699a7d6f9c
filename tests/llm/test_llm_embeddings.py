"""`LLM.embed`: the vectors are transformers', however the prompts were run."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_engine import GEMMA, LLAMA, VOCAB
from tiny_llm import assert_nothing_is_held, ids, make_llm
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from headrace import LLM, PoolingParams, SamplingParams
from headrace.base.errors import RequestError
from headrace.engine.outputs import EmbeddingOutput

TOLERANCE = 2e-4
HIDDEN = LLAMA["hidden_size"]
SHARED = ids(7, 48)
PROMPTS = [ids(1, 1), ids(2, 16), ids(3, 33), [*SHARED, *ids(4, 9)], [*SHARED, *ids(5, 40)]]
LAST, MEAN = (PoolingParams(pooling=each, normalize=False) for each in ("last", "mean"))
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, LLAMA),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, LLAMA | {"head_dim": 32}),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, GEMMA),
}


class Model:
    """A checkpoint with weights on disk, and transformers' vectors of `PROMPTS`."""

    def __init__(self, folder: Path, family: str) -> None:
        make_config, make_model, known = FAMILIES[family]
        unused = ("architectures", "model_type", "rope_theta", "rope_local_base_freq")
        config = {name: value for name, value in known.items() if name not in unused}
        with torch.random.fork_rng():
            torch.manual_seed(5)
            model = make_model(make_config(**config, pad_token_id=None)).eval()
            for name, parameter in model.named_parameters():
                if parameter.dim() == 2:
                    parameter.data.normal_(0, 1 if "embed" in name else parameter.shape[1] ** -0.5)
        model.save_pretrained(folder)
        self.folder = folder
        with torch.no_grad():
            states = [model.model(torch.tensor([each])).last_hidden_state[0] for each in PROMPTS]
        self.expected = {
            "last": [each[-1].numpy() for each in states],
            "mean": [each.mean(0).numpy() for each in states],
        }


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("embed") / request.param, request.param)


@pytest.fixture(scope="module")
def embedder(folder: Path) -> Iterator[LLM]:
    with make_llm(folder, chunked_prefill_size=32) as made:
        yield made


def embed(llm: LLM, prompts: Any, params: Any = None) -> list[EmbeddingOutput]:
    return llm.embed(prompts, params, use_tqdm=False)


def vectors(llm: LLM, prompts: Any, params: Any = None) -> list[np.ndarray]:
    made = [output.embedding for output in embed(llm, prompts, params)]
    assert all(each is not None for each in made)
    return made


def check(made: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for ours, theirs in zip(made, expected, strict=True):
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("chunk", "overlap"), [(5, True), (32, False), (512, True)], ids=["5", "32 in turn", "512"]
)
def test_they_are_transformers(model: Model, chunk: int, overlap: bool) -> None:
    options = {"load_format": "auto", "chunked_prefill_size": chunk, "enable_overlap": overlap}
    with make_llm(model.folder, **options) as llm:
        for params in (LAST, MEAN):
            check(vectors(llm, PROMPTS, params), model.expected[params.pooling])
        again = embed(llm, PROMPTS, LAST)
        check([each.embedding for each in again], model.expected["last"])
        assert [each.cached_tokens for each in again] == [0, 0, 32, 48, 80]
        means = embed(llm, PROMPTS, MEAN)
        check([each.embedding for each in means], model.expected["mean"])
        assert not any(each.cached_tokens for each in means)
        both = vectors(llm, PROMPTS * 2, [LAST] * len(PROMPTS) + [MEAN] * len(PROMPTS))
        check(both, model.expected["last"] + model.expected["mean"])
        assert_nothing_is_held(llm)


def test_cut_and_normalised(embedder: LLM) -> None:
    (whole,) = vectors(embedder, PROMPTS[2], LAST)
    (unit,) = vectors(embedder, PROMPTS[2])
    (cut,) = vectors(embedder, PROMPTS[2], replace(LAST, dimensions=5))
    (both,) = vectors(embedder, PROMPTS[2], PoolingParams(dimensions=5))
    assert np.linalg.norm(whole) != pytest.approx(1, abs=0.1)
    np.testing.assert_allclose(unit, whole / np.linalg.norm(whole), atol=1e-6)
    np.testing.assert_array_equal(cut, whole[:5])
    np.testing.assert_allclose(both, whole[:5] / np.linalg.norm(whole[:5]), atol=1e-6)


def test_a_checkpoint_states_its_pooling(embedder: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM#15929: vectors of a model that wants the mean were the last token's."""
    asked = replace(MEAN, normalize=True)
    (mean,) = vectors(embedder, PROMPTS[2], asked)
    stated = vars(embedder.engine.settled.checkpoint)
    monkeypatch.setitem(stated, "pooling", "mean")
    np.testing.assert_array_equal(vectors(embedder, PROMPTS[2])[0], mean)
    assert not np.allclose(vectors(embedder, PROMPTS[2], LAST)[0], mean, atol=0.01)
    monkeypatch.setitem(stated, "pooling", "cls")
    with pytest.raises(RequestError, match="pools embeddings by cls"):
        embed(embedder, PROMPTS[2], PoolingParams(dimensions=5))
    np.testing.assert_array_equal(vectors(embedder, PROMPTS[2], asked)[0], mean)


def test_texts_and_ids(embedder: LLM) -> None:
    text = "Hello you"
    by_text, by_ids = embed(embedder, [text, embedder.get_tokenizer().encode(text)])
    assert (by_text.prompt, by_ids.prompt) == (text, None)
    assert by_text.prompt_token_ids == by_ids.prompt_token_ids
    np.testing.assert_array_equal(by_text.embedding, by_ids.embedding)
    assert (by_text.finish_reason, by_text.message) == ("stop", "")
    assert by_text.paths == [("eager", 1)]
    assert embed(embedder, []) == []


def test_prompts_up_to_the_context(folder: Path) -> None:
    with make_llm(folder, max_model_len=64, max_total_tokens=64) as llm:
        assert embed(llm, ids(1, 64))[0].finish_reason == "stop"
        with pytest.raises(RequestError, match="context length is 64 tokens"):
            embed(llm, ids(1, 65))


@pytest.mark.parametrize(
    ("prompts", "params", "told"),
    [
        ([[1], []], None, "Prompt 1: The prompt is empty"),
        ([[1], [VOCAB]], None, f"Prompt 1: The prompt holds token id {VOCAB}"),
        ([[1]], PoolingParams(dimensions=HIDDEN + 1), f"dimensions is {HIDDEN + 1}"),
        ([[1]], "mean", "pooling_params is 'mean'"),
        ([[1]], SamplingParams(), "pooling_params is SamplingParam"),
        ([[1]], [LAST, MEAN], "1 prompts came with 2 pooling params"),
        ([[1]], [SamplingParams()], "Prompt 0: its pooling params are SamplingParam"),
        (5, None, "prompts is 5"),
    ],
)
def test_bad_requests_are_refused(embedder: LLM, prompts: Any, params: Any, told: str) -> None:
    before = embedder.stats().get("steps", 0)
    with pytest.raises(RequestError) as caught:
        embed(embedder, prompts, params)
    assert told in str(caught.value)
    assert embedder.stats().get("steps", 0) == before


def test_numbers_that_are_not_finite_are_an_error(folder: Path) -> None:
    with make_llm(folder, chunked_prefill_size=16) as llm:
        norm = llm.engine.worker.runner.model.model.norm
        weights = norm.weight.detach().clone()
        norm.weight.data[3] = float("nan")
        for params in (LAST, MEAN):
            (output,) = embed(llm, ids(1, 40), params)
            assert (output.embedding, output.finish_reason) == (None, "error")
            assert "no finite hidden states" in output.message
        assert not llm.stats()["pages_cached"]
        norm.weight.data.copy_(weights)
        assert embed(llm, ids(1, 40))[0].cached_tokens == 0
        assert_nothing_is_held(llm)
