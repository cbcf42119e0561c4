"""Each transport alone, and what it costs inside the stage that has it: the second should be near the first.

The stage's figure is read off the steps of one request, in which nothing arrives: all segments of the transport, as
often as it is called.  `step_overhead` and `payload` have the same segments under load.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path

from bench import bare_loops
from bench.live_server import LiveServer
from bench.plan import Case, Figures, Pending, Plan, Setup, What
from bench.suites import setups
from bench.suites.payload import BUFFER
from bench.traced import steps_between

SEGMENTS = {"rpyc": ("rpyc call", "rpyc wait", "obtain"), "gloo": ("broadcast",)}


def cases(plan: Plan) -> list[Case]:
    counts = (400, 60) if plan.full else (150, 5)
    loads = [(0, 0), (1, 0), (16, 0), (1, 4096)] if plan.full else [(0, 0), (1, 4096)]
    found = []
    for arriving, kib in loads:
        for transport, ranks in _transports(plan.full, hops=arriving > 0):
            run = functools.partial(measure, transport, ranks, counts[kib > 0], arriving, kib)
            rounds = plan.once_in_quick if kib else None
            found.append(Case("floors", "bare", _what(transport, ranks, arriving, kib), run, rounds=rounds))
    for setup, transport, ranks in _stages():
        if setup.stage in plan.stages:
            run_on = functools.partial(measure_stage, transport=transport)
            rounds = plan.once_in_quick if setup == BUFFER else None
            found.append(Case("floors", f"stage{setup.stage}", _what(transport, ranks, 0, 0), run_on, setup, rounds))
    return found


def _what(transport: str, ranks: int, arriving: int, image_kib: int) -> What:
    return {"transport": transport, "ranks": ranks, "arriving": arriving, "image_kib": image_kib}


def _stages() -> list[tuple[Setup, str, int]]:
    """The servers whose steps have a transport in them, with its name and the number of ranks it reaches."""
    return [
        (Setup(1, 2, traced=True), "rpyc", 2),
        (Setup(2, 2, traced=True), "rpyc", 2),
        (Setup(3, 2, traced=True), "gloo list", 2),
        (BUFFER, "gloo buffer", 2),
        (setups.in_turn(2, 1, 0.0), "gloo peers", 2),
    ]


def _transports(full: bool, *, hops: bool) -> list[tuple[str, int]]:
    """Names and numbers of ranks; `hops` are those that nothing but a request goes over."""
    sizes = (2, 4) if full else (2,)
    found = [("rpyc", 1), ("rpyc", 2)]
    found += [(f"gloo {codec}", ranks) for codec in ("list", "buffer", "peers") for ranks in sizes]
    return found + ([("zmq", 1), ("mp queue", 1)] if hops else [])


def measure(transport: str, ranks: int, count: int, arriving: int, kib: int) -> Figures:
    """`gloo list` and `gloo buffer` are stage 3's broadcast, `gloo peers` is stage 4's."""
    reqs = bare_loops.requests(arriving, kib * 1024)
    if transport == "rpyc":
        return bare_loops.rpyc_step(ranks, count, reqs)
    if transport == "zmq":
        return bare_loops.zmq_hop(count, reqs)
    if transport == "mp queue":
        return bare_loops.mp_queue_hop(count, reqs)
    return bare_loops.gloo_broadcast(ranks, transport.partition(" ")[2], count, reqs)


def measure_stage(server: LiveServer, transport: str, new_tokens: int = 1500) -> Pending:
    prompts = server.fresh_prompts(1, 128)
    start_ns = time.monotonic_ns()
    server.generate(prompts, new_tokens)
    end_ns = time.monotonic_ns()
    return functools.partial(figures, transport=transport, start_ns=start_ns, end_ns=end_ns)


def figures(trace_dir: Path, *, transport: str, start_ns: int, end_ns: int) -> Figures:
    """Of the transport in one step, in microseconds."""
    steady = [step for step in steps_between(trace_dir, start_ns, end_ns) if step.kind == "decode"]
    names = SEGMENTS[transport.partition(" ")[0]]
    calls = [sum(step.segments.get(name, 0) for name in names) for step in steady]
    if not any(calls):
        raise RuntimeError(f"no step had a segment of {transport}")
    return bare_loops.figures(calls)
