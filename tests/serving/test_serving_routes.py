"""The small routes: health, models, tokens, information, abort; and what /openapi.json says."""

import asyncio

import pytest
from asgi import Exchange
from starlette.testclient import TestClient

from headrace.base.errors import EngineDeadError
from headrace.serving.app import make_app
from headrace.serving.records import log_record
from headrace.serving.routes import health


def test_health_says_the_state(http, engine, service) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    for state in ("starting", "draining", "dead"):
        engine.state, engine.death = state, "killed" if state == "dead" else ""
        answer = http.get("/health")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == state
    assert "killed" in answer.json()["error"]["message"]
    engine.state, engine.death = "ready", ""
    service.is_draining = True
    assert http.get("/health").status_code == 503
    assert http.get("/ping").status_code == 200


def test_an_engine_that_hangs_is_told_until_it_shows_life(http, engine, service) -> None:
    engine.silent_seconds = service.config.stall_seconds + 1
    for answer in (http.get("/health"), http.post("/v1/completions", json={"prompt": "a"})):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "stalled")
        assert "no life for 301 s" in answer.json()["error"]["message"]
    assert 'headrace:up{model_name="tiny"} 0.0' in http.get("/metrics").text
    engine.silent_seconds = 0.0
    assert http.get("/health").json() == {"status": "ok"}
    assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/below/v1/completions"])
def test_a_path_is_found_with_and_without_the_proxys_part(make_service, engine, path) -> None:
    with TestClient(make_app(make_service(root_path="/below"))) as http:
        assert http.post(path, json={"prompt": "a"}).json()["choices"]
        refused = http.post(path, json={"prompt": "a", "temperature": -1})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")
        engine.refuse = lambda submit: EngineDeadError("The engine is dead")
        assert http.post(path, json={"prompt": "a"}).status_code == 503


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_heads_are_answered(http, engine, path) -> None:
    """Some load balancers ask so."""
    answer = http.head(path)
    assert (answer.status_code, answer.content) == (200, b"")
    engine.state = "dead"
    assert http.head("/health").status_code == 503


def test_before_the_engine_is_there(http, service) -> None:
    service.engine = service.tokenizer = None
    assert http.get("/health").status_code == 503
    for method, path, body in (
        ("GET", "/v1/models", None),
        ("GET", "/health_generate", None),
        ("GET", "/server_info", None),
        ("GET", "/explain", None),
        ("POST", "/v1/completions", {"prompt": "a"}),
        ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("POST", "/generate", {"text": "a"}),
        ("POST", "/tokenize", {"prompt": "a"}),
    ):
        answer = http.request(method, path, json=body)
        assert answer.status_code == 503, path
        assert answer.json()["error"]["code"] == "starting"
        assert int(answer.headers["retry-after"]) > 0


def test_health_generate_makes_a_token(http, engine, monkeypatch) -> None:
    assert http.get("/health_generate").json() == {"status": "ok"}
    (probe,) = engine.submits
    assert (probe.params.max_tokens, probe.prompt_token_ids) == (1, [257])
    engine.refuse = lambda submit: EngineDeadError("The engine is dead")
    assert http.get("/health_generate").status_code == 503
    engine.refuse = lambda submit: None
    engine.words = []
    assert http.get("/health_generate").status_code == 503
    engine.hold = asyncio.Event()
    monkeypatch.setattr(health, "GENERATE_SECONDS", 0.05)
    assert "No token" in http.get("/health_generate").json()["error"]["message"]
    assert len(engine.aborted) == 2  # left after its first token, and when it took too long


def test_models(make_service) -> None:
    service = make_service(served_model_name="first, second")
    with TestClient(make_app(service)) as http:
        listed = http.get("/v1/models").json()
        assert listed["object"] == "list"
        assert [each["id"] for each in listed["data"]] == ["first", "second"]
        assert listed["data"][0]["max_model_len"] == 1024
        assert http.get("/v1/models/second").json() == listed["data"][1]
        assert http.get("/v1/models/third").status_code == 404
        for name, answered in (("second", "second"), ("default", "first"), (None, "first")):
            reply = http.post("/v1/completions", json={"prompt": "a", "model": name}).json()
            assert reply["model"] == answered


