"""One replica as the controller sees it: a queue, and a thread that drives the replica's ranks over rpyc."""

from __future__ import annotations

import asyncio
import multiprocessing
import queue
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any

import uvloop
import zmq

from shared import pyobj, trace
from shared.messages import (
    AbortReq,
    FlushCacheOut,
    GetInternalStateOut,
    PortArgs,
    SchedulerInput,
    SchedulerOutput,
    SchedulerStats,
    TokenizedGenerateReqInput,
)
from shared.scheduling.outputs import end_unscheduled, finished_rids
from shared.server_args import ServerArgs
from stage2_static_dp import model_title
from stage2_static_dp.manager_single import EXTEND_DEPENDENCY_TIME_S, STEP_SLEEP_S
from stage2_static_dp.tp_worker import ModelTpClient

LOSS_S = 2.0
"""Seconds in which the death of a rank is taken to be the cause of a failed step."""


class ReplicaLost(Exception):
    """A rank of the replica has died."""


class DataParallelWorker(threading.Thread):
    """A replica with its queue.

    The controller's thread calls `put` and `load` and, once `ended` is set, `take_back`; the supervisor's
    thread calls `lose`; the rest runs in the worker's own thread, which calls `notify` when it has ended: the
    replica is lost, or `error` says what went wrong.  `titles` are those of its model processes.
    """

    def __init__(self, server_args: ServerArgs, port_args: PortArgs, dp_rank: int, rpyc_ports: list[int]) -> None:
        super().__init__(name=f"replica {dp_rank}", daemon=True)
        self.dp_rank = dp_rank
        self.titles = [model_title(server_args, dp_rank, tp_rank) for tp_rank in range(server_args.tp_size)]
        self.ready: Future[dict[str, Any]] = Future()
        self.ended = threading.Event()
        self.notify: Callable[[], object] = lambda: None
        self.error: Exception | None = None
        self._server_args = server_args
        self._port_args = port_args
        self._rpyc_ports = rpyc_ports
        self._queue: Any = multiprocessing.Queue() if server_args.dp_queue == "mp" else queue.Queue()
        self._undelivered: dict[Hashable, SchedulerInput] = {}
        self._unanswered: dict[Hashable, SchedulerInput] = {}
        self._lost = threading.Event()
        self._sleep_on_idle = server_args.sleep_on_idle
        self._idle = True
        self._trace = trace.track(self.name, drives=self.titles[0])

    # -- for the controller --------------------------------------------------------------------------------

    @property
    def load(self) -> int:
        """Requests that are not finished, in the queue or past it, and for a moment what else is in the queue."""
        return len(self._undelivered) + len(self._unanswered)

    def put(self, req: SchedulerInput) -> None:
        self._undelivered[_key(req)] = req
        self._queue.put(req)

    def lose(self) -> None:
        """A rank has died: the thread ends, and fails what was running."""
        self._lost.set()
        self._queue.put(None)

    def take_back(self) -> list[SchedulerInput]:
        """What never reached the replica, in order, after the questions that it left unanswered."""
        left = list(self._unanswered.values())
        questions = [req for req in left if not isinstance(req, TokenizedGenerateReqInput)]
        return questions + list(self._undelivered.values())

    # -- the thread ----------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            self._client = ModelTpClient(
                self._server_args, self._port_args, self.dp_rank, self._rpyc_ports, self._trace
            )
            self._send_to_detokenizer = _push_socket(self._port_args.detokenizer_ipc_name)
            self.ready.set_result(self._client.ready_message)
            uvloop.run(self.loop_for_forward())
        except Exception as error:
            if not self.ready.done():
                self.ready.set_exception(error)
            elif self._lost.wait(LOSS_S):
                self._fail_running()
            else:
                self.error = error
        finally:
            self.ended.set()
            self.notify()

    async def loop_for_forward(self) -> None:
        while True:
            recv_reqs = self._drain_queue()
            self._deliver(recv_reqs)
            self._trace.lap("queue get")
            self._trace.lap_in("take requests", recv_reqs)
            outputs = await self._client.step(recv_reqs)
            for output in outputs:
                self._take_note(output)
                pyobj.send(self._send_to_detokenizer, output, self._trace)
            if finished_rids(outputs):
                await asyncio.sleep(EXTEND_DEPENDENCY_TIME_S)
            await asyncio.sleep(STEP_SLEEP_S)
            self._trace.lap("sleep")
            self._trace.end_step(busy=bool(outputs) or not self._idle)

    def _drain_queue(self) -> list[SchedulerInput]:
        """Everything that waits in the queue; with `--sleep-on-idle` an idle replica waits for something."""
        recv_reqs: list[SchedulerInput] = []
        try:
            while True:
                wait = self._sleep_on_idle and self._idle and not recv_reqs
                req = self._queue.get(block=wait)
                if req is None:
                    raise ReplicaLost
                recv_reqs.append(req)
        except queue.Empty:
            return recv_reqs

    def _deliver(self, recv_reqs: list[SchedulerInput]) -> None:
        for req in recv_reqs:
            self._undelivered.pop(_key(req), None)
            if not isinstance(req, AbortReq):
                self._unanswered[_key(req)] = req

    def _take_note(self, output: SchedulerOutput) -> None:
        if isinstance(output, SchedulerStats):
            self._idle = output.running + output.waiting == 0
        elif isinstance(output, FlushCacheOut | GetInternalStateOut):
            self._unanswered.pop(output.id, None)
        else:
            for rid in finished_rids([output]):
                self._unanswered.pop(rid, None)

    def _fail_running(self) -> None:
        """Over the socket that carried their tokens, so that the error comes after them."""
        left = list(self._unanswered.values())
        running = [req for req in left if isinstance(req, TokenizedGenerateReqInput)]
        message = f"replica {self.dp_rank} died while it ran the request; send it again"
        self._send_to_detokenizer.send_pyobj(end_unscheduled(running, message, status=503))


def _key(req: SchedulerInput) -> Hashable:
    """What an answer names; an abort has none."""
    if isinstance(req, AbortReq):
        return ("abort", req.rid)
    return req.rid if isinstance(req, TokenizedGenerateReqInput) else req.id


def _push_socket(address: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
    socket.set_hwm(0)
    socket.connect(address)
    return socket
