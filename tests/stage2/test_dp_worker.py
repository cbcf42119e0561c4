"""A replica's thread: what it does with its queue, and what becomes of requests when a rank dies."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from shared.messages import (
    AbortReq,
    BatchTokenIDOut,
    FlushCacheReq,
    PortArgs,
    SamplingParams,
    SchedulerInput,
    TokenizedGenerateReqInput,
)
from shared.scheduling.outputs import end_unscheduled
from shared.server_args import ServerArgs
from stage2_static_dp import dp_worker
from stage2_static_dp.dp_worker import DataParallelWorker

pytestmark = pytest.mark.stages(2)


class Ranks:
    """Stands in for a replica's ranks: what arrives at them, and how the next step ends."""

    def __init__(self) -> None:
        self.ready_message = {"status": "ready"}
        self.received: queue.Queue[list[SchedulerInput]] = queue.Queue()
        self.answers: queue.Queue[Any] = queue.Queue()

    async def step(self, recv_reqs: list[SchedulerInput]) -> list[Any]:
        if not recv_reqs:
            await asyncio.sleep(0)
            return []
        self.received.put(recv_reqs)
        answer = await asyncio.to_thread(self.answers.get)
        if isinstance(answer, Exception):
            raise answer
        return list(answer)


class Replica:
    """A worker whose ranks are `ranks` and whose detokenizer is `outputs`."""

    def __init__(self, worker: DataParallelWorker, ranks: Ranks, outputs: zmq.Socket[bytes]) -> None:
        self.worker = worker
        self.ranks = ranks
        self.outputs = outputs


def request(rid: str) -> TokenizedGenerateReqInput:
    return TokenizedGenerateReqInput(rid, np.array([1, 2], dtype=np.int64), SamplingParams())


@pytest.fixture(params=["mp", "thread"])
def replica(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Replica]:
    ranks = Ranks()
    monkeypatch.setattr(dp_worker, "ModelTpClient", lambda *args: ranks)
    monkeypatch.setattr(dp_worker, "LOSS_S", 0.2)
    address = f"ipc://{tmp_path}/out"
    outputs = zmq.Context.instance().socket(zmq.PULL)
    outputs.bind(address)
    outputs.setsockopt(zmq.RCVTIMEO, 10_000)
    server_args = ServerArgs(dp_size=2, dp_queue=request.param)
    worker = DataParallelWorker(server_args, PortArgs(str(tmp_path), "", "", address, b""), 1, [])
    worker.start()
    worker.ready.result(timeout=10)
    yield Replica(worker, ranks, outputs)
    if worker.is_alive():
        worker.lose()
        ranks.answers.put([])
        worker.join(10)
    outputs.close(linger=0)


def test_requests_arrive_in_order_and_are_load_until_they_have_finished(replica: Replica) -> None:
    worker, ranks = replica.worker, replica.ranks
    first, second = request("first"), request("second")
    worker.put(first)
    assert [req.rid for req in ranks.received.get(timeout=10)] == ["first"]
    worker.put(second)
    assert worker.load == 2
    worker.put(AbortReq("second"))
    ranks.answers.put([end_unscheduled([first], "done")])
    assert replica.outputs.recv_pyobj().rids == ["first"]
    arrived: list[SchedulerInput] = []
    while len(arrived) < 2:
        arrived += ranks.received.get(timeout=10)
        ranks.answers.put([end_unscheduled([second], "done")] if len(arrived) == 2 else [])
    assert isinstance(arrived[0], TokenizedGenerateReqInput) and isinstance(arrived[1], AbortReq)
    assert replica.outputs.recv_pyobj().rids == ["second"]
    assert worker.load == 0


def test_a_lost_replica_fails_what_ran_and_gives_back_what_it_never_saw(replica: Replica) -> None:
    worker, ranks = replica.worker, replica.ranks
    worker.put(request("running"))
    worker.put(FlushCacheReq("question"))
    seen = ranks.received.get(timeout=10)
    if len(seen) == 1:
        ranks.answers.put([])
        ranks.received.get(timeout=10)
    worker.put(request("undelivered"))
    worker.put(AbortReq("undelivered"))
    worker.lose()
    ranks.answers.put(EOFError("connection closed"))
    assert worker.ended.wait(10)
    failed = replica.outputs.recv_pyobj()
    assert isinstance(failed, BatchTokenIDOut)
    assert failed.rids == ["running"]
    assert failed.finish_reasons[0] is not None and failed.finish_reasons[0].status == 503
    assert [getattr(req, "rid", None) or req.id for req in worker.take_back()] == [
        "question",
        "undelivered",
        "undelivered",
    ]
    assert worker.error is None


def test_an_idle_replica_that_is_lost_ends(replica: Replica) -> None:
    replica.worker.lose()
    assert replica.worker.ended.wait(10)
    assert replica.worker.take_back() == []


def test_a_failure_without_a_death_is_not_swallowed(replica: Replica) -> None:
    replica.worker.put(request("x"))
    replica.ranks.received.get(timeout=10)
    replica.ranks.answers.put(RuntimeError("a defect"))
    assert replica.worker.ended.wait(10)
    assert isinstance(replica.worker.error, RuntimeError)
