"""Each transport alone, and what it costs inside the stage that has it: the second should be near the first.

The stage's figure is of the steps of one request, in which nothing arrives.  It is what the bare loop's is: the time
in which a rank can do nothing but wait for the transport.  What a rank spends on its own step, or waiting for one that
another has not ended, is no part of it.  `step_overhead` and `payload` have the same segments under load.
"""

from __future__ import annotations

import functools
import re
import time
from bisect import bisect_left
from pathlib import Path

from bench import bare_loops
from bench.live_server import LiveServer
from bench.plan import Case, Figures, Pending, Plan, Setup, What
from bench.suites import setups
from bench.suites.payload import BUFFER
from bench.traced import read
from shared.trace import Span, Trace
from shared.trace.summary import WAITS_FOR_CALL

CALLS = 1000
"""Stalls of some ms, one call in thirty, are half of a mean: fewer calls would compare their luck."""
RPYC_IN_DRIVER = ("rpyc call", "rpyc wait", "obtain")
RPYC_IN_RANK = (WAITS_FOR_CALL, "obtain")


def cases(plan: Plan) -> list[Case]:
    counts = (CALLS, 60) if plan.full else (CALLS, 5)
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
    """One request after another; stages 1 to 3 call once in ten of their tokens."""
    start_ns = time.monotonic_ns()
    for prompt in server.fresh_prompts(CALLS * 10 // new_tokens, 128):
        server.generate([prompt], new_tokens)
    end_ns = time.monotonic_ns()
    return functools.partial(figures, transport=transport, start_ns=start_ns, end_ns=end_ns)


def figures(trace_dir: Path, *, transport: str, start_ns: int, end_ns: int) -> Figures:
    """Of the transport in one step, in microseconds."""
    found = read(trace_dir)
    calls = rpyc_calls_ns(found) if transport == "rpyc" else broadcasts_ns(found)
    times_ns = [ns for at, ns in calls if start_ns <= at <= end_ns]
    if not times_ns:
        raise RuntimeError(f"no step had a segment of {transport}")
    return bare_loops.figures(times_ns)


def rpyc_calls_ns(found: Trace) -> list[tuple[int, int]]:
    """Start and duration of every call for a decode: the driver's time for it without that in which a rank computed."""
    decodes = [step for step in found.steps if step.kind == "decode" and step.spans[0].name == WAITS_FOR_CALL]
    work = _union([(s.start_ns, s.end_ns) for step in decodes for s in step.spans if s.name not in RPYC_IN_RANK])
    starts = [start for start, _ in work]
    calls = []
    for step in found.steps:
        spans = [span for span in step.spans if step.drives and span.name in RPYC_IN_DRIVER]
        if not spans:
            continue
        start, end = spans[0].start_ns, spans[-1].end_ns
        inside = work[bisect_left(starts, start) : bisect_left(starts, end)]  # a call returns when all ranks have
        if inside:
            calls.append((start, end - start - sum(b - a for a, b in inside)))
    return calls


def broadcasts_ns(found: Trace) -> list[tuple[int, int]]:
    """Start and duration of every broadcast before a decode: that of the slowest rank, since it and rank 0 were there.

    A rank that is there early waits for rank 0; one that is late finds the message, and reads it.
    """
    by_rank: dict[str, list[Span]] = {}
    for step in found.steps:
        spans = [span for span in step.spans if span.name == "broadcast"]
        if step.kind == "decode" and spans:
            by_rank.setdefault(spans[0].process, []).append(spans[0])
    if not by_rank:
        return []
    sender, *peers = sorted(by_rank, key=lambda title: (bool(re.search(r"TP[1-9]\d*$", title)), title))
    return [
        (sent.start_ns, max(span.end_ns - max(span.start_ns, sent.start_ns) for span in (sent, *others)))
        for sent, *others in zip(by_rank[sender], *(by_rank[peer] for peer in peers), strict=True)
    ]


def _union(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same times as intervals in order that do not overlap."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined
