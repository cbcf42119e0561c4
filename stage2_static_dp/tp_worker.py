"""The model behind rpyc: a `ModelTpServer` per rank, and the client that steps a replica's ranks as one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import rpyc
from rpyc.utils.classic import obtain

from shared import trace
from shared.executor.engine_step import ERA_DECODE_STEPS, EngineStep
from shared.executor.rank import load_rank
from shared.launch.rpyc_transport import connect, fatal, serve
from shared.launch.supervisor import ChildFailed, Supervisor
from shared.messages import PortArgs, SchedulerInput, SchedulerOutput
from shared.server_args import ServerArgs
from stage2_static_dp import model_title

OnDeath = Callable[[ChildFailed], bool]


class ModelTpServer(rpyc.Service):  # type: ignore[misc]
    """One rank of one replica: its scheduler and its model."""

    @fatal
    def exposed_init_model(
        self, server_args: ServerArgs, port_args: PortArgs, dp_rank: int, tp_rank: int
    ) -> dict[str, Any]:
        """Loads the model; returns the ready message with this replica's limits."""
        self._takes_netrefs = server_args.dp_size * server_args.tp_size > 1
        if self._takes_netrefs:
            server_args, port_args = obtain(server_args), obtain(port_args)
        rank = load_rank(server_args, port_args, tp_rank, dp_rank)
        steps = server_args.num_continuous_decode_steps or ERA_DECODE_STEPS
        self._engine = EngineStep(rank, decode_steps=steps, cut_on_stream=True)
        self._trace = trace.track()
        return rank.ready_message

    @fatal
    def exposed_step(self, recv_reqs: list[SchedulerInput]) -> list[SchedulerOutput]:
        """One step.  Over rpyc `recv_reqs` is a reference, and each rank fetches the list for itself."""
        if self._takes_netrefs:
            self._trace.lap("wait for call")
            recv_reqs = obtain(recv_reqs)
            self._trace.lap_in("obtain", recv_reqs)
        outputs = self._engine.step(recv_reqs)
        if self._takes_netrefs:
            self._trace.end_step(busy=bool(outputs))
        return outputs


class ModelTpClient:
    """All ranks of one replica as one: `await client.step(recv_reqs)`.

    `rpyc_ports` are those of the replica's model processes, in rank order; none where the model is to live in
    this process.  `track` is that of the loop that steps them.
    """

    def __init__(
        self, server_args: ServerArgs, port_args: PortArgs, dp_rank: int, rpyc_ports: list[int], track: trace.NullTrack
    ) -> None:
        self._local = None if rpyc_ports else ModelTpServer()
        if self._local is not None:
            self.ready_message = self._local.exposed_init_model(server_args, port_args, dp_rank, 0)
            return
        self._connections = [connect(port, port_args.secret) for port in rpyc_ports]
        with ThreadPoolExecutor(len(rpyc_ports)) as pool:  # together: the ranks wait for each other
            inits = [
                pool.submit(connection.root.init_model, server_args, port_args, dp_rank, tp_rank)
                for tp_rank, connection in enumerate(self._connections)
            ]
            self.ready_message, *_ = [obtain(init.result()) for init in inits]
        self._trace = track
        self._steps = [rpyc.async_(connection.root.step) for connection in self._connections]

    async def step(self, recv_reqs: list[SchedulerInput]) -> list[SchedulerOutput]:
        """Steps every rank and returns rank 0's answer.  Raises what any rank raised."""
        if self._local is not None:
            return self._local.exposed_step(recv_reqs)
        tasks = [step(recv_reqs) for step in self._steps]
        self._trace.lap("rpyc call")
        await asyncio.gather(*[asyncio.to_thread(task.wait) for task in tasks])
        answers = [task.value for task in tasks]
        self._trace.lap("rpyc wait")
        answer: list[SchedulerOutput] = obtain(answers[0])
        self._trace.lap("obtain")
        return answer


def start_model_processes(
    server_args: ServerArgs, port_args: PortArgs, supervisor: Supervisor, on_death: OnDeath | None = None
) -> list[list[int]]:
    """Starts a model process per replica and rank; returns their rpyc ports by replica and rank.

    The supervisor knows them by their titles.
    """
    titles = [
        model_title(server_args, dp_rank, tp_rank)
        for dp_rank in range(server_args.dp_size)
        for tp_rank in range(server_args.tp_size)
    ]
    for title in titles:
        supervisor.start(title, title, start_model_process, (port_args,), on_death)
    ready = supervisor.wait_ready()
    ports = [ready[title]["port"] for title in titles]
    n = server_args.tp_size
    return [ports[i : i + n] for i in range(0, len(ports), n)]


def start_model_process(port_args: PortArgs, pipe_writer: Connection) -> None:
    """A model process's entry: serves one `ModelTpServer` on a loopback port of the system's choice."""
    serve(ModelTpServer, port_args.secret, pipe_writer)
