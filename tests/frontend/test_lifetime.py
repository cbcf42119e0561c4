"""Clients that leave, ids that clash, full queues, slow readers, and an engine that is lost."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shared.messages import AbortReq
from tests.frontend.conftest import Server, eventually, serving

LONG = {"max_new_tokens": 400, "ignore_eos": True}


@pytest.fixture
def slow(tokenizer_folder: Path, tmp_path: Path) -> Iterator[Server]:
    """Two requests at a time, 20 ms a token, and at most three more in the queue."""
    with serving(tokenizer_folder, tmp_path, step_s=0.02, max_running=2, max_queued_requests=3) as running:
        yield running


def raw_post(server: Server, path: str, body: dict[str, Any]) -> socket.socket:
    """Sends a request and leaves the answer unread."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def is_idle(server: Server) -> bool:
    return server.manager.live_requests == 0 and server.engine.counts() == (0, 0)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "a", "sampling_params": LONG}),
        ("/generate", {"text": ["a", "b", "c", "d"], "sampling_params": LONG}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 400, "n": 3}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 400}),
    ],
)
def test_a_client_that_leaves_takes_its_requests_along(
    slow: Server, path: str, body: dict[str, Any], stream: bool
) -> None:
    connection = raw_post(slow, path, {**body, "stream": stream})
    eventually(lambda: slow.engine.counts()[0] > 0)
    connection.close()
    eventually(lambda: is_idle(slow))
    assert slow.engine.open_texts() == 0
    assert slow.post("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 1}}).status_code == 200


def test_a_client_that_leaves_in_mid_stream_or_while_waiting(slow: Server) -> None:
    body = {"text": "a", "sampling_params": LONG, "stream": True}
    running = [raw_post(slow, "/generate", body) for _ in range(2)]
    eventually(lambda: slow.engine.counts() == (2, 0))
    waiting = [raw_post(slow, "/generate", {**body, "stream": stream}) for stream in (True, False)]
    eventually(lambda: slow.engine.counts() == (2, 2))
    for connection in waiting:
        connection.close()
    eventually(lambda: slow.engine.counts() == (2, 0))
    for connection in running:
        while b"data: " not in connection.recv(4096):
            pass
        connection.close()
    eventually(lambda: is_idle(slow))


def test_a_finished_request_is_not_aborted(server: Server) -> None:
    server.engine.received.clear()
    for stream in (True, False):
        body = {"text": "a", "sampling_params": {"max_new_tokens": 5}, "stream": stream}
        assert server.post("/generate", body).status_code == 200
    assert not [message for message in server.engine.received if isinstance(message, AbortReq)]


def test_a_live_id_is_refused_and_its_owner_unharmed(slow: Server) -> None:
    body = {"text": "a", "rid": "x", "sampling_params": {"max_new_tokens": 30, "seed": 1}}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(slow.post, "/generate", body)
        eventually(lambda: slow.manager.live_requests == 1)
        for other in (body, {**body, "text": ["a", "b"], "rid": ["y", "x"]}):
            refused = slow.post("/generate", other)
            assert refused.status_code == 409
            assert refused.json()["error"]["param"] == "rid"
        answer = first.result().json()
    assert answer["meta_info"]["id"] == "x"
    assert answer["meta_info"]["completion_tokens"] == 30
    assert slow.post("/generate", body).json()["output_ids"] == answer["output_ids"]


def test_a_full_queue_is_a_503_however_fast_they_come(slow: Server) -> None:
    body = {"text": "a", "sampling_params": {"max_new_tokens": 20}}
    with ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(lambda _: slow.post("/generate", body), range(40)))
    statuses = [answer.status_code for answer in answers]
    assert statuses.count(200) >= 5
    assert set(statuses) == {200, 503}
    refused = next(answer for answer in answers if answer.status_code == 503)
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["code"] == "queue_full"
    eventually(lambda: is_idle(slow))
    assert slow.post("/generate", body).status_code == 200


def test_the_queue_takes_exactly_its_limit(slow: Server) -> None:
    body = {"text": "a", "sampling_params": LONG, "stream": True}
    connections = [raw_post(slow, "/generate", body) for _ in range(5)]
    eventually(lambda: slow.engine.counts() == (2, 3))
    assert slow.post("/generate", body).status_code == 503
    assert slow.client.get("/health_generate").json() == {"status": "busy"}
    connections.pop().close()
    eventually(lambda: slow.engine.counts() == (2, 2) and slow.manager.live_requests == 4)
    connections.append(raw_post(slow, "/generate", body))
    eventually(lambda: slow.engine.counts() == (2, 3))
    for connection in connections:
        connection.close()
    eventually(lambda: is_idle(slow))


