"""Keys, admin routes, request ids, origins."""

import pytest
from starlette.testclient import TestClient

from headrace.base.errors import RequestError
from headrace.serving.app import make_app

ADMIN = (
    ("GET", "/flush_cache"),
    ("POST", "/flush_cache"),
    ("POST", "/start_profile"),
    ("POST", "/stop_profile"),
)
GUARDED = (
    "/v1/models",
    "/model_info",
    "/server_info",
    "/explain",
    "/openapi.json",
    "/health_generate",
)


def client(make_service, **options) -> TestClient:
    return TestClient(make_app(make_service(**options)), raise_server_exceptions=False)


def with_key(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_the_key_is_asked_for(make_service) -> None:
    http = client(make_service, api_key="right")
    for path in GUARDED:
        for headers in ({}, with_key("wrong"), with_key(""), {"authorization": "right"}):
            answer = http.get(path, headers=headers)
            assert answer.status_code == 401, path
            assert answer.json()["error"]["type"] == "authentication_error"
            assert answer.headers["www-authenticate"] == "Bearer"
        assert http.get(path, headers=with_key("right")).status_code == 200, path
    body = {"prompt": "a"}
    assert http.post("/v1/completions", json=body).status_code == 401
    assert http.post("/v1/completions", json=body, headers=with_key("right")).status_code == 200


def test_a_key_may_be_any_text(make_service) -> None:
    http = client(make_service, api_key="schlüssel")
    headers = {"authorization": "Bearer schlüssel".encode()}
    assert http.get("/v1/models", headers={"authorization": b"Bearer \xff\xfe"}).status_code == 401
    assert http.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ping", "/version"])
def test_health_is_open(make_service, path) -> None:
    assert client(make_service, api_key="right").get(path).status_code == 200


def test_without_a_key_all_may_ask(http) -> None:
    assert http.get("/v1/models").status_code == 200


@pytest.mark.parametrize(("method", "path"), ADMIN)
def test_admin_routes_are_off(make_service, engine, method, path) -> None:
    for options in ({}, {"api_key": "right"}):
        answer = client(make_service, **options).request(method, path, headers=with_key("right"))
        assert answer.status_code == 403
        assert "--admin-api-key" in answer.json()["error"]["message"]
    assert not engine.controls


@pytest.mark.parametrize(("method", "path"), ADMIN)
def test_admin_routes_take_the_admin_key(make_service, engine, method, path) -> None:
    http = client(make_service, api_key="right", admin_api_key="admin")
    assert http.request(method, path, headers=with_key("right")).status_code == 403
    assert http.request(method, path).status_code == 401
    answer = http.request(method, path, headers=with_key("admin"))
    assert answer.status_code == 200
    assert answer.json()["success"] is True
    assert engine.controls[-1][0] == path.strip("/")


def test_the_admin_may_ask_too(make_service) -> None:
    http = client(make_service, api_key="right", admin_api_key="admin")
    assert http.get("/v1/models", headers=with_key("admin")).status_code == 200


def test_admin_routes_can_be_opened(make_service, engine) -> None:
    http = client(make_service, enable_admin=True)
    assert http.get("/flush_cache").status_code == 200
    body = {"output_dir": "/somewhere", "num_steps": 3}
    assert http.post("/start_profile", json=body).status_code == 200
    assert engine.controls[-1] == ("start_profile", {"folder": "/somewhere", "steps": 3})
    assert http.post("/start_profile", json={"activities": ["MEM"]}).status_code == 400
    staged = body | {"profile_by_stage": True, "with_stack": True, "profile_prefix": "mine-"}
    assert http.post("/start_profile", json=staged).status_code == 200
    assert engine.controls[-1][1] == {
        "folder": "/somewhere",
        "steps": 3,
        "stages": ["prefill", "decode"],
        "with_stack": True,
        "prefix": "mine-",
    }
    assert http.post("/start_profile", json={"profile_prefix": "../a"}).status_code == 400
    engine.control_error = RequestError("The prefix cache cannot be flushed now")
    assert http.get("/flush_cache").status_code == 400


def test_a_request_is_known_by_the_id_it_brought(http) -> None:
    assert http.get("/ping", headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"
    for odd in ("", "a" * 200, "ä"):
        headers = {"x-request-id": odd.encode("latin-1")}
        given = http.get("/ping", headers=headers).headers["x-request-id"]
        assert len(given) == 32
    assert http.get("/nosuch", headers={"x-request-id": "e"}).headers["x-request-id"] == "e"


def test_origins(make_service) -> None:
    page = {"origin": "https://page.test"}
    http = client(make_service, cors_origins="https://page.test, https://other.test", api_key="k")
    asked = {**page, "access-control-request-method": "POST"}
    answer = http.options("/v1/completions", headers=asked)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://page.test"
    refused = http.post("/v1/completions", json={"prompt": "a"}, headers=page)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://page.test"
    other = http.options("/v1/completions", headers={**asked, "origin": "https://no.test"})
    assert "access-control-allow-origin" not in other.headers
    assert (
        "access-control-allow-origin" not in client(make_service).get("/ping", headers=page).headers
    )
