"""The controller above several replicas: deals requests out to their queues."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Protocol

import zmq

from shared import pyobj, trace
from shared.launch.supervisor import Supervisor
from shared.messages import PortArgs, TokenizedGenerateReqInput
from shared.server_args import ServerArgs
from stage3_broadcast import replica_title
from stage3_broadcast.controller_single import ReplicaQueue, start_replica_process


class Loaded(Protocol):
    """Something that has a number of unfinished requests."""

    @property
    def load(self) -> int: ...


class Replica:
    """One replica as the ControllerMulti sees it: its queue, and how many requests went in."""

    def __init__(self, queue: ReplicaQueue) -> None:
        self.queue = queue
        self._dispatched = 0

    @property
    def load(self) -> int:
        """How many requests the replica has that are not finished, in its queue or past it."""
        return self._dispatched - self.queue.finished.value

    def dispatch(self, req: TokenizedGenerateReqInput) -> None:
        self._dispatched += 1
        self.queue.requests.put(req)


class Dispatcher:
    """Chooses a replica for a request.  It knows nothing of what a replica has cached."""

    def __init__(self, load_balance_method: str, replicas: Sequence[Loaded]) -> None:
        self._replicas = replicas
        self._next = 0
        self.choose = {"round_robin": self._round_robin, "shortest_queue": self._shortest_queue}[load_balance_method]

    def _round_robin(self) -> int:
        return self._take(0)

    def _shortest_queue(self) -> int:
        """The replica with the fewest unfinished requests; of equals, the one whose turn it is."""
        n = len(self._replicas)
        return self._take(min(range(n), key=lambda i: self._replicas[(self._next + i) % n].load))

    def _take(self, offset: int) -> int:
        chosen = (self._next + offset) % len(self._replicas)
        self._next = (chosen + 1) % len(self._replicas)
        return chosen


class ControllerMulti:
    """Requests go to one replica, everything else to every one."""

    def __init__(self, server_args: ServerArgs, port_args: PortArgs, queues: list[ReplicaQueue]) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.recv_from_tokenizer = context.socket(zmq.PULL)
        self.recv_from_tokenizer.set_hwm(0)
        self.recv_from_tokenizer.bind(port_args.scheduler_input_ipc_name)
        self.replicas = [Replica(queue) for queue in queues]
        self.dispatcher = Dispatcher(server_args.load_balance_method, self.replicas)
        self.trace = trace.track()
        self.sleep_on_idle = server_args.sleep_on_idle

    def loop_for_forward(self) -> None:
        while True:
            if self.sleep_on_idle:
                self.recv_from_tokenizer.poll()
                self.trace.lap("sleep")
            recv_reqs = pyobj.drain(self.recv_from_tokenizer, self.trace)
            for recv_req in recv_reqs:
                if isinstance(recv_req, TokenizedGenerateReqInput):
                    self.replicas[self.dispatcher.choose()].dispatch(recv_req)
                else:
                    for replica in self.replicas:
                        replica.queue.requests.put(recv_req)
            self.trace.lap_in("queue put", recv_reqs)
            self.trace.end_step()


def start_controller_multi_process(server_args: ServerArgs, port_args: PortArgs, pipe_writer: Connection) -> None:
    """The entry: starts the replicas, reports ready with their limits, and deals out requests."""
    context = multiprocessing.get_context("spawn")
    supervisor = Supervisor()
    queues = []
    for dp_rank in range(server_args.dp_size):
        queue = ReplicaQueue(context.Queue(), context.Value("q", 0))
        title = replica_title(server_args, dp_rank, 0)
        supervisor.start(title, title, start_replica_process, (server_args, port_args, dp_rank, *queue))
        queues.append(queue)
    limits = list(supervisor.wait_ready().values())
    controller = ControllerMulti(server_args, port_args, queues)
    pipe_writer.send({name: min(message[name] for message in limits) for name in limits[0]})
    controller.loop_for_forward()
