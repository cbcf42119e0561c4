"""The API key, health, metrics, information and control routes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

from shared.frontend import admin
from shared.frontend.app import create_app
from shared.messages import AbortReq
from tests.frontend.conftest import Server, eventually, serving

KEY = "the key"


@pytest.fixture(scope="module")
def guarded(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tokenizer_folder, tmp_path_factory.mktemp("run"), api_key=KEY) as running:
        yield running


def metrics_of(server: Server) -> dict[str, float]:
    """Sums over labels, by sample name."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(server.client.get("/metrics").text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def requests_of_all_routes(server: Server) -> list[tuple[str, str]]:
    app = create_app(server.manager, server.manager.server_args, list)
    routes = [route for route in app.routes if isinstance(route, Route)]
    found = [(method, route.path) for route in routes for method in route.methods or ()]
    assert len(routes) == len(app.routes) >= 12
    paths = {path for _, path in found}
    assert {"/docs", "/openapi.json", "/metrics", "/flush_cache", "/abort_request", "/generate"} <= paths
    extra = ["//v1/models", "/v1/models/", "/no-such", "/health/", "//health", "/health%2f..", "/HEALTH"]
    found += [(method, path) for path in extra for method in ("GET", "HEAD", "OPTIONS", "POST")]
    return [one for one in found if one[1] != "/health"]


@pytest.mark.parametrize("header", [None, "Bearer", KEY, f"Basic {KEY}", "Bearer wrong", f"Bearer {KEY}x", "Bearer é"])
def test_without_the_key_every_route_is_a_401_and_nothing_runs(guarded: Server, header: str | None) -> None:
    guarded.engine.received.clear()
    headers = {} if header is None else {b"authorization": header.encode()}
    with httpx.Client(base_url=guarded.url, headers=headers) as client:
        for method, path in requests_of_all_routes(guarded):
            response = client.request(method, path, content=b'{"text": "a", "abort_all": true}')
            assert response.status_code == 401, (method, path)
            assert response.headers["www-authenticate"] == "Bearer"
        assert client.get("/health").status_code == 200
    assert guarded.engine.received == []


def test_with_the_key_routes_answer(guarded: Server) -> None:
    for path in ("/v1/models", "/metrics", "/get_server_info", "/docs", "/health_generate"):
        assert guarded.client.get(path).status_code == 200
    assert guarded.client.get("/no-such").status_code == 404
    assert guarded.client.get("/generate").status_code == 405
    assert guarded.post("/generate", {"text": "a"}).status_code == 200
    lower = httpx.get(f"{guarded.url}/v1/models", headers={"authorization": f"bearer {KEY}"})
    assert lower.status_code == 200


def test_server_info_shows_flags_processes_and_queues_but_no_key(guarded: Server) -> None:
    answer = guarded.client.get("/get_server_info")
    assert KEY not in answer.text
    info = answer.json()
    assert info["process_tree"] == [{"role": "main", "pid": 1}]
    assert info["max_total_num_tokens"] == 1000
    assert info["context_length"] == 512
    assert (info["running_requests"], info["waiting_requests"]) == (0, 0)
    assert info["internal_states"][0]["free_tokens"] == 1000
    assert info["chunked_prefill_size"] == 2048


def test_errors_of_the_router_have_openai_s_shape(server: Server) -> None:
    for response in (server.client.get("/no-such"), server.client.delete("/generate")):
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_health_while_the_engine_is_busy(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tokenizer_folder, tmp_path) as server:
        assert server.client.get("/health_generate").json() == {"status": "ok"}
        server.engine.hung.set()
        monkeypatch.setattr(admin, "PROBE_TIMEOUT_S", 0.2)
        idle = server.client.get("/health_generate")
        assert idle.status_code == 503
        body = {"text": ["a"] * 20, "sampling_params": {"max_new_tokens": 2}}
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(server.post, "/generate", body)
            eventually(lambda: server.manager.live_requests >= 20)
            for _ in range(5):
                assert server.client.get("/health").status_code == 200
                deep = server.client.get("/health_generate")
                assert (deep.status_code, deep.json()) == (200, {"status": "busy"})
            state = server.client.get("/get_server_info")
            assert state.status_code == 200
            assert server.client.get("/flush_cache").status_code == 400
            server.engine.hung.clear()
            assert waiting.result().status_code == 200
        eventually(lambda: server.manager.live_requests == 0 and server.engine.counts() == (0, 0))
        probes = [one for one in server.engine.requests() if one.rid.startswith("health-")]
        aborted = [one for one in server.engine.received if isinstance(one, AbortReq)]
        assert len(probes) == 2
        assert [one.rid for one in aborted] == [probes[1].rid]
        monkeypatch.undo()
        assert server.client.get("/health_generate").json() == {"status": "ok"}


def test_metrics_equal_what_clients_got(tokenizer_folder: Path, tmp_path: Path) -> None:
    with serving(tokenizer_folder, tmp_path, step_s=0.005) as server:
        prompt_tokens = completion_tokens = 0
        for n in (1, 3):
            answer = server.post("/v1/completions", {"prompt": ["hello", "you"], "n": n})
            usage = answer.json()["usage"]
            prompt_tokens += usage["prompt_tokens"]
            completion_tokens += usage["completion_tokens"]
        body = {"text": "a", "rid": "x", "sampling_params": {"max_new_tokens": 400}}
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(server.post, "/generate", body)
            eventually(lambda: metrics_of(server)["process_eras_num_running_reqs"] == 1)
            assert metrics_of(server)["process_eras_token_usage"] > 0
            server.post("/abort_request", {"rid": "x"})
            running.result()
        server.client.get("/health_generate")
        eventually(lambda: metrics_of(server)["process_eras_num_running_reqs"] == 0)
        found = metrics_of(server)
        assert found["process_eras_num_queue_reqs"] == 0
        assert found["process_eras_token_usage"] == 0
        assert found["process_eras_num_requests_total"] == 8
        assert found["process_eras_time_to_first_token_seconds_count"] == 0
        server.post("/v1/completions", {"prompt": ["hello", "you"], "stream": True})
        streamed = metrics_of(server)
        assert streamed["process_eras_time_to_first_token_seconds_count"] == 2
        assert streamed["process_eras_inter_token_latency_seconds_count"] == 2 * 15
        assert found["process_eras_num_aborted_requests_total"] == 1
        assert found["process_eras_prompt_tokens_total"] == prompt_tokens == 16
        assert found["process_eras_generation_tokens_total"] == completion_tokens == 128
        assert found["process_eras_e2e_request_latency_seconds_count"] == 8


def test_flush_cache(server: Server) -> None:
    for method in ("GET", "POST"):
        response = server.client.request(method, "/flush_cache")
        assert response.status_code == 200
        assert response.json()["success"] is True


def test_a_long_prompt_leaves_the_loop_responsive(server: Server) -> None:
    """Tokenized in a thread: another request is answered first."""
    order: list[str] = []
    with ThreadPoolExecutor(1) as pool:

        def ask() -> int:
            status = server.post("/generate", {"text": "the lo " * 100_000}).status_code
            order.append("long")
            return status

        long = pool.submit(ask)
        time.sleep(0.05)
        while not long.done() and not order:
            assert server.client.get("/health").status_code == 200
            order.append("health")
        assert long.result() == 400
    assert order[0] == "health"


def test_neither_process_loads_torch() -> None:
    code = (
        "import sys, shared.frontend.app, shared.detokenizer, shared.weights.tokenizer\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
