"""The transports alone: the calls that a stage makes, in a loop, between processes that do nothing else.

What a stage's transport takes beyond this is the stage's own doing.  A request is a `TokenizedGenerateReqInput` of 512
ids, with a picture where a payload is asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

import numpy as np
import rpyc
import zmq
from rpyc.utils.classic import obtain

from bench import scheduler_cost
from bench.plan import Figures
from shared.executor.engine_step import ERA_DECODE_STEPS
from shared.launch.rpyc_transport import connect, serve
from shared.messages import SamplingParams, SchedulerInput, TokenizedGenerateReqInput
from shared.scheduling.core import SchedulerCore

WARM_UP = 3
DECODES_BETWEEN_CALLS = {"list": ERA_DECODE_STEPS, "buffer": ERA_DECODE_STEPS, "peers": 1}
"""Of stages 3 and 4."""
Requests = list[SchedulerInput]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch.distributed", "stage3_broadcast.tp_worker"])  # once, and not in every process


def requests(count: int, payload_bytes: int = 0) -> Requests:
    """`count` requests, each with a picture of `payload_bytes`."""
    picture = os.urandom(payload_bytes) if payload_bytes else None
    ids = np.arange(512, dtype=np.int64)
    return [TokenizedGenerateReqInput(f"{i:032}", ids, SamplingParams(), image_data=picture) for i in range(count)]


def figures(times_ns: list[int]) -> Figures:
    """Of one call, in microseconds."""
    us = np.array(times_ns[WARM_UP:]) / 1e3
    return {
        "call_us_mean": float(us.mean()),
        "call_us_median": float(np.median(us)),
        "call_us_p90": float(np.percentile(us, 90)),
        "call_us_p99": float(np.percentile(us, 99)),
    }


def _timed(call: Callable[[], object], count: int) -> list[int]:
    times = []
    for _ in range(WARM_UP + count):
        start = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - start)
    return times


@contextlib.contextmanager
def _processes(targets: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> Iterator[list[Connection]]:
    """Each target in a process of its own, called with its arguments and a pipe; they are ended on leaving."""
    started: list[tuple[ForkServerProcess, Connection]] = []
    try:
        for target, args in targets:
            ours, theirs = _context.Pipe()
            process = _context.Process(target=target, args=(*args, theirs), daemon=True)
            process.start()
            theirs.close()
            started.append((process, ours))
        yield [pipe for _, pipe in started]
    finally:
        for process, _ in started:
            process.kill()
        for process, _ in started:
            process.join()


# rpyc: an asynchronous call to every rank, a thread that waits for each, and the answer fetched


class _Echo(rpyc.Service):  # type: ignore[misc]
    def exposed_step(self, recv_reqs: Requests) -> list[Any]:
        obtain(recv_reqs)
        return []


def _serve_echo(secret: bytes, pipe: Connection) -> None:
    serve(_Echo, secret, pipe)


def rpyc_step(ranks: int, count: int, recv_reqs: Requests) -> Figures:
    """Stages 1 and 2: one step of `ranks` ranks over rpyc."""
    secret = secrets.token_bytes(32)

    async def loop(steps: list[Callable[[Requests], Any]]) -> list[int]:
        async def call() -> None:
            tasks = [step(recv_reqs) for step in steps]
            await asyncio.gather(*[asyncio.to_thread(task.wait) for task in tasks])
            obtain(tasks[0].value)

        return await _timed_async(call, count)

    with _processes([(_serve_echo, (secret,))] * ranks) as pipes:
        connections = [connect(pipe.recv()["port"], secret) for pipe in pipes]
        return figures(asyncio.run(loop([rpyc.async_(connection.root.step) for connection in connections])))


async def _timed_async(call: Callable[[], Awaitable[None]], count: int) -> list[int]:
    times = []
    for _ in range(WARM_UP + count):
        start = time.perf_counter_ns()
        await call()
        times.append(time.perf_counter_ns() - start)
    return times


# gloo: a broadcast from rank 0 to its peers


def _broadcast_rank(
    rank: int, ranks: int, address: str, codec: str, count: int, recv_reqs: Requests, pipe: Connection
) -> None:
    """Sends the start and the end of every call, ns.

    Before each comes a barrier, so that the ranks come together, and the scheduler's work of a stage, which leaves the
    processor's caches as a call finds them there: without it a call takes two thirds.
    """
    import torch
    import torch.distributed as dist

    from shared.parallel.tp_group import init_tp_group
    from stage3_broadcast.tp_worker import broadcast_recv_input

    torch.set_num_threads(1)
    group = init_tp_group(rank, ranks, address)
    assert group.cpu_group is not None
    work = _decode_steps()
    times = []
    for _ in range(WARM_UP + count):
        dist.barrier(group=group.check_group)
        for _ in range(DECODES_BETWEEN_CALLS[codec]):
            next(work)
        start = time.monotonic_ns()  # one clock for all ranks
        if codec == "peers":
            group.broadcast_pyobj(recv_reqs)
        else:
            broadcast_recv_input(recv_reqs, rank, group.cpu_group, codec)
        times.append((start, time.monotonic_ns()))
    pipe.send(times)
    pipe.recv()  # a rank that left early would break the others' last collective


def _decode_steps() -> Iterator[None]:
    """A scheduler with one request and no model; each `next` is one step."""
    core = SchedulerCore(scheduler_cost.make_config(running=1))
    rng = np.random.default_rng(0)
    while True:
        batch = core.get_next_batch_to_run()
        if batch is None:
            core.process_input_requests([scheduler_cost.request(0, rng, prompt=scheduler_cost.PROMPT_TOKENS)])
        else:
            scheduler_cost.finish(core, batch)
            yield


def gloo_broadcast(ranks: int, codec: str, count: int, recv_reqs: Requests) -> Figures:
    """Stage 3 with `codec` "list" or "buffer", stage 4 with "peers": one step's broadcast.

    The time is that of the slowest rank, call by call, since it and rank 0 were there: a step can go on when all
    ranks have its requests.
    """
    with tempfile.TemporaryDirectory(prefix="bare-") as folder:
        address = f"file://{folder}/ranks"
        targets = [
            (_broadcast_rank, (rank, ranks, address, codec, count, recv_reqs if rank == 0 else []))
            for rank in range(ranks)
        ]
        with _processes(targets) as pipes:
            starts, ends = np.moveaxis(np.array([pipe.recv() for pipe in pipes]), -1, 0)
            return figures((ends - np.maximum(starts, starts[0])).max(axis=0).tolist())


# One hop to another process and back


def _zmq_echo(run_dir: str, pipe: Connection) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.bind(f"ipc://{run_dir}/there")
    push.connect(f"ipc://{run_dir}/back")
    pipe.send("ready")
    while True:
        push.send_pyobj(pull.recv_pyobj())


def zmq_hop(count: int, recv_reqs: Requests) -> Figures:
    """Half of a way there and back over PUSH/PULL sockets, the list as one pickle."""
    with tempfile.TemporaryDirectory(prefix="bare-") as folder:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        pull.bind(f"ipc://{folder}/back")
        try:
            with _processes([(_zmq_echo, (folder,))]) as (pipe,):
                pipe.recv()
                push.connect(f"ipc://{folder}/there")

                def call() -> None:
                    push.send_pyobj(recv_reqs)
                    pull.recv_pyobj()

                return figures([ns // 2 for ns in _timed(call, count)])
        finally:
            context.destroy(linger=0)


def _queue_echo(there: Any, back: Any, pipe: Connection) -> None:
    pipe.send("ready")
    while True:
        back.put(there.get())


def mp_queue_hop(count: int, recv_reqs: Requests) -> Figures:
    """Half of a way there and back over `multiprocessing.Queue`."""
    there: Any = _context.Queue()
    back: Any = _context.Queue()
    with _processes([(_queue_echo, (there, back))]) as (pipe,):
        pipe.recv()

        def call() -> None:
            there.put(recv_reqs)
            back.get()

        found = figures([ns // 2 for ns in _timed(call, count)])
    for one in (there, back):
        one.cancel_join_thread()
        one.close()
    return found
