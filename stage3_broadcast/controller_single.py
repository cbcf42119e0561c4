"""The controller of one replica, with rank 0 of its model in this very process."""

from __future__ import annotations

import queue
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue
from multiprocessing.sharedctypes import Synchronized
from typing import NamedTuple

import zmq

from shared import pyobj, trace
from shared.launch.supervisor import Supervisor
from shared.messages import PortArgs, SchedulerInput
from shared.scheduling.outputs import finished_rids
from shared.server_args import ServerArgs
from stage3_broadcast.tp_worker import ModelTpServer, broadcast_recv_input, launch_tp_servers

HEARTBEAT_S = 1.0
"""With `--sleep-on-idle`, seconds until an idle controller takes an empty step: the other ranks, who wait in
the broadcast, are shown that it lives, and it sees whether they do."""


class ReplicaQueue(NamedTuple):
    """What a replica shares with the ControllerMulti: requests in, and how many it has finished."""

    requests: Queue[SchedulerInput]
    finished: Synchronized[int]


class ControllerSingle:
    """Takes requests in, tells the other ranks, steps rank 0, and sends what comes out to the detokenizer."""

    def __init__(
        self,
        server_args: ServerArgs,
        port_args: PortArgs,
        tp_server: ModelTpServer,
        replica_queue: ReplicaQueue | None,
    ) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.send_to_detokenizer = context.socket(zmq.PUSH)
        self.send_to_detokenizer.set_hwm(0)
        self.send_to_detokenizer.connect(port_args.detokenizer_ipc_name)
        self.replica_queue = replica_queue
        if replica_queue is None:
            self.recv_from_tokenizer = context.socket(zmq.PULL)
            self.recv_from_tokenizer.set_hwm(0)
            self.recv_from_tokenizer.bind(port_args.scheduler_input_ipc_name)
        self.trace = trace.track()
        self.tp_server = tp_server
        self.tp_cpu_group = tp_server.tp_cpu_group
        self.broadcast_codec = server_args.broadcast_codec
        self.sleep_on_idle = server_args.sleep_on_idle

    def loop_for_forward(self) -> None:
        while True:
            wait_s = HEARTBEAT_S if self.sleep_on_idle and self.tp_server.idle else 0.0
            if self.replica_queue is None:
                recv_reqs = self.recv_requests_from_zmq(wait_s)
            else:
                recv_reqs = self.recv_requests_from_mp_queue(self.replica_queue.requests, wait_s)

            if self.tp_cpu_group is not None:
                broadcast_recv_input(recv_reqs, 0, self.tp_cpu_group, self.broadcast_codec)

            out_pyobjs = self.tp_server.exposed_step(recv_reqs)

            for obj in out_pyobjs:
                pyobj.send(self.send_to_detokenizer, obj, self.trace)
            if self.replica_queue is not None and out_pyobjs:
                self.replica_queue.finished.value += len(finished_rids(out_pyobjs))
            self.trace.end_step(busy=bool(out_pyobjs))

    def recv_requests_from_zmq(self, wait_s: float) -> list[SchedulerInput]:
        """Everything that has arrived; waits up to `wait_s` seconds for something."""
        if wait_s:
            self.recv_from_tokenizer.poll(int(wait_s * 1000))
            self.trace.lap("sleep")
        return pyobj.drain(self.recv_from_tokenizer, self.trace)

    def recv_requests_from_mp_queue(self, requests: Queue[SchedulerInput], wait_s: float) -> list[SchedulerInput]:
        """The same from the ControllerMulti's queue."""
        recv_reqs: list[SchedulerInput] = []
        try:
            if wait_s:
                recv_reqs.append(requests.get(timeout=wait_s))
            while True:
                recv_reqs.append(requests.get_nowait())
        except queue.Empty:
            self.trace.lap("queue get")
            self.trace.lap_in("take requests", recv_reqs)
            return recv_reqs


def start_controller_process(server_args: ServerArgs, port_args: PortArgs, pipe_writer: Connection) -> None:
    """The entry of a server's only controller."""
    _run_controller(server_args, port_args, 0, None, pipe_writer)


def start_replica_process(
    server_args: ServerArgs,
    port_args: PortArgs,
    dp_rank: int,
    requests: Queue[SchedulerInput],
    finished: Synchronized[int],
    pipe_writer: Connection,
) -> None:
    """The entry of a replica's controller below a ControllerMulti."""
    _run_controller(server_args, port_args, dp_rank, ReplicaQueue(requests, finished), pipe_writer)


def _run_controller(
    server_args: ServerArgs,
    port_args: PortArgs,
    dp_rank: int,
    replica_queue: ReplicaQueue | None,
    pipe_writer: Connection,
) -> None:
    """Starts the other ranks, loads rank 0, reports ready with the limits, and works until it is ended."""
    supervisor = Supervisor()
    launch_tp_servers(server_args, port_args, dp_rank, supervisor)
    tp_server = ModelTpServer(server_args, port_args, dp_rank, 0)
    supervisor.wait_ready()
    controller = ControllerSingle(server_args, port_args, tp_server, replica_queue)
    pipe_writer.send(tp_server.ready_message)
    controller.loop_for_forward()
