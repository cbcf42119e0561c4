"""The model behind rpyc: one `ModelRpcServer` per rank, and the client through which the router steps them all.

With TP 1 there is no rpyc: the client holds the server and `step` is a plain call.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import rpyc
from rpyc.utils.classic import obtain

from shared import trace
from shared.executor.engine_step import ERA_DECODE_STEPS, EngineStep
from shared.executor.rank import load_rank
from shared.launch.rpyc_transport import connect, fatal, serve
from shared.launch.supervisor import Supervisor
from shared.messages import PortArgs, SchedulerInput, SchedulerOutput
from shared.server_args import ServerArgs


class ModelRpcServer(rpyc.Service):  # type: ignore[misc]
    """One rank: its scheduler and its model, stepped by the router."""

    @fatal
    def exposed_init_model(self, server_args: ServerArgs, port_args: PortArgs, tp_rank: int) -> dict[str, Any]:
        """Loads the model; returns the ready message with this replica's limits."""
        self._takes_netrefs = server_args.tp_size > 1
        if self._takes_netrefs:
            server_args, port_args = obtain(server_args), obtain(port_args)
        rank = load_rank(server_args, port_args, tp_rank)
        steps = server_args.num_continuous_decode_steps or ERA_DECODE_STEPS
        self._engine = EngineStep(rank, decode_steps=steps, cut_on_stream=False)
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


class ModelRpcClient:
    """All ranks as one: `await client.step(recv_reqs)`."""

    def __init__(self, server_args: ServerArgs, port_args: PortArgs) -> None:
        if server_args.tp_size == 1:
            self._local: ModelRpcServer | None = ModelRpcServer()
            self.ready_message = self._local.exposed_init_model(server_args, port_args, 0)
            return
        self._local = None
        ports = start_model_processes(server_args, port_args)
        self._connections = [connect(port, port_args.secret) for port in ports]
        with ThreadPoolExecutor(server_args.tp_size) as pool:  # the ranks load together: they wait for each other
            inits = [
                pool.submit(connection.root.init_model, server_args, port_args, rank)
                for rank, connection in enumerate(self._connections)
            ]
            self.ready_message, *_ = [obtain(init.result()) for init in inits]
        self._trace = trace.track(drives="stage1: model TP0")
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


def start_model_processes(server_args: ServerArgs, port_args: PortArgs) -> list[int]:
    """Starts one model process per rank; returns the rpyc ports they listen on."""
    supervisor = Supervisor()
    for rank in range(server_args.tp_size):
        supervisor.start(f"TP{rank}", f"stage1: model TP{rank}", start_model_process, (port_args,))
    return [ready["port"] for ready in supervisor.wait_ready().values()]


def start_model_process(port_args: PortArgs, pipe_writer: Connection) -> None:
    """A model process's entry: serves one `ModelRpcServer` on a loopback port of the system's choice."""
    serve(ModelRpcServer, port_args.secret, pipe_writer)