def test_a_models_name_may_hold_slashes(make_service) -> None:
    with TestClient(make_app(make_service(served_model_name="owner/name"))) as http:
        assert http.get("/v1/models/owner/name").json()["id"] == "owner/name"
        assert http.get("/v1/models/").json() == http.get("/v1/models").json()


def test_tokenize(http) -> None:
    for path in ("/tokenize", "/v1/tokenize"):
        reply = http.post(path, json={"prompt": "Hel"}).json()
        assert reply == {"tokens": [39, 68, 75], "count": 3, "max_model_len": 1024}
    reply = http.post("/tokenize", json={"prompt": ["H", "el"], "return_token_strs": True}).json()
    assert reply["tokens"] == [[39], [68, 75]]
    assert reply["count"] == [1, 2]
    assert reply["token_strs"] == [["H"], ["e", "l"]]
    messages = [{"role": "user", "content": "H"}]
    reply = http.post("/tokenize", json={"messages": messages}).json()
    assert reply["count"] == len("<user>H") + 1 + len("<assistant>")
    both = {"prompt": "a", "messages": messages}
    odd = {"messages": messages, "temperature": "hot"}
    for body in ({}, both, {"prompt": 5}, {"messages": []}, odd):
        assert http.post("/tokenize", json=body).status_code == 400


def test_detokenize(http) -> None:
    for path in ("/detokenize", "/v1/detokenize"):
        reply = http.post(path, json={"tokens": [39, 68, 75]}).json()
        assert reply == {"text": "Hel", "prompt": "Hel"}
    assert http.post("/detokenize", json={"tokens": [[39], [68]]}).json()["text"] == ["H", "e"]
    assert http.post("/detokenize", json={"tokens": []}).json()["text"] == ""
    assert http.post("/detokenize", json={"tokens": [257]}).json()["text"] == "</s>"
    body = {"tokens": [257], "skip_special_tokens": True}
    assert http.post("/detokenize", json=body).json()["text"] == ""
    for tokens in ([-1], [272], [2**70], ["a"], "a", [[1], 2]):
        assert http.post("/detokenize", json={"tokens": tokens}).status_code == 400


def test_long_texts_are_tokenised_beside_the_loop(http) -> None:
    reply = http.post("/tokenize", json={"prompt": "a" * 5000}).json()
    assert reply["count"] == 5000
    answer = http.post("/detokenize", json={"tokens": reply["tokens"]})
    assert answer.json()["text"] == "a" * 5000


def test_information(make_service) -> None:
    secret = {"api_key": "s3cret", "admin_api_key": "s3cret too"}
    with TestClient(make_app(make_service(**secret))) as http:
        http.headers["authorization"] = "Bearer s3cret"
        for path in ("/model_info", "/get_model_info"):
            told = http.get(path).json()
            assert told["model_path"] == "/models/tiny"
            assert told["preferred_sampling_params"]["temperature"] == 0.5
            assert told["is_generation"] is True
        for path in ("/server_info", "/get_server_info"):
            answer = http.get(path)
            told = answer.json()
            assert "s3cret" not in answer.text
            assert told["model"] == "tiny"
            assert told["server"]["max_queued_requests"] == 1024
            assert told["internal_states"][0]["waiting"] == 2
            assert told["sampling_defaults"] == "sampling_defaults = {...}"


def test_explain(http, engine, service) -> None:
    told = http.get("/explain").json()
    assert told["name"] == "explain"
    assert [decision["name"] for decision in told["serving"]] == [
        "tool_call_parser",
        "reasoning_parser",
        "stream_tool_arguments",
    ]
    name = http.post("/v1/completions", json={"prompt": "a", "n": 2}).json()["id"]
    told = http.get("/explain", params={"request": name}).json()
    assert told["paths"] == [
        {"choice": 0, "runs": [["eager", 3]]},
        {"choice": 1, "runs": [["eager", 3]]},
    ]
    assert (told["output_tokens"], told["finish_reasons"]) == (18, ["stop", "stop"])
    assert http.get("/explain", params={"request": "nope"}).status_code == 404


def test_records_are_bounded(http, service, monkeypatch) -> None:
    monkeypatch.setattr("headrace.serving.service.REMEMBERED_RECORDS", 3)
    names = [http.post("/generate", json={"text": "a"}).json()["meta_info"]["id"] for _ in range(5)]
    assert list(service.records) == names[-3:]


def test_observers_hear_of_each_request(http, service, caplog) -> None:
    heard = []
    service.observers += [heard.append, log_record]
    caplog.set_level("INFO", logger="headrace")
    http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "secret"}]})
    (record,) = heard
    assert (record.route, record.prompt_tokens, record.output_tokens) == (
        "/v1/chat/completions",
        24,
        9,
    )
    assert record.seconds >= record.seconds_to_first_token >= 0
    (line,) = [each.message for each in caplog.records if "prompt=24" in each.message]
    assert "output=9" in line
    assert "finish=stop" in line
    assert "paths=eager:3" in line
    assert "secret" not in caplog.text


@pytest.mark.parametrize("route", ["/v1/completions", "/generate"])
def test_a_request_is_aborted_by_its_id(make_service, engine, route) -> None:
    service = make_service()
    app = make_app(service)

    async def test() -> None:
        engine.hold = asyncio.Event()
        call = Exchange(app, route, {"prompt": ["a", "b"], "text": ["a", "b"], "rid": "mine"})
        if route == "/generate":
            call = Exchange(app, route, {"text": "a", "rid": "mine"})
        running = asyncio.create_task(call.run())
        await call.until(lambda: "mine" in service.in_flight)
        abort = Exchange(app, "/abort_request", {"rid": "mine"})
        await abort.run()
        assert '"aborted":["mine"]' in abort.text
        expected = ["mine/0", "mine/1"] if route == "/v1/completions" else ["mine"]
        assert engine.aborted == expected
        engine.hold.set()
        await running

    asyncio.run(test())


def test_aborting_what_is_not_there_is_no_error(http, engine) -> None:
    for _ in range(2):
        answer = http.post("/abort_request", json={"rid": "nope"})
        assert answer.json() == {"success": True, "aborted": []}
    assert http.post("/abort_request", json={}).status_code == 400
    assert http.post("/abort_request", json={"abort_all": True}).status_code == 403
    assert engine.aborted == []


def test_the_description_is_whole(http) -> None:
    described = http.get("/openapi.json").json()
    schemas = described["components"]["schemas"]

    def check(part) -> None:
        if isinstance(part, dict):
            reference = part.get("$ref")
            if reference is not None:
                assert reference.removeprefix("#/components/schemas/") in schemas
            for each in part.values():
                check(each)
        elif isinstance(part, list):
            for each in part:
                check(each)

    check(described)
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            assert "422" not in operation["responses"], (method, path)
            assert {"200", "4XX", "5XX"} <= set(operation["responses"]), (method, path)
    assert "ChatCompletion" in schemas
    assert described["paths"]["/v1/completions"]["post"]["requestBody"]


def test_an_engine_that_hangs_is_told_of(http: TestClient, engine, monkeypatch) -> None:
    async def hang(name: str, **arguments: object) -> dict:
        await asyncio.sleep(60)
        raise AssertionError

    monkeypatch.setattr(engine, "control", hang)
    monkeypatch.setattr("headrace.serving.service.CONTROL_SECONDS", 0.05)
    answer = http.get("/explain")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "slow"


@pytest.mark.parametrize(
    ("route", "field", "status"),
    [
        ("/v1/completions", "prompt", 400),
        ("/v1/embeddings", "input", 400),
        ("/generate", "text", 400),
        ("/tokenize", "prompt", 200),
    ],
)
def test_many_texts_leave_room_for_what_others_ask(service, route, field, status) -> None:
    """A thousand of them held /health up for seconds. Those that are prompts run into a bound."""
    texts = ["a"] * 200 + ["a" * 2000]

    async def test() -> int:
        asking, turns = asyncio.create_task(call.run()), 0
        while not asking.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    call = Exchange(make_app(service), route, {field: texts})
    assert asyncio.run(test()) > 200
    assert call.status == status
