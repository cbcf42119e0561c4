"""How evenly replicas are loaded, and what that does to the time to the first token.

The even load is of requests alike.  In the skewed one every n-th of n replicas' requests is long, so that taking turns
gives all the long ones to the same replica.
"""

from __future__ import annotations

import functools
import threading

import numpy as np

from bench.live_server import LiveServer
from bench.load import Shot, poisson, run_load
from bench.plan import Case, Figures, Plan, Setup
from bench.suites.serving import prompt

SHORT, LONG = 8, 160
MAX_RUNNING = 8
"""Requests of one replica at a time: few, so that the others wait."""

POLL_S = 0.03


def cases(plan: Plan) -> list[Case]:
    found = []
    for stage in (stage for stage in plan.stages if stage > 1):
        for dp in (2, 4) if plan.full else (2,):
            for method in ("round_robin", "shortest_queue"):
                flags = ("--load-balance-method", method, "--max-running-requests", str(MAX_RUNNING))
                setup = Setup(stage, 1, dp, decode_ms=4, variant=method, flags=flags)
                for skewed in (False, True) if plan.full else (True,):
                    what = {"dp": dp, "method": method, "load": "skewed" if skewed else "even"}
                    run = functools.partial(measure, skewed=skewed, seconds=10.0 if plan.full else 1.0)
                    rounds = plan.once_in_quick
                    found.append(Case("dispatch", f"stage{stage}", what, run, setup, rounds))
    return found


def measure(server: LiveServer, skewed: bool, seconds: float) -> Figures:
    dp = server.setup.dp
    times = poisson(12 * dp, seconds, seed=dp)
    even = (SHORT * (dp - 1) + LONG) // dp
    lengths = [(LONG if i % dp == 0 else SHORT) if skewed else even for i in range(len(times))]
    shots = [Shot(at_s, prompt(i), tokens) for i, (at_s, tokens) in enumerate(zip(times, lengths, strict=True))]
    with _LoadWatch(server) as watch:
        result = run_load(server.url, shots)
    failed = [hit.error for hit in result.hits if hit.error]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(shots)} requests failed, the first with: {failed[0]}")
    ttft = np.array([hit.first_s for hit in result.hits]) * 1e3
    return {
        "requests": len(shots),
        "ttft_ms_p50": float(np.percentile(ttft, 50)),
        "ttft_ms_p90": float(np.percentile(ttft, 90)),
        "ttft_ms_p99": float(np.percentile(ttft, 99)),
        "largest_over_mean_load": watch.largest_over_mean(),
    }


class _LoadWatch(threading.Thread):
    """Asks every replica now and then how many requests it has."""

    def __init__(self, server: LiveServer) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._end = threading.Event()
        self._loads: list[list[int]] = []

    def run(self) -> None:
        while not self._end.wait(POLL_S):
            self._loads.append([state["running"] + state["waiting"] for state in self._server.states()])

    def largest_over_mean(self) -> float:
        """Of the loads summed over time: 1 where all replicas had the same."""
        totals = np.sum(self._loads, axis=0)
        return float(totals.max() / totals.mean())

    def __enter__(self) -> _LoadWatch:
        self.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._end.set()
        self.join()
