"""Each transport alone, for the stages' transports to be held against.

Nothing is measured on a server here: what the stages take is in `step_overhead` (nothing arrives in a steady step) and
in `payload`, of the same run.
"""

from __future__ import annotations

import functools

from bench import bare_loops
from bench.plan import Case, Figures, Plan, What


def cases(plan: Plan) -> list[Case]:
    counts = (400, 60) if plan.full else (150, 10)
    loads = [(0, 0), (1, 0), (16, 0), (1, 4096)] if plan.full else [(0, 0), (1, 4096)]
    found = []
    for arriving, kib in loads:
        for transport, ranks in _transports(plan.full, hops=arriving > 0):
            what: What = {
                "transport": transport,
                "ranks": ranks,
                "arriving": arriving,
                "image_kib": kib,
            }
            run = functools.partial(measure, transport, ranks, counts[kib > 0], arriving, kib)
            found.append(Case("floors", "bare", what, run, rounds=1 if kib and not plan.full else None))
    return found


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
