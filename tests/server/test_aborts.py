"""A request that nobody waits for any more ends at once and gives everything back (cases C15, C58, C64, C65, C56)."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from bench.sim_reference import SimReference
from tests.server.process import Server, title
from tests.server.streams import FINISHED, Streams

FLAGS = (
    *("--device", "sim", "--sim-decode-ms", "4", "--max-running-requests", "2", "--max-queued-requests", "6"),
    *("--max-total-tokens", "6000", "--context-length", "8000", "--sim-prefill-us-per-token", "10"),
)
LONG = {"max_new_tokens": 1900, "ignore_eos": True, "temperature": 0}
"""About eight seconds on this device: a request that is over sooner was ended."""
GONE_S = 2.0


@pytest.fixture(scope="module")
def server(stage: int) -> Iterator[Server]:
    with Server(stage, *FLAGS) as server:
        yield server


@pytest.fixture(scope="module")
def reference() -> SimReference:
    return SimReference()


@pytest.fixture(autouse=True)
def nothing_is_left(server: Server) -> Iterator[None]:
    """Every test ends with a whole pool, the processes it began with, and a log without a flood."""
    before = [(process.pid, title(process)) for process in server.tree()]
    lines = server.output.count("\n")
    yield
    server.assert_whole(within=GONE_S)
    assert server.info()["live_requests"] == 0
    assert [(process.pid, title(process)) for process in server.tree()] == before
    assert server.output.count("\n") - lines <= 2, server.output


def assert_serves(server: Server, reference: SimReference) -> None:
    """A short request is answered at once, with the text it has alone."""
    asked_at = time.monotonic()
    answer = server.generate(text="A short one", sampling_params={"max_new_tokens": 5, "temperature": 0})
    assert answer["text"] == reference.solo("A short one", 5).text
    assert time.monotonic() - asked_at < GONE_S


def open_request(server: Server, **request: Any) -> socket.socket:
    """Sends `/generate` on a socket of its own and reads nothing."""
    address = urlsplit(server.url)
    body = json.dumps({"text": "On and on", "sampling_params": LONG, **request}).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection((address.hostname, address.port))
    connection.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def read_chunks(connection: socket.socket, count: int) -> None:
    received = b""
    while received.count(b"data: ") < count:
        received += connection.recv(65536)


def wait_for(server: Server, running: int, waiting: int = 0) -> None:
    deadline = time.monotonic() + 30
    while True:
        info = server.info()
        if (info["running_requests"], info["waiting_requests"]) == (running, waiting):
            return
        assert time.monotonic() < deadline, (info["running_requests"], info["waiting_requests"])
        time.sleep(0.02)


@pytest.mark.parametrize("chunks", [3, 0])
def test_two_streams_whose_clients_go_away_end(server: Server, reference: SimReference, chunks: int) -> None:
    connections = [open_request(server, stream=True) for _ in range(2)]
    if chunks:
        for connection in connections:
            read_chunks(connection, chunks)
    else:
        wait_for(server, running=2)
    for connection in connections:
        connection.close()
    server.assert_whole(within=GONE_S)
    assert_serves(server, reference)


def test_a_stream_whose_client_goes_before_anything_is_sent_ends(server: Server, reference: SimReference) -> None:
    for _ in range(2):
        open_request(server, stream=True).close()
    assert_serves(server, reference)


def test_requests_without_a_stream_end_when_their_clients_go(server: Server, reference: SimReference) -> None:
    connections = [open_request(server) for _ in range(2)]
    time.sleep(0.3)
    for connection in connections:
        connection.close()
    server.assert_whole(within=GONE_S)
    assert_serves(server, reference)


def test_a_waiting_request_whose_client_goes_never_runs(server: Server, reference: SimReference) -> None:
    running = [open_request(server, stream=True) for _ in range(2)]
    wait_for(server, running=2)
    waiting = [open_request(server, stream=stream) for stream in (True, False)]
    wait_for(server, running=2, waiting=2)
    for connection in waiting:
        connection.close()
    wait_for(server, running=2, waiting=0)
    for connection in running:
        connection.close()
    server.assert_whole(within=GONE_S)
    assert_serves(server, reference)


def test_an_abort_by_id_ends_that_request_and_no_other(server: Server, reference: SimReference) -> None:
    with ThreadPoolExecutor(4) as pool:
        long = pool.submit(server.generate, rid="long", text="Long", sampling_params=LONG)
        other = pool.submit(server.generate, text="Other", sampling_params={**LONG, "max_new_tokens": 300})
        wait_for(server, running=2)
        waiting = pool.submit(server.generate, rid="waiting", text="Waiting", sampling_params=LONG)
        wait_for(server, running=2, waiting=1)
        assert server.post("/abort_request", {"rid": "waiting"}).status_code == 200
        assert waiting.result(GONE_S)["output_ids"] == []
        assert server.post("/abort_request", {"rid": "no such request"}).status_code == 200
        assert server.post("/abort_request", {"rid": "long"}).status_code == 200
        ended = long.result(GONE_S)
        assert ended["meta_info"]["finish_reason"]["type"] == "abort"
        assert ended["output_ids"] == reference.solo("Long", 1900).ids[: len(ended["output_ids"])]
        assert 0 < len(ended["output_ids"]) < 1900
        assert other.result(30)["text"] == reference.solo("Other", 300).text


def test_abort_all_ends_what_runs_and_what_waits(server: Server, reference: SimReference) -> None:
    streams = Streams(server, 2, 1900)
    streams.wait_begun()
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(server.generate, text="Waiting", sampling_params=LONG) for _ in range(2)]
        wait_for(server, running=2, waiting=2)
        assert server.post("/abort_request", {"abort_all": True}).status_code == 200
        for answer in waiting:
            assert answer.result(GONE_S)["meta_info"]["finish_reason"]["type"] == "abort"
    streams.join(time.monotonic() + GONE_S)
    assert streams.outcomes == [FINISHED, FINISHED]
    assert_serves(server, reference)


def test_a_full_queue_is_a_503_that_says_when_to_come_back(server: Server, reference: SimReference) -> None:
    connections = [open_request(server) for _ in range(2)]
    wait_for(server, running=2)
    connections += [open_request(server) for _ in range(6)]
    wait_for(server, running=2, waiting=6)
    refused = server.post("/generate", {"text": "One too many"})
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert "--max-queued-requests is 6" in refused.json()["error"]["message"]
    assert server.client.get("/health").status_code == 200
    for connection in connections:
        connection.close()
    server.assert_whole(within=GONE_S)
    assert_serves(server, reference)


def test_an_id_can_only_be_used_by_one_live_request(server: Server, reference: SimReference) -> None:
    first = open_request(server, rid="x", stream=True)
    read_chunks(first, 1)
    taken = server.post("/generate", {"rid": "x", "text": "Another"})
    assert taken.status_code in (400, 409)
    assert "rid" in taken.json()["error"]["message"]
    twice = server.post("/generate", {"rid": ["y", "y"], "text": ["a", "b"]})
    assert twice.status_code == 400
    assert server.post("/generate", {"rid": 5, "text": "a"}).status_code == 400
    read_chunks(first, 3)
    first.close()
    server.assert_whole(within=GONE_S)
    again = server.generate(rid="x", text="A short one", sampling_params={"max_new_tokens": 5, "temperature": 0})
    assert again["text"] == reference.solo("A short one", 5).text
    assert again["meta_info"]["id"] == "x"


def test_of_two_requests_with_one_id_at_once_one_is_refused(server: Server, reference: SimReference) -> None:
    request = {"rid": "x", "text": "Twice", "sampling_params": {**LONG, "max_new_tokens": 60}}
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: server.post("/generate", request), range(2)))
    assert sorted(answer.status_code for answer in answers) in ([200, 400], [200, 409])
    (good,) = [answer for answer in answers if answer.status_code == 200]
    assert good.json()["text"] == reference.solo("Twice", 60).text


def test_a_prompt_that_can_never_fit_blocks_nobody(server: Server, reference: SimReference) -> None:
    asked_at = time.monotonic()
    refused = server.post("/generate", {"input_ids": [7] * 6500})
    assert refused.status_code == 400
    assert time.monotonic() - asked_at < GONE_S
    message = refused.json()["error"]["message"]
    assert "6500" in message and "6000" in message
    with ThreadPoolExecutor(4) as pool:
        short = {"max_new_tokens": 5, "temperature": 0}
        texts = [f"Short {i}" for i in range(8)]
        answers = list(pool.map(lambda text: server.generate(text=text, sampling_params=short)["text"], texts))
    assert answers == [reference.solo(text, 5).text for text in texts]
    clipped = server.generate(input_ids=[7] * 5900, sampling_params={**LONG, "max_new_tokens": 3000})
    assert clipped["meta_info"]["finish_reason"]["type"] == "length"
    assert 90 < clipped["meta_info"]["completion_tokens"] <= 100


METRIC = re.compile(r"^process_eras_(\w+?)(?:_total)?\{([^}]*)\} (\S+)$", re.MULTILINE)


def metrics(server: Server) -> dict[str, float]:
    """Each metric summed over its labels, except for `finish_reason`, which becomes part of the name."""
    totals: dict[str, float] = {}
    for name, _, value in METRIC.findall(server.client.get("/metrics").text):
        totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def test_metrics_count_each_request_once_and_gauges_return_to_zero(server: Server) -> None:
    before = metrics(server)
    params = {"max_new_tokens": 20, "ignore_eos": True}
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda i: server.generate(text=f"Nr {i}", sampling_params=params), range(8)))
    deadline = time.monotonic() + 1.0
    while True:
        now = metrics(server)
        assert now["num_running_reqs"] >= 0 and now["num_queue_reqs"] >= 0
        if now["num_running_reqs"] == now["num_queue_reqs"] == 0:
            break
        assert time.monotonic() < deadline, "the gauges still show the last batch"
        time.sleep(0.1)
    gained = {name: now[name] - before.get(name, 0.0) for name in now}
    assert gained["num_requests"] == 8
    assert gained["prompt_tokens"] == sum(answer["meta_info"]["prompt_tokens"] for answer in answers)
    assert gained["generation_tokens"] == 8 * 20
    assert gained["num_aborted_requests"] == 0

    gone = open_request(server, stream=True)
    read_chunks(gone, 2)
    gone.close()
    server.assert_whole(within=GONE_S)
    later = metrics(server)
    assert later["num_aborted_requests"] - now["num_aborted_requests"] == 1
    assert later["num_requests"] == now["num_requests"]
    assert later["num_running_reqs"] == later["num_queue_reqs"] == 0


def test_clients_that_stop_reading_cost_a_bounded_amount_of_memory(stage: int, reference: SimReference) -> None:
    """Twenty streams of which nobody reads a byte, beside ordinary clients (case C56, scaled down)."""
    flags = ("--device", "sim", "--sim-decode-ms", "1", "--context-length", "2048")
    with Server(stage, *flags) as server:
        server.generate(text="Warm up", sampling_params=LONG)
        main = psutil.Process(server.pid)
        memory = main.memory_info().rss
        with contextlib.ExitStack() as stalled:
            for _ in range(20):
                stalled.enter_context(open_request(server, stream=True))
            wait_for(server, running=20)
            for i in range(10):
                answer = server.generate(text=f"Nr {i}", sampling_params={**LONG, "max_new_tokens": 5})
                assert answer["text"] == reference.solo(f"Nr {i}", 5).text
            wait_for(server, running=0)
            assert main.memory_info().rss - memory < 20 * 2**20, "more than 1 MiB for each stream"
        server.assert_whole(within=GONE_S)
        assert server.info()["live_requests"] == 0
        with httpx.Client(base_url=server.url, timeout=GONE_S) as client:
            assert client.get("/health").status_code == 200
