"""/v1/embeddings: what reaches the engine, and what comes out of it."""

import base64
from collections.abc import AsyncGenerator, Callable
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine
from starlette.testclient import TestClient

from headrace.base.errors import RequestError
from headrace.request.messages import Delta, Submit
from headrace.request.outcome import Finished
from headrace.request.pooling_params import PoolingParams
from headrace.serving.app import make_app
from headrace.serving.service import Service

ROUTE = "/v1/embeddings"
HELLO = [39, 68, 75]  # "Hel"
THIRD = float(np.float32(1 / 3))


class EmbeddingEngine(FakeEngine):
    """The vector of a prompt is its length, then a third, then minus its first id."""

    async def generate(self, submit: Submit) -> AsyncGenerator[Delta, None]:
        if (refusal := self.refuse(submit)) is not None:
            raise refusal
        self.submits.append(submit)
        ids = submit.prompt_token_ids
        yield Delta(submit.request_id, prompt_tokens=len(ids))
        vector = np.array([len(ids), 1 / 3, -ids[0]], "<f4").tobytes()
        yield Delta(
            submit.request_id,
            finished=self.finished,
            prompt_tokens=len(ids),
            cached_tokens=1,
            paths=[("eager", 1)],
            embedding=vector if self.finished.reason == "stop" else None,
        )


@pytest.fixture
def engine() -> EmbeddingEngine:
    return EmbeddingEngine()


def post(http: TestClient, **body: Any) -> Any:
    answer = http.post(ROUTE, json={"input": "Hel", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(http: TestClient, status: int, **body: Any) -> Any:
    answer = http.post(ROUTE, json={"input": "Hel", **body})
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


def test_a_text_becomes_numbers(http: TestClient, engine: EmbeddingEngine) -> None:
    reply = post(http, user="somebody", encoding_format="float")
    assert reply.pop("id").startswith("embd-")
    assert reply == {
        "object": "list",
        "model": "tiny",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [3, float(np.float32(1 / 3)), -39]}
        ],
        "usage": {
            "prompt_tokens": 3,
            "total_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }
    (submit,) = engine.submits
    assert (submit.prompt_token_ids, submit.prompt_text) == (HELLO, "Hel")
    assert submit.pooling == PoolingParams()


@pytest.mark.parametrize(
    ("given", "ids", "texts"),
    [
        (HELLO, [HELLO], [None]),
        (["He", "l"], [HELLO[:2], HELLO[2:]], ["He", "l"]),
        ([HELLO, [5]], [HELLO, [5]], [None, None]),
    ],
)
def test_forms_of_input(
    http: TestClient, engine: EmbeddingEngine, given: Any, ids: list[list[int]], texts: list[Any]
) -> None:
    reply = post(http, input=given)
    assert [(each.prompt_token_ids, each.prompt_text) for each in engine.submits] == list(
        zip(ids, texts, strict=True)
    )
    shown = [(each["index"], each["embedding"][0]) for each in reply["data"]]
    assert shown == [(place, len(each)) for place, each in enumerate(ids)]
    assert reply["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_base64_is_little_endian_float32(http: TestClient) -> None:
    (entry,) = post(http, encoding_format="base64")["data"]
    numbers = np.frombuffer(base64.b64decode(entry["embedding"]), "<f4")
    np.testing.assert_array_equal(numbers, np.array([3, 1 / 3, -39], np.float32))


def test_options_reach_the_engine(http: TestClient, engine: EmbeddingEngine) -> None:
    asked = {"dimensions": 2, "pooling": "mean", "normalize": False}
    post(http, **asked, priority=3, cache_salt="s", rid="mine")
    (submit,) = engine.submits
    assert submit.pooling == PoolingParams(**asked)
    assert (submit.priority, submit.cache_salt, submit.request_id) == (3, "s", "mine")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [[1], []]}, "input"),
        ({"input": 5}, "input"),
        ({"input": None}, "input"),
        ({"input": ["a", 1.5]}, "input"),
        ({"encoding_format": "float16"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": "7"}, "dimensions"),
        ({"pooling": "cls"}, "pooling"),
        ({"normalize": 1}, "normalize"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ],
)
def test_bad_bodies(
    http: TestClient, engine: EmbeddingEngine, body: dict[str, Any], param: str
) -> None:
    assert refused(http, 400, **body)["param"] == param
    assert not engine.submits


def test_what_the_engine_refuses(http: TestClient, engine: EmbeddingEngine) -> None:
    engine.refuse = lambda submit: RequestError("dimensions is 99", remedy="Allowed: ...")
    error = refused(http, 400, input=["a", "b"], dimensions=99)
    assert (error["param"], "dimensions is 99" in error["message"]) == ("dimensions", True)
    assert refused(http, 404, model="other")["code"] == "model_not_found"


def test_too_many_parts(make_service: Callable[..., Service], engine: EmbeddingEngine) -> None:
    with TestClient(make_app(make_service(max_prompts=2))) as http:
        post(http, input=["a", "b"])
        assert refused(http, 400, input=["a", "b", "c"])["param"] == "input"


def test_endings_that_bring_no_vector(http: TestClient, engine: EmbeddingEngine) -> None:
    engine.finished = Finished("abort", message="the engine was stopped")
    assert "the engine was stopped" in refused(http, 503)["message"]
    engine.finished = Finished("error", message="no finite hidden states")
    assert "no finite hidden states" in refused(http, 500)["message"]


def test_it_is_described_and_recorded(http: TestClient, service: Service) -> None:
    name = post(http, input=["a", "b"])["id"]
    record = service.records[name]
    assert (record.route, record.finishes, record.output_tokens) == (ROUTE, ["stop"] * 2, 0)
    assert not service.in_flight
    assert not service.waiting
    described = http.get("/openapi.json").json()
    (content,) = described["paths"][ROUTE]["post"]["responses"]["200"]["content"].values()
    assert content["schema"]["$ref"].endswith("/EmbeddingList")
    assert "EmbeddingList" in described["components"]["schemas"]
