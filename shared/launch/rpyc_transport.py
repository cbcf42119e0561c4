"""rpyc between this server's own processes: over loopback, and only for who knows the launch's secret.

rpyc unpickles what its peer sends, so nothing of it is spoken before the secret has been checked.
"""

from __future__ import annotations

import functools
import hmac
import logging
import queue
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar, cast

import rpyc
from rpyc.core.stream import SocketStream
from rpyc.utils.authenticators import AuthenticationError
from rpyc.utils.server import ThreadedServer

AUTHENTICATION_TIMEOUT_S = 5.0
RPYC_CONFIG = {
    "allow_public_attrs": True,
    "allow_pickle": True,
    "sync_request_timeout": None,  # a slow rank is not a dead one (case C05); the supervisor sees the dead
}

Method = TypeVar("Method", bound=Callable[..., Any])
_failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()


def fatal(method: Method) -> Method:
    """Makes an exception in a service's method end the process that serves it, as any internal fault does.

    Its peers may wait for it in a collective for ever, and the caller for them.
    """

    @functools.wraps(method)
    def call(*args: Any) -> Any:
        try:
            return method(*args)
        except BaseException as error:
            _failures.put(error)
            raise

    return cast(Method, call)


def serve(service: type[rpyc.Service], secret: bytes, pipe_writer: Connection) -> None:
    """Serves `service` on a loopback port of the system's choice until this process is ended.

    Reports `{"status": "ready", "port": port}`.  Raises what a `fatal` method raised.
    """

    def authenticate(connection: socket.socket) -> tuple[socket.socket, None]:
        connection.settimeout(AUTHENTICATION_TIMEOUT_S)
        given = _receive(connection, len(secret))
        if not hmac.compare_digest(given, secret):
            raise AuthenticationError("wrong secret")
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection, None

    server = ThreadedServer(
        service,
        hostname="127.0.0.1",
        port=0,
        authenticator=authenticate,
        protocol_config=RPYC_CONFIG,
        logger=_quiet_logger(),
    )
    server.listener.listen()  # from now on the first connection waits instead of being refused
    pipe_writer.send({"status": "ready", "port": server.port})
    threading.Thread(target=server.start, name="rpyc", daemon=True).start()
    raise _failures.get()


def _receive(connection: socket.socket, count: int) -> bytes:
    """`count` bytes, or fewer from a peer that ends early.  Raises `AuthenticationError` for one that is too slow."""
    given = b""
    try:
        while len(given) < count and (part := connection.recv(count - len(given))):
            given += part
    except OSError as error:
        raise AuthenticationError(str(error)) from error
    return given


def _quiet_logger() -> logging.Logger:
    """rpyc's own log without its lines about every connection."""
    logger = logging.getLogger("rpyc")
    logger.setLevel(logging.WARNING)
    return logger


def connect(port: int, secret: bytes) -> rpyc.Connection:
    """An authenticated connection to the process that serves at `port`.

    Without TCP_NODELAY the many small messages of a step wait for acknowledgements, 40 ms at a time.
    """
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(secret)
    return rpyc.connect_stream(SocketStream(connection), config=RPYC_CONFIG)
