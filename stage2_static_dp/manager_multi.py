"""The controller of a server with several replicas: deals requests out, and goes on without one that died."""

from __future__ import annotations

import asyncio
import logging
from multiprocessing.connection import Connection
from typing import Any

import uvloop
import zmq
import zmq.asyncio

from shared import pyobj, trace
from shared.launch.supervisor import ChildFailed, Supervisor
from shared.messages import (
    AbortReq,
    FlushCacheOut,
    FlushCacheReq,
    GetInternalStateOut,
    GetInternalStateReq,
    PortArgs,
    SchedulerInput,
    SchedulerOutput,
    SchedulerStats,
    TokenizedGenerateReqInput,
)
from shared.scheduling.outputs import end_unscheduled
from shared.server_args import ServerArgs
from stage2_static_dp.dp_worker import DataParallelWorker
from stage2_static_dp.manager_single import STEP_SLEEP_S
from stage2_static_dp.tp_worker import start_model_processes

logger = logging.getLogger(__name__)


class Dispatcher:
    """Chooses a replica for a request.  It knows nothing of what a replica has cached."""

    def __init__(self, load_balance_method: str, workers: list[DataParallelWorker]) -> None:
        self.workers = workers
        self._next = 0
        self.choose = {"round_robin": self._round_robin, "shortest_queue": self._shortest_queue}[load_balance_method]

    def _round_robin(self) -> DataParallelWorker:
        return self._take(0)

    def _shortest_queue(self) -> DataParallelWorker:
        """The replica with the fewest unfinished requests; of equals, the one whose turn it is."""
        n = len(self.workers)
        return self._take(min(range(n), key=lambda i: self.workers[(self._next + i) % n].load))

    def _take(self, offset: int) -> DataParallelWorker:
        chosen = (self._next + offset) % len(self.workers)
        self._next = (chosen + 1) % len(self.workers)
        return self.workers[chosen]


