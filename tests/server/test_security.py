"""No open doors: what a running server listens on, and who is let in (cases C48 and C50)."""

from __future__ import annotations

import contextlib
import pickle
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
import rpyc
from rpyc.core.stream import SocketStream

from tests.server.plugin import changing
from tests.server.process import Server, title
from tests.server.trees import widest_flags

KEY = "a-key-for-this-test"
AUTHENTICATION_TIMEOUT_S = 1.0
HURRY = f"""
def change(rpyc_transport):
    rpyc_transport.AUTHENTICATION_TIMEOUT_S = {AUTHENTICATION_TIMEOUT_S}
"""


@pytest.fixture(scope="module")
def server(stage: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    env = changing("shared.launch.rpyc_transport", HURRY, tmp_path_factory.mktemp("plugin"))
    with Server(stage, "--device", "sim", "--api-key", KEY, *widest_flags(stage), env=env) as server:
        server.client.headers["authorization"] = f"Bearer {KEY}"
        yield server


def tcp_listeners(server: Server) -> list[tuple[str, int, str]]:
    """Address, port and process of everything that accepts TCP connections."""
    found = []
    for process in server.everything():
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                found.append((connection.laddr.ip, connection.laddr.port, title(process)))
    return found


def inner_listeners(server: Server) -> list[tuple[str, int, str]]:
    http_port = urlsplit(server.url).port
    return [listener for listener in tcp_listeners(server) if listener[1] != http_port]


def rpyc_listeners(server: Server) -> list[tuple[int, str]]:
    """Port and process of the listeners that the ranks' caller has connected to; the others are gloo's."""
    (caller,) = [process for process in server.tree() if title(process).endswith((": router", ": controller"))]
    called = {connection.raddr.port for connection in caller.net_connections("inet") if connection.raddr}
    return [(port, owner) for _, port, owner in inner_listeners(server) if port in called]


class MakesMarker:
    """A pickle whose loading creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.marker,))


def test_every_tcp_listener_is_on_loopback(server: Server) -> None:
    listeners = tcp_listeners(server)
    assert ("127.0.0.1", urlsplit(server.url).port, title(psutil.Process(server.pid))) in listeners
    assert {address for address, _, _ in listeners} <= {"127.0.0.1", "::1"}, listeners


def test_unix_sockets_lie_in_a_directory_of_this_user_alone(server: Server) -> None:
    (run_dir,) = server.run_dirs()
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    paths = set()
    for process in server.everything():
        paths |= {str(connection.laddr) for connection in process.net_connections("unix") if connection.laddr}
    named = {path for path in paths if path.startswith("/")}
    assert len(named) >= 3
    assert [path for path in named if Path(path).parent != run_dir] == []


def test_other_addresses_are_refused(server: Server) -> None:
    """The listeners are not reachable under another loopback address, as they would be on all interfaces."""
    for _, port, _ in tcp_listeners(server):
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.2", port), timeout=2)


@pytest.mark.stages(1, 2)
@pytest.mark.parametrize("secret", [b"", b"x" * 32], ids=["none", "wrong"])
def test_rpyc_hears_nothing_from_who_does_not_know_the_secret(server: Server, secret: bytes) -> None:
    ranks = [process for process in server.tree() if "model" in title(process)]
    listeners = rpyc_listeners(server)
    assert sorted(owner for _, owner in listeners) == sorted(map(title, ranks))
    connections = [socket.create_connection(("127.0.0.1", port)) for port, _ in listeners]
    for connection in connections:
        connection.sendall(secret)
    patience = {"sync_request_timeout": AUTHENTICATION_TIMEOUT_S + 10}
    strangers = [rpyc.connect_stream(SocketStream(connection), config=patience) for connection in connections]
    for stranger in strangers:
        with pytest.raises(EOFError):  # the connection was closed; no answer in time would be a TimeoutError
            stranger.root  # noqa: B018


@pytest.mark.stages(1, 2)
def test_a_silent_stranger_at_an_rpyc_port_is_shown_out_without_a_word_in_the_log(server: Server) -> None:
    patience = AUTHENTICATION_TIMEOUT_S + 10
    silent = [socket.create_connection(("127.0.0.1", port), patience) for port, _ in rpyc_listeners(server)]
    for connection in silent:
        with connection:
            assert connection.recv(1) == b""
    assert silent
    assert "Traceback" not in server.output


def test_a_pickle_sent_to_an_inner_port_is_not_loaded(server: Server, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    data = pickle.dumps(MakesMarker(marker))
    before = [process.pid for process in server.tree()]
    sent = []
    for address, port, _ in inner_listeners(server):
        for payload in (data, b"\0" * 32 + data, len(data).to_bytes(8, "little") + data):
            connection = socket.create_connection((address, port), timeout=5)
            sent.append(connection)
            with contextlib.suppress(OSError):
                connection.sendall(payload)
                connection.shutdown(socket.SHUT_WR)
    heard_out = time.monotonic() + 1.5
    for connection in sent:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(max(0.01, heard_out - time.monotonic()))
            while connection.recv(4096):
                pass
    assert not marker.exists()
    pickle.loads(data)
    assert marker.exists(), "the pickle is harmless, and the test shows nothing"
    answer = server.generate(text="Still there?", sampling_params={"max_new_tokens": 4})
    assert answer["meta_info"]["completion_tokens"] == 4
    assert [process.pid for process in server.tree()] == before


ROUTES = (
    *(
        ("POST", path)
        for path in ("/v1/completions", "/v1/chat/completions", "/generate", "/abort_request", "/flush_cache")
    ),
    *(("GET", path) for path in ("/v1/models", "/v1/models/x", "/v1/models/", "//v1/models", "/health_generate")),
    *(("GET", path) for path in ("/get_model_info", "/get_server_info", "/metrics", "/docs", "/openapi.json")),
    *(("GET", path) for path in ("/flush_cache", "/no-such-path", "/health/", "//health")),
    *((method, "/generate") for method in ("HEAD", "OPTIONS", "PUT")),
)


@pytest.mark.parametrize("given", [None, "Bearer wrong", "Bearer", KEY, f"Basic {KEY}", f"Bearer {KEY}x"])
def test_nothing_but_health_answers_without_the_key(server: Server, given: str | None) -> None:
    headers = {} if given is None else {"authorization": given}
    forwards = sum(state["forwards"] for state in server.info()["internal_states"])
    with httpx.Client(base_url=server.url, headers=headers) as client:
        for method, path in ROUTES:
            body = {"text": "a", "prompt": "a", "abort_all": True} if method in ("POST", "PUT") else None
            response = client.request(method, server.url + path, json=body)
            assert response.status_code == 401, (method, path)
        assert client.get("/health").status_code == 200
    assert sum(state["forwards"] for state in server.info()["internal_states"]) == forwards


def test_the_key_opens_the_doors_and_is_not_shown(server: Server) -> None:
    assert server.client.get("/v1/models").status_code == 200
    assert KEY not in server.client.get("/get_server_info").text
    assert KEY not in server.output
