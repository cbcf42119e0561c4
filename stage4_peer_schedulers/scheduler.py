"""A scheduler process: one rank, which receives, decides, runs its model and answers.

All ranks of a replica are peers that decide the same.  Only rank 0 has sockets: it broadcasts what arrived,
and its answers are the ones that leave.
"""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection

import zmq

from shared import pyobj, trace
from shared.executor.forward_batch import ForwardResult
from shared.launch.supervisor import Supervisor
from shared.messages import PortArgs, SchedulerInput, TokenizedGenerateReqInput
from shared.scheduling.batch import ScheduleBatch
from shared.scheduling.core import SchedulerCore
from shared.server_args import ServerArgs
from stage4_peer_schedulers.server import local_tp_ranks, scheduler_title
from stage4_peer_schedulers.tp_worker import TpModelWorker
from stage4_peer_schedulers.tp_worker_overlap_thread import TpModelWorkerClient

IDLE_POLL_MS = 1000
"""With --sleep-on-idle the ranks still meet this often, so that no collective waits for long and a peer that
is gone is noticed."""


@dataclass(frozen=True)
class LoadReport:
    """To the data-parallel controller: requests that run or wait, and how many have ever been received."""

    dp_rank: int
    num_reqs: int
    num_received: int


class Scheduler:
    """One rank's loop: receive, process input, form the next batch, run it, process its result.

    `dp_rank` is None without data parallelism.
    """

    def __init__(
        self, server_args: ServerArgs, port_args: PortArgs, gpu_id: int, tp_rank: int, dp_rank: int | None
    ) -> None:
        self.tp_worker = TpModelWorker(server_args, port_args, gpu_id, tp_rank, dp_rank or 0)
        rank = self.tp_worker.rank
        self.core = SchedulerCore(rank.config)
        self.enable_overlap = rank.config.overlap
        self._tp_group = rank.tp_group
        self._checker = rank.checker
        self._sleep_on_idle = server_args.sleep_on_idle
        self._decode_steps = server_args.num_continuous_decode_steps or 1
        self._decode_step = 0
        self._num_received = 0
        self._last_report = LoadReport(dp_rank or 0, 0, 0)
        self._send_to_controller: zmq.Socket[bytes] | None = None
        self._is_rank_0 = tp_rank == 0
        self._trace = trace.track()
        if self._is_rank_0:
            self._open_sockets(port_args, dp_rank)

    def _open_sockets(self, port_args: PortArgs, dp_rank: int | None) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._recv_from_tokenizer = context.socket(zmq.PULL)
        self._send_to_detokenizer = context.socket(zmq.PUSH)
        for socket in (self._recv_from_tokenizer, self._send_to_detokenizer):
            socket.set_hwm(0)
        self._recv_from_tokenizer.bind(port_args.scheduler_input_ipc_name)
        self._send_to_detokenizer.connect(port_args.detokenizer_ipc_name)
        if dp_rank is not None:
            self._send_to_controller = context.socket(zmq.PUSH)
            self._send_to_controller.connect(load_report_ipc_name(port_args))

    # The loops

    def event_loop_normal(self) -> None:
        """Every batch is processed before the next one is formed."""
        while True:
            self.process_input_requests(self.recv_requests())
            batch = self.get_next_batch_to_run()
            if batch is not None:
                result = self.tp_worker.forward_batch_generation(batch)
                self.process_batch_result(batch, result)
            self.send_outputs()
            self._trace.end_step()

    def event_loop_overlap(self) -> None:
        """Batch k+1 is launched before the result of batch k is looked at."""
        worker = TpModelWorkerClient(self.tp_worker)
        last_batch: ScheduleBatch | None = None
        while True:
            self.process_input_requests(self.recv_requests())
            batch = self.get_next_batch_to_run()
            if batch is not None:
                worker.forward_batch_generation(batch)
            if last_batch is not None:
                self.process_batch_result(last_batch, worker.resolve_batch_result())
            self.send_outputs()
            self._trace.end_step(busy=last_batch is not None)
            last_batch = batch

    # The verbs

    def recv_requests(self) -> list[SchedulerInput]:
        """What has arrived, the same on every rank; a collective of the replica, also with nothing to do.

        Nothing is received between the decodes of one --num-continuous-decode-steps.
        """
        if self._decode_step:
            return []
        recv_reqs: list[SchedulerInput] = []
        if self._is_rank_0:
            if self._sleep_on_idle and self.core.idle:
                self._recv_from_tokenizer.poll(IDLE_POLL_MS)
                self._trace.lap("sleep")
            recv_reqs = pyobj.drain(self._recv_from_tokenizer, self._trace)
        return self._tp_group.broadcast_pyobj(recv_reqs)

    def process_input_requests(self, recv_reqs: list[SchedulerInput]) -> None:
        if recv_reqs:
            self._num_received += sum(isinstance(recv, TokenizedGenerateReqInput) for recv in recv_reqs)
            self.core.process_input_requests(recv_reqs)
            self._trace.lap("process input")

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        batch = self.core.get_next_batch_to_run(decode_only=self._decode_step > 0)
        if self._checker is not None:
            self._checker.check_batch(batch, self.core.forwards)
        self._trace.lap_batch(batch)
        decodes = batch is not None and not batch.is_prefill
        self._decode_step = (self._decode_step + 1) % self._decode_steps if decodes else 0
        return batch

    def process_batch_result(self, batch: ScheduleBatch, result: ForwardResult) -> None:
        if self._checker is not None:
            self._checker.add_result(batch, result)
        self.core.process_batch_result(batch, result)
        self._trace.lap("process result")

    def send_outputs(self) -> None:
        """Rank 0 sends what is due to the detokenizer, and its load to the controller if it has changed."""
        outputs = self.core.take_outputs()
        self._trace.lap("collect outputs")
        if not self._is_rank_0:
            return
        for output in outputs:
            pyobj.send(self._send_to_detokenizer, output, self._trace)
        if self._send_to_controller is not None:
            self._report_load(self._send_to_controller)

    @property
    def _num_reqs(self) -> int:
        batcher = self.core.batcher
        return batcher.num_running + len(batcher.waiting)

    def _report_load(self, controller: zmq.Socket[bytes]) -> None:
        report = LoadReport(self._last_report.dp_rank, self._num_reqs, self._num_received)
        if report != self._last_report:
            self._last_report = report
            pyobj.send(controller, report, self._trace)


