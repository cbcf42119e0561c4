"""A real HTTP server on loopback in front of a fake engine."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
import uvloop

from shared.frontend.app import create_app, serve_config
from shared.frontend.limits import Limits
from shared.frontend.tokenizer_manager import TokenizerManager
from shared.messages import PortArgs
from shared.server_args import ServerArgs
from tests.frontend.fake_engine import FakeEngine
from tests.frontend.tokenizers_for_tests import save_byte_level

MODEL = "the-model"


@dataclass
class Server:
    url: str
    client: httpx.Client
    engine: FakeEngine
    manager: TokenizerManager
    loop: asyncio.AbstractEventLoop
    vocab_size: int

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return self.client.post(path, json=body, **more)


def script(prompt: list[int], output: list[int], seed: int) -> int:
    """Tokens that depend on the prompt, the place and the seed, mostly ASCII, never special."""
    return 4 + (sum(prompt) * 7 + len(output) * 13 + seed % 1000 * 5) % 120


def eventually(check: Callable[[], bool]) -> None:
    """Waits until `check` holds; an outer limit, not a measurement."""
    for _ in range(500):
        if check():
            return
        time.sleep(0.01)
    raise AssertionError("did not happen within 5 s")


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("byte-level")
    save_byte_level(folder)
    return folder


@contextmanager
def serving(
    folder: Path,
    run_dir: Path,
    *,
    step_s: float = 0.001,
    max_running: int = 32,
    capacity: int = 1000,
    context_length: int = 512,
    **flags: Any,
) -> Iterator[Server]:
    args = replace(ServerArgs(model_path=str(folder), served_model_name=MODEL), **flags)
    ports = PortArgs(
        run_dir=str(run_dir),
        tokenizer_ipc_name=f"ipc://{run_dir}/tokenizer",
        scheduler_input_ipc_name=f"ipc://{run_dir}/scheduler",
        detokenizer_ipc_name=f"ipc://{run_dir}/detokenizer",
        secret=b"",
    )
    vocab_size = 300
    manager = TokenizerManager(args, ports, Limits(context_length, capacity, max_running, vocab_size))
    engine = FakeEngine(
        ports, manager.prompts.decoder, script, max_running=max_running, capacity=capacity, step_s=step_s
    )
    app = create_app(manager, args, lambda: [{"role": "main", "pid": 1}])
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(serve_config(app, args))
    loops: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve([listener])

    thread = threading.Thread(target=lambda: uvloop.run(main()))
    thread.start()
    try:
        eventually(lambda: server.started)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        headers = {"authorization": f"Bearer {args.api_key}"} if args.api_key else {}
        with httpx.Client(base_url=url, headers=headers, timeout=20) as client:
            yield Server(url, client, engine, manager, loops[0], vocab_size)
    finally:
        server.should_exit = True
        thread.join()
        engine.close()


@pytest.fixture(scope="module")
def server(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tokenizer_folder, tmp_path_factory.mktemp("run")) as running:
        yield running