def test_a_batch_that_can_never_fit_is_a_400(slow: Server) -> None:
    answer = slow.post("/v1/completions", {"prompt": "a", "n": 6, "max_tokens": 1})
    assert answer.status_code == 400
    assert "--max-queued-requests" in answer.json()["error"]["message"]
    assert slow.post("/v1/completions", {"prompt": "a", "n": 5, "max_tokens": 1}).status_code == 200


def test_a_prompt_above_the_pool_is_a_400_at_once_and_blocks_nothing(tokenizer_folder: Path, tmp_path: Path) -> None:
    with serving(tokenizer_folder, tmp_path, capacity=100, context_length=400) as server:
        refused = server.post("/v1/completions", {"prompt": "a" * 150})
        assert refused.status_code == 400
        assert "150" in refused.json()["error"]["message"] and "100" in refused.json()["error"]["message"]
        assert server.engine.requests() == []
        clipped = server.post("/v1/completions", {"prompt": "a" * 60, "max_tokens": 300}).json()
        assert clipped["choices"][0]["finish_reason"] == "length"
        assert clipped["usage"]["completion_tokens"] == 40


@pytest.mark.parametrize("order", [{"rid": "x"}, {"abort_all": True}])
def test_abort_request(slow: Server, order: dict[str, Any]) -> None:
    body = {"text": "a", "rid": "x", "sampling_params": LONG}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(slow.post, "/generate", body)
        eventually(lambda: slow.engine.counts() == (1, 0))
        assert slow.post("/abort_request", {"rid": "unknown"}).status_code == 200
        assert slow.post("/abort_request", order).status_code == 200
        answer = running.result()
    assert answer.status_code == 200
    assert answer.json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert is_idle(slow)


def test_a_reader_that_stops_costs_no_more_than_its_own_output(tokenizer_folder: Path, tmp_path: Path) -> None:
    with serving(tokenizer_folder, tmp_path, step_s=0.0, context_length=6000, capacity=100_000) as server:
        body = {"text": "a", "sampling_params": {"max_new_tokens": 3000}, "stream": True, "rid": "stalled"}
        connection = raw_post(server, "/generate", body)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        ordinary = server.post("/generate", {"text": "b", "sampling_params": {"max_new_tokens": 50}})
        assert ordinary.json()["meta_info"]["completion_tokens"] == 50
        eventually(lambda: server.manager.live_requests == 0)
        received = b""
        while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            received += connection.recv(2**20)
        connection.close()
        chunks = received.count(b"data: {")
        last = json.loads(received[received.rindex(b"data: {") + 6 :].split(b"\n")[0])
        assert last["meta_info"]["completion_tokens"] == len(last["output_ids"]) == 3000
        assert chunks < 3000


def test_a_lost_engine_ends_every_request_with_an_error(slow: Server) -> None:
    plain = {"text": "a", "sampling_params": LONG}
    streamed: list[str] = []

    def read_stream() -> None:
        with slow.client.stream("POST", "/generate", json={**plain, "stream": True}) as response:
            streamed.extend(line for line in response.iter_lines() if line)

    reader = threading.Thread(target=read_stream)
    reader.start()
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(slow.post, "/generate", plain)
        eventually(lambda: slow.engine.counts() == (2, 0))
        slow.loop.call_soon_threadsafe(slow.manager.fail_all, "rank 1 died")
        assert whole.result().status_code == 503
        reader.join()
    assert json.loads(streamed[-1].removeprefix("data: "))["error"]["message"] == "rank 1 died"
    for response in (slow.post("/generate", plain), slow.client.get("/health")):
        assert response.status_code == 503
        assert response.json()["error"]["message"] == "rank 1 died"
    assert slow.manager.live_requests == 0


def test_outputs_that_cannot_be_read_are_an_error_not_a_silence(slow: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(message: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(slow.manager, "_process", fail)
    response = slow.post("/generate", {"text": "a", "sampling_params": LONG})
    assert response.status_code == 503
    assert slow.client.get("/health").status_code == 503


def test_an_idle_connection_outlives_a_pool(server: Server) -> None:
    from shared.frontend.app import KEEP_ALIVE_S, create_app, serve_config

    app = create_app(server.manager, server.manager.server_args, list)
    assert serve_config(app, server.manager.server_args).timeout_keep_alive == KEEP_ALIVE_S >= 75
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
    connection.connect()
    connection.auto_open = 0  # type: ignore[attr-defined]  # a closed connection is an error, not opened again
    for idle_s in (0, 6):  # uvicorn's own setting would close it after 5
        time.sleep(idle_s)
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200
    connection.close()