class ControllerMulti:
    """Deals requests out to the replicas' queues and outlives all replicas but the last."""

    def __init__(self, server_args: ServerArgs, port_args: PortArgs, workers: list[DataParallelWorker]) -> None:
        context = zmq.asyncio.Context()
        self._recv_from_tokenizer = context.socket(zmq.PULL)
        self._send_to_detokenizer = context.socket(zmq.PUSH)
        for socket in (self._recv_from_tokenizer, self._send_to_detokenizer):
            socket.set_hwm(0)
        self._recv_from_tokenizer.bind(port_args.scheduler_input_ipc_name)
        self._send_to_detokenizer.connect(port_args.detokenizer_ipc_name)
        self._dispatcher = Dispatcher(server_args.load_balance_method, workers)
        self._lost_ranks: list[int] = []
        self._recv_reqs: list[SchedulerInput] = []
        self._arrived = asyncio.Event()
        self._recv_trace = trace.track("receive")
        self._trace = trace.track()
        self._sleep_on_idle = server_args.sleep_on_idle
        loop = asyncio.get_running_loop()
        for worker in workers:
            worker.notify = lambda: loop.call_soon_threadsafe(self._arrived.set)

    async def loop_for_recv_requests(self) -> None:
        while True:
            recv_req = await pyobj.recv_async(self._recv_from_tokenizer, self._recv_trace)
            self._recv_reqs.append(recv_req)
            self._arrived.set()

    async def loop_for_forward(self) -> None:
        while True:
            self._arrived.clear()
            await self._remove_dead_workers()
            recv_reqs, self._recv_reqs = self._recv_reqs, []
            await self._dispatch(recv_reqs)
            self._trace.lap_in("queue put", recv_reqs)
            if self._sleep_on_idle:
                await self._arrived.wait()
            else:
                await asyncio.sleep(STEP_SLEEP_S)
            self._trace.lap("sleep")
            self._trace.end_step()

    async def _dispatch(self, recv_reqs: list[SchedulerInput]) -> None:
        """Requests go to one replica, all else to every one; an abort ends here what is not yet dispatched."""
        reqs: list[TokenizedGenerateReqInput] = []
        for recv_req in recv_reqs:
            if isinstance(recv_req, TokenizedGenerateReqInput):
                reqs.append(recv_req)
                continue
            if isinstance(recv_req, AbortReq):
                aborted = [req for req in reqs if recv_req.rid in (None, req.rid)]
                reqs = [req for req in reqs if req not in aborted]
                if aborted:
                    await self._send(end_unscheduled(aborted, "aborted"))
            self._deal_out(reqs)
            reqs = []
            await self._tell_all(recv_req)
        self._deal_out(reqs)

    def _deal_out(self, reqs: list[TokenizedGenerateReqInput]) -> None:
        for req in reqs:
            self._dispatcher.choose().put(req)

    async def _tell_all(self, control_req: AbortReq | FlushCacheReq | GetInternalStateReq) -> None:
        for worker in self._dispatcher.workers:
            worker.put(control_req)
        for dp_rank in self._lost_ranks:
            await self._answer_for(dp_rank, control_req)

    async def _remove_dead_workers(self) -> None:
        """Drops the replicas that died and dispatches again what never reached them."""
        for worker in [worker for worker in self._dispatcher.workers if worker.ended.is_set()]:
            if worker.error is not None:
                raise worker.error
            self._dispatcher.workers.remove(worker)
            self._lost_ranks.append(worker.dp_rank)
            undone = worker.take_back()
            again = [req for req in undone if isinstance(req, TokenizedGenerateReqInput | AbortReq)]
            left = len(self._dispatcher.workers)
            logger.warning("replica %d is gone, %d left; %d messages go there", worker.dp_rank, left, len(again))
            await self._send(_nothing_left(worker.dp_rank))
            self._recv_reqs[:0] = again
            for req in undone:
                await self._answer_for(worker.dp_rank, req)

    async def _answer_for(self, dp_rank: int, control_req: SchedulerInput) -> None:
        """What a replica that is gone would answer."""
        if isinstance(control_req, FlushCacheReq):
            await self._send(FlushCacheOut(control_req.id, dp_rank, False, "the replica is gone"))
        elif isinstance(control_req, GetInternalStateReq):
            await self._send(GetInternalStateOut(control_req.id, _nothing_left(dp_rank)))

    async def _send(self, output: SchedulerOutput) -> None:
        await self._send_to_detokenizer.send_pyobj(output)


def _nothing_left(dp_rank: int) -> SchedulerStats:
    """The state of a replica that is gone."""
    return SchedulerStats(dp_rank, *[0] * 11)


def start_controller_process(server_args: ServerArgs, port_args: PortArgs, pipe_writer: Connection) -> None:
    """The controller's entry: starts the replicas, reports ready with their limits, and deals out requests.

    A replica whose rank is killed is ended as a whole; the last one's end is this process's too.  A rank that
    raised ends everything: what it shows to be wrong is wrong in every replica.
    """
    supervisor = Supervisor()
    serving: list[DataParallelWorker] = []

    def lose_replica(failure: ChildFailed) -> bool:
        lost = [worker for worker in serving if failure.title in worker.titles]
        if failure.exitcode >= 0 or len(serving) == len(lost):
            return False
        for worker in lost:
            serving.remove(worker)
            worker.lose()
            supervisor.end(worker.titles)
        return True

    rpyc_ports = start_model_processes(server_args, port_args, supervisor, lose_replica)
    workers = [DataParallelWorker(server_args, port_args, dp_rank, ports) for dp_rank, ports in enumerate(rpyc_ports)]
    for worker in workers:
        worker.start()
    ready_messages: list[dict[str, Any]] = [worker.ready.result() for worker in workers]
    serving.extend(workers)

    async def control() -> None:
        controller = ControllerMulti(server_args, port_args, workers)
        pipe_writer.send({name: min(message[name] for message in ready_messages) for name in ready_messages[0]})
        await asyncio.gather(controller.loop_for_recv_requests(), controller.loop_for_forward())

    uvloop.run(control())