def load_report_ipc_name(port_args: PortArgs) -> str:
    """Where the data-parallel controller collects the `LoadReport`s."""
    return f"ipc://{port_args.run_dir}/load"


def run_scheduler_process(
    server_args: ServerArgs,
    port_args: PortArgs,
    gpu_id: int,
    tp_rank: int,
    dp_rank: int | None,
    pipe_writer: Connection,
) -> None:
    """Process entry: builds the scheduler, reports ready with its limits, and runs its loop."""
    scheduler = Scheduler(server_args, port_args, gpu_id, tp_rank, dp_rank)
    pipe_writer.send(scheduler.tp_worker.rank.ready_message)
    if scheduler.enable_overlap:
        scheduler.event_loop_overlap()
    else:
        scheduler.event_loop_normal()


def start_schedulers(server_args: ServerArgs, port_args: PortArgs, dp_rank: int | None, supervisor: Supervisor) -> None:
    """Starts this node's schedulers of one replica; `dp_rank` is None without data parallelism."""
    tp_ranks = local_tp_ranks(server_args)
    for local_rank, tp_rank in enumerate(tp_ranks):
        title = scheduler_title(tp_rank, dp_rank)
        gpu_id = (dp_rank or 0) * len(tp_ranks) + local_rank
        args = (server_args, port_args, gpu_id, tp_rank, dp_rank)
        supervisor.start(title, title, run_scheduler_process, args)
