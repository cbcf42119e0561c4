"""HTTP over processes that are ready: uvicorn, and how it ends.

Heavier to import than the rest of the package, and not imported by a child process.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterator

import uvicorn
import uvloop

from shared.frontend.app import create_app, serve_config
from shared.frontend.tokenizer_manager import TokenizerManager
from shared.launch.http_socket import http_url
from shared.launch.process_tree import ProcessNode, format_tree
from shared.launch.stage import LaunchedProcesses
from shared.launch.supervisor import ChildFailed
from shared.server_args import ServerArgs

DRAIN_S = 1.5
"""Seconds that running requests have to finish once the server has been told to stop."""


class _HttpServer(uvicorn.Server):
    """Uvicorn that leaves signals alone, says when it is ready and, stopping, fails late requests."""

    def __init__(self, config: uvicorn.Config, tokenizer_manager: TokenizerManager, announcement: str) -> None:
        super().__init__(config)
        self.lost_a_child = False
        self._tokenizer_manager = tokenizer_manager
        self._announcement = announcement

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self._announcement, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        late = asyncio.get_running_loop().call_later(
            DRAIN_S, self._tokenizer_manager.fail_all, "the server is shutting down"
        )
        await super().shutdown(sockets)
        late.cancel()

    def stop(self) -> None:
        """Stops accepting; running requests have `DRAIN_S`."""
        self.should_exit = True

    def lose_child(self, failure: ChildFailed) -> None:
        """Fails all requests and stops; to be called in the event loop."""
        self.lost_a_child = not self.should_exit
        self._tokenizer_manager.fail_all(f"a process of the server died: {failure.title}")
        self.should_exit = True


def serve_http(
    server_args: ServerArgs,
    processes: LaunchedProcesses,
    tree: ProcessNode,
    http_socket: socket.socket,
    began: float,
    hand_over: Callable[[Callable[[], None]], None],
) -> int:
    """Serves on `http_socket` until it is told to stop or a process dies; returns the exit status.

    `began` is when the start began (`time.monotonic`).  `hand_over` is given the function that makes the
    server stop in order, to be called by a signal handler.
    """

    async def serve() -> int:
        loop = asyncio.get_running_loop()
        tokenizer_manager = TokenizerManager(server_args, processes.port_args, processes.limits)
        app = create_app(tokenizer_manager, server_args, tree.as_dict)
        announcement = _announcement(server_args, tree, http_url(http_socket), time.monotonic() - began)
        server = _HttpServer(serve_config(app, server_args), tokenizer_manager, announcement)
        hand_over(server.stop)
        processes.supervisor.on_death(lambda failure: _call_soon(loop, server, failure))
        await server.serve([http_socket])
        return 1 if server.lost_a_child else 0

    try:
        return uvloop.run(serve())
    except SystemExit:
        return 1  # uvicorn's status 3: the app could not start, which it has logged


def _call_soon(loop: asyncio.AbstractEventLoop, server: _HttpServer, failure: ChildFailed) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended: so has the server
        loop.call_soon_threadsafe(server.lose_child, failure)


def _announcement(server_args: ServerArgs, tree: ProcessNode, url: str, seconds: float) -> str:
    key = "" if server_args.api_key is None else ' -H "Authorization: Bearer $API_KEY"'
    body = '{"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}'
    return (
        f"\n{format_tree(tree)}\n\n"
        f"{server_args.model_name} is ready at {url} after {seconds:.1f} s. Try:\n\n"
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'\n"
    )
