"""The router process: collects requests, calls every rank's `step`, sends what rank 0 answers.

Two tasks on one uvloop event loop, as in the release: one receives into a list, the other steps and sleeps.
"""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection

import uvloop
import zmq
import zmq.asyncio

from shared import pyobj, trace
from shared.messages import PortArgs, SchedulerInput, SchedulerStats
from shared.scheduling.outputs import finished_rids
from shared.server_args import ServerArgs
from stage1_rpyc.model_rpc import ModelRpcClient

STEP_SLEEP_S = 0.0006
"""After every step.  uvloop sleeps whole milliseconds, so this takes about 1.1 ms, as it did in the release."""

EXTEND_DEPENDENCY_TIME_S = 0.03
"""More after a step in which a request finished, so that a follow-up can still find its prefix cached."""


class RouterManager:
    """Moves requests from the TokenizerManager to the model and tokens from the model to the detokenizer."""

    def __init__(self, server_args: ServerArgs, port_args: PortArgs, model_client: ModelRpcClient) -> None:
        context = zmq.asyncio.Context()
        self._recv_from_tokenizer = context.socket(zmq.PULL)
        self._recv_from_tokenizer.bind(port_args.scheduler_input_ipc_name)
        self._send_to_detokenizer = context.socket(zmq.PUSH)
        self._send_to_detokenizer.connect(port_args.detokenizer_ipc_name)
        self._model_client = model_client
        self._sleep_on_idle = server_args.sleep_on_idle
        self._recv_reqs: list[SchedulerInput] = []
        self._arrived = asyncio.Event()
        self._idle = True
        self._recv_trace = trace.track("receive")
        self._trace = trace.track()

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
            if finished_rids(outputs):
                await asyncio.sleep(EXTEND_DEPENDENCY_TIME_S)
            if self._sleep_on_idle and self._idle:
                await self._arrived.wait()
            else:
                await asyncio.sleep(STEP_SLEEP_S)
            self._trace.lap("sleep")
            self._trace.end_step(busy=bool(outputs) or not self._idle)


def start_router_process(server_args: ServerArgs, port_args: PortArgs, pipe_writer: Connection) -> None:
    """The router's entry: starts the model, reports ready with its limits, and routes until it is ended."""
    model_client = ModelRpcClient(server_args, port_args)

    async def route() -> None:
        router = RouterManager(server_args, port_args, model_client)
        pipe_writer.send(model_client.ready_message)
        await asyncio.gather(router.loop_for_recv_requests(), router.loop_for_forward())

    uvloop.run(route())
