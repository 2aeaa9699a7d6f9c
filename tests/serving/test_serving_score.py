"""/v1/score: probabilities of tokens behind items and likeness of texts are the engine's."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from running_server import RunningServer

from headrace import LLM, SamplingParams

LABELS = [5, 99, 7]
ITEMS = ["good", "bad and ugly", ""]


@pytest.fixture(scope="module")
def http(tiny_folder: Path) -> Iterator[httpx2.Client]:
    server = RunningServer(tiny_folder, "--context-length", "128")
    with httpx2.Client(base_url=server.url, timeout=30) as made:
        yield made
    server.kill()


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> Iterator[LLM]:
    with LLM(str(tiny_folder), load_format="dummy", device="cpu", dtype="float32") as made:
        yield made


def scored(http: httpx2.Client, path: str = "/v1/score", **fields: Any) -> dict[str, Any]:
    answer = http.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("item_first", [False, True])
def test_probabilities_are_those_of_the_next_token(http, llm: LLM, item_first: bool) -> None:
    prompts = [item + "Is it?" if item_first else "Is it?" + item for item in ITEMS]
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0, logprob_token_ids=LABELS)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    entries = [output.outputs[0].logprobs[0] for output in outputs]
    expected = [[math.exp(entry[label].logprob) for label in LABELS] for entry in entries]
    asked = {"query": "Is it?", "items": ITEMS, "label_token_ids": LABELS, "item_first": item_first}
    reply = scored(http, **asked)
    np.testing.assert_allclose(reply["scores"], expected, rtol=1e-4)
    assert reply["usage"]["prompt_tokens"] == sum(
        len(output.prompt_token_ids) for output in outputs
    )
    shares = np.array(scored(http, "/score", **asked, apply_softmax=True)["scores"])
    np.testing.assert_allclose(shares.sum(1), 1.0)
    rows = np.array(expected)
    np.testing.assert_allclose(shares, rows / rows.sum(1, keepdims=True), rtol=1e-4)


def test_ids_are_joined_as_texts_are(http) -> None:
    asked = {"query": [39, 68], "items": [[75, 75], [78]], "label_token_ids": LABELS}
    behind = scored(http, **asked)["scores"]
    joined = scored(http, query=[39], items=[[68, 75, 75], [68, 78]], label_token_ids=LABELS)
    np.testing.assert_allclose(behind, joined["scores"], rtol=1e-4)


def test_texts_are_compared_by_their_embeddings(http, llm: LLM) -> None:
    first, others = "Hello", ["Hello", "Good day", "Farewell"]
    vectors = [each.embedding for each in llm.embed([first, *others], use_tqdm=False)]
    expected = [float(np.dot(vectors[0], vector)) for vector in vectors[1:]]
    reply = scored(http, text_1=first, text_2=others)
    assert [entry["index"] for entry in reply["data"]] == [0, 1, 2]
    np.testing.assert_allclose([entry["score"] for entry in reply["data"]], expected, atol=2e-5)
    assert reply["data"][0]["score"] == pytest.approx(1.0, abs=1e-5)
    pairs = scored(http, text_1=[first, "Good day"], text_2=["Farewell", "Good day"])["data"]
    assert pairs[0]["score"] == pytest.approx(expected[2], abs=2e-5)
    assert pairs[1]["score"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({}, "none of them"),
        ({"query": "a", "items": ["b"]}, "here are query, items"),
        ({"query": "a", "items": ["b"], "label_token_ids": []}, "label_token_ids is empty"),
        ({"query": "a", "items": [[1]], "label_token_ids": [1]}, "both be texts"),
        ({"query": "a", "items": ["b"], "label_token_ids": [999]}, "label_token_ids is 999"),
        ({"query": "a", "items": ["b"], "label_token_ids": [-1]}, "label_token_ids is -1"),
        ({"query": "a", "items": ["b"], "label_token_ids": [1], "text_1": "c"}, "text_1"),
        ({"text_1": ["a", "b"], "text_2": ["c"]}, "text_1 has 2 texts and text_2 1"),
        ({"text_1": "a", "text_2": ["c"] * 2000}, "2001 texts"),
        ({"query": [[1]], "items": ["b"], "label_token_ids": [1]}, "query: "),
        ({"text_1": "a", "text_2": "b" * 200}, "The prompt has 200 tokens"),
    ],
)
def test_what_cannot_be_scored_is_refused(http, body: dict[str, Any], told: str) -> None:
    answer = http.post("/v1/score", json=body)
    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]


@pytest.mark.parametrize(("query", "item"), [("a" * 20_000, "b"), ([1] * 20_000, [2])])
def test_a_small_body_does_not_make_large_prompts(http, query: Any, item: Any) -> None:
    """Each item would hold the query again: 20 million characters or ids of a body of 60 KB."""
    body = {"query": query, "items": [item] * 1000, "label_token_ids": [1]}
    answer = http.post("/v1/score", json=body)
    assert answer.status_code == 413
    assert "20,001,000 characters or ids" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "items"
