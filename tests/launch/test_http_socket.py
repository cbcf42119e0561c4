from __future__ import annotations

import socket

import pytest

from shared.launch.http_socket import PortUnavailable, bind_http_socket, http_url


def test_port_0_takes_a_free_port_and_the_url_names_it() -> None:
    with bind_http_socket("127.0.0.1", 0) as http_socket:
        port = http_socket.getsockname()[1]
        assert port > 0
        assert http_url(http_socket) == f"http://127.0.0.1:{port}"


def test_a_second_server_on_the_port_is_refused_before_the_first_is_ready() -> None:
    with bind_http_socket("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(PortUnavailable, match=rf"127\.0\.0\.1 port {port}: .*in use.*--port"):
            bind_http_socket("127.0.0.1", port)


def test_a_port_with_connections_in_time_wait_can_be_had_again() -> None:
    with bind_http_socket("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            served, _ = first.accept()
            served.close()  # the side that closes first keeps TIME_WAIT
            assert client.recv(1) == b""
    bind_http_socket("127.0.0.1", port).close()


def test_a_host_that_is_not_ours_is_named() -> None:
    with pytest.raises(PortUnavailable, match=r"192\.0\.2\.1 port 0"):
        bind_http_socket("192.0.2.1", 0)


def test_a_wildcard_address_is_shown_as_loopback() -> None:
    with bind_http_socket("0.0.0.0", 0) as http_socket:
        assert http_url(http_socket).startswith("http://127.0.0.1:")
