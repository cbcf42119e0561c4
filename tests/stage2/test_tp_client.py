"""The client of a replica's ranks, over real rpyc with stand-ins for the ranks."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from typing import Any

import pytest
import rpyc
from rpyc.utils.classic import obtain

from shared import trace
from shared.launch.rpyc_transport import connect, serve
from shared.messages import AbortReq, PortArgs
from shared.server_args import ServerArgs
from stage2_static_dp.tp_worker import ModelTpClient

pytestmark = pytest.mark.stages(2)

SECRET = b"s" * 32


def start_rank(step: Any) -> int:
    """Serves a rank whose step is `step(recv_reqs)` from a thread; its port."""

    class Rank(rpyc.Service):
        def exposed_init_model(self, server_args: Any, port_args: Any, dp_rank: int, tp_rank: int) -> Any:
            return {"status": "ready", "rank": (dp_rank, tp_rank)}

        def exposed_step(self, recv_reqs: Any) -> Any:
            return step(obtain(recv_reqs))

    reader, writer = multiprocessing.Pipe(duplex=False)
    threading.Thread(target=serve, args=(Rank, SECRET, writer), daemon=True).start()
    return int(reader.recv()["port"])


def client(*steps: Any) -> ModelTpClient:
    ports = [start_rank(step) for step in steps]
    return ModelTpClient(ServerArgs(tp_size=len(steps)), PortArgs("", "", "", "", SECRET), 3, ports, trace.track())


def test_every_rank_gets_the_requests_and_rank_0s_answer_counts() -> None:
    received: list[Any] = []

    def step(recv_reqs: list[Any]) -> list[str]:
        received.append([req.rid for req in recv_reqs])
        return [f"answer {len(recv_reqs)}"]

    def ignored(recv_reqs: list[Any]) -> list[str]:
        received.append([req.rid for req in recv_reqs])
        return ["of no interest"]

    ranks = client(step, ignored)
    assert ranks.ready_message["rank"] == (3, 0)
    assert asyncio.run(ranks.step([AbortReq("x"), AbortReq("y")])) == ["answer 2"]
    assert received == [["x", "y"]] * 2


def test_a_connection_without_the_secret_is_closed_before_anything_is_unpickled() -> None:
    port = start_rank(lambda recv_reqs: recv_reqs)
    with pytest.raises(EOFError):
        connect(port, b"x" * 32).root.step([])
    assert connect(port, SECRET).root.step([]) is not None
