"""The controller of a server with one replica: stage 1's router under its new name.

Two tasks on one uvloop event loop: one receives into a list, the other steps, sends and sleeps.
"""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection

import uvloop
import zmq
import zmq.asyncio

from shared import pyobj, trace
from shared.launch.supervisor import Supervisor
from shared.messages import PortArgs, SchedulerInput, SchedulerStats
from shared.scheduling.outputs import finished_rids
from shared.server_args import ServerArgs
from stage2_static_dp import model_title
from stage2_static_dp.tp_worker import ModelTpClient, start_model_processes

STEP_SLEEP_S = 0.0004
"""After a step without a finish.  uvloop counts whole milliseconds: this only yields, and the loop spins."""

EXTEND_DEPENDENCY_TIME_S = 0.02
"""After a step in which a request finished, so that a follow-up can still find its prefix cached."""


class ControllerSingle:
    """Moves requests from the TokenizerManager to the model and tokens from the model to the detokenizer."""

    def __init__(self, server_args: ServerArgs, port_args: PortArgs, model_client: ModelTpClient) -> None:
        context = zmq.asyncio.Context()
        self._recv_from_tokenizer = context.socket(zmq.PULL)
        self._send_to_detokenizer = context.socket(zmq.PUSH)
        for socket in (self._recv_from_tokenizer, self._send_to_detokenizer):
            socket.set_hwm(0)
        self._recv_from_tokenizer.bind(port_args.scheduler_input_ipc_name)
        self._send_to_detokenizer.connect(port_args.detokenizer_ipc_name)
        self._model_client = model_client
        self._sleep_on_idle = server_args.sleep_on_idle
        self._recv_reqs: list[SchedulerInput] = []
        self._arrived = asyncio.Event()
        self._idle = True
        self._recv_trace = trace.track("receive")
        self._trace = driver_track(server_args)

    async def loop_for_recv_requests(self) -> None:
        while True:
            recv_req = await pyobj.recv_async(self._recv_from_tokenizer, self._recv_trace)
            self._recv_reqs.append(recv_req)
            self._arrived.set()

    async def loop_for_forward(self) -> None:
        while True:
            recv_reqs, self._recv_reqs = self._recv_reqs, []
            self._arrived.clear()
            self._trace.lap_in("take requests", recv_reqs)
            outputs = await self._model_client.step(recv_reqs)
            for output in outputs:
                if isinstance(output, SchedulerStats):
                    self._idle = output.running + output.waiting == 0
                await pyobj.send_async(self._send_to_detokenizer, output, self._trace)
            if self._sleep_on_idle and self._idle:
                await self._arrived.wait()
            elif finished_rids(outputs):
                await asyncio.sleep(EXTEND_DEPENDENCY_TIME_S)
            else:
                await asyncio.sleep(STEP_SLEEP_S)
            self._trace.lap("sleep")
            self._trace.end_step(busy=bool(outputs) or not self._idle)


def driver_track(server_args: ServerArgs) -> trace.NullTrack:
    """The track of the loop, which steps the model in this process or its ranks elsewhere."""
    return trace.track(drives=None if server_args.tp_size == 1 else model_title(server_args, 0, 0))


def start_controller_process(server_args: ServerArgs, port_args: PortArgs, pipe_writer: Connection) -> None:
    """The controller's entry: starts the model, reports ready with its limits, works until it is ended."""
    rpyc_ports: list[int] = []
    if server_args.tp_size > 1:
        (rpyc_ports,) = start_model_processes(server_args, port_args, Supervisor())
    model_client = ModelTpClient(server_args, port_args, 0, rpyc_ports, driver_track(server_args))

    async def control() -> None:
        controller = ControllerSingle(server_args, port_args, model_client)
        pipe_writer.send(model_client.ready_message)
        await asyncio.gather(controller.loop_for_recv_requests(), controller.loop_for_forward())

    uvloop.run(control())
