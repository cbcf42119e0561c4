"""The HTTP port, taken before anything else is started."""

from __future__ import annotations

import socket

_BACKLOG = 2048


class PortUnavailable(Exception):
    """The HTTP address cannot be listened on; the message names it and says what to do."""


def bind_http_socket(host: str, port: int) -> socket.socket:
    """A TCP socket that listens on `host:port`; port 0 takes any free one.

    It listens from the start, so that a second server on the same port fails at once and not after loading
    its model; a client that connects early is answered when the server is ready.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        http_socket = socket.socket(family, kind, protocol)
        try:
            # Lets a restart have the port although connections of the previous server are in TIME_WAIT.
            http_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            http_socket.bind(address)
            http_socket.listen(_BACKLOG)
        except OSError:
            http_socket.close()
            raise
    except (OSError, OverflowError) as error:
        reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        raise PortUnavailable(
            f"cannot listen on {host} port {port}: {reason}; give another --port or --host"
        ) from error
    return http_socket


def http_url(http_socket: socket.socket) -> str:
    """The URL of a listening socket; a wildcard address is given as loopback."""
    host, port = http_socket.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
