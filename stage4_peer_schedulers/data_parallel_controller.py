"""The data-parallel controller: a process that starts every replica's schedulers and deals out the requests."""

from __future__ import annotations

import dataclasses
from multiprocessing.connection import Connection

import zmq

from shared import pyobj, trace
from shared.launch.supervisor import Supervisor
from shared.messages import PortArgs, SchedulerInput, TokenizedGenerateReqInput
from shared.server_args import ServerArgs
from stage4_peer_schedulers.scheduler import LoadReport, load_report_ipc_name, start_schedulers


class DPBudget:
    """How many requests each replica has: those it last reported, and those dispatched since."""

    def __init__(self, dp_size: int) -> None:
        self._reports = [LoadReport(dp_rank, 0, 0) for dp_rank in range(dp_size)]
        self._dispatched = [0] * dp_size

    def report(self, report: LoadReport) -> None:
        self._reports[report.dp_rank] = report

    def dispatched(self, dp_rank: int) -> None:
        self._dispatched[dp_rank] += 1

    def load(self, dp_rank: int) -> int:
        report = self._reports[dp_rank]
        return report.num_reqs + self._dispatched[dp_rank] - report.num_received


class Dispatcher:
    """Chooses a replica for each request, by --load-balance-method."""

    def __init__(self, load_balance_method: str, dp_size: int) -> None:
        self.budget = DPBudget(dp_size)
        self._dp_size = dp_size
        self._next = 0
        choose = {"round_robin": self._round_robin, "shortest_queue": self._shortest_queue}
        self._choose = choose[load_balance_method]

    def dispatch(self) -> int:
        """The replica of the next request, whose load counts from now on."""
        dp_rank = self._choose()
        self._next = (dp_rank + 1) % self._dp_size
        self.budget.dispatched(dp_rank)
        return dp_rank

    def _round_robin(self) -> int:
        return self._next

    def _shortest_queue(self) -> int:
        """The least loaded replica; of equals, the first after the one that was chosen last."""
        turns = [(self._next + i) % self._dp_size for i in range(self._dp_size)]
        return min(turns, key=self.budget.load)


class DataParallelController:
    """Passes on what the TokenizerManager sends: a request to one replica, everything else to all."""

    def __init__(self, server_args: ServerArgs, port_args: PortArgs) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._recv_from_tokenizer = context.socket(zmq.PULL)
        self._recv_loads = context.socket(zmq.PULL)
        self._workers = [context.socket(zmq.PUSH) for _ in range(server_args.dp_size)]
        for socket in (self._recv_from_tokenizer, self._recv_loads, *self._workers):
            socket.set_hwm(0)
        self._recv_from_tokenizer.bind(port_args.scheduler_input_ipc_name)
        self._recv_loads.bind(load_report_ipc_name(port_args))
        for dp_rank, worker in enumerate(self._workers):
            worker.connect(replica_port_args(port_args, dp_rank).scheduler_input_ipc_name)
        self._dispatcher = Dispatcher(server_args.load_balance_method, server_args.dp_size)
        self._poller = zmq.Poller()
        for socket in (self._recv_from_tokenizer, self._recv_loads):
            self._poller.register(socket, zmq.POLLIN)
        self._trace = trace.track()
        self._poll_ms = None if server_args.sleep_on_idle else 0

    def event_loop(self) -> None:
        while True:
            self._poller.poll(self._poll_ms)
            self._trace.lap("wait")
            self._receive_loads()
            for recv_req in pyobj.drain(self._recv_from_tokenizer, self._trace):
                self.dispatch(recv_req)
            self._trace.end_step()

    def _receive_loads(self) -> None:
        for report in pyobj.drain(self._recv_loads, self._trace):
            self._dispatcher.budget.report(report)

    def dispatch(self, recv_req: SchedulerInput) -> None:
        if isinstance(recv_req, TokenizedGenerateReqInput):
            pyobj.send(self._workers[self._dispatcher.dispatch()], recv_req, self._trace)
        else:
            for worker in self._workers:
                pyobj.send(worker, recv_req, self._trace)


def replica_port_args(port_args: PortArgs, dp_rank: int) -> PortArgs:
    """The addresses that the schedulers of replica `dp_rank` use."""
    name = f"ipc://{port_args.run_dir}/scheduler-dp{dp_rank}"
    return dataclasses.replace(port_args, scheduler_input_ipc_name=name)


def run_data_parallel_controller_process(server_args: ServerArgs, port_args: PortArgs, pipe_writer: Connection) -> None:
    """Process entry: starts the schedulers, reports ready with what every replica takes, and dispatches."""
    controller = DataParallelController(server_args, port_args)
    supervisor = Supervisor()
    for dp_rank in range(server_args.dp_size):
        start_schedulers(server_args, replica_port_args(port_args, dp_rank), dp_rank, supervisor)
    messages = list(supervisor.wait_ready().values())
    limits = {name: min(message[name] for message in messages) for name in messages[0] if name != "status"}
    pipe_writer.send({"status": "ready", **limits})
    controller.event_loop()
