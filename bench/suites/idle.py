"""What a server without work burns: CPU seconds per second of each process, and of all."""

from __future__ import annotations

import functools
import time
from dataclasses import replace

from bench.live_server import LiveServer
from bench.plan import Case, Figures, Plan, Setup
from bench.suites import setups

SETTLE_S = 0.3


def cases(plan: Plan) -> list[Case]:
    found = []
    for stage in plan.stages:
        for tp in (1, 2) if plan.full else (2,):
            for setup, sleeps in _setups(stage, tp):
                what = {**setups.what(setup), "sleep_on_idle": sleeps}
                run = functools.partial(measure, seconds=5.0 if plan.full else 1.0)
                found.append(Case("idle", f"stage{stage}", what, run, setup, rounds=plan.once_in_quick))
    return found


def _setups(stage: int, tp: int) -> list[tuple[Setup, bool]]:
    """Each server, and whether it sleeps."""
    sleeping = Setup(stage, tp, decode_ms=8, variant="sleep_on_idle", flags=("--sleep-on-idle",))
    found = [(Setup(stage, tp, decode_ms=8), False), (sleeping, True)]
    if stage == 4:
        found.append((replace(setups.in_turn(tp, 1, 8.0), traced=False), False))
    return found


def measure(server: LiveServer, seconds: float) -> Figures:
    server.generate(server.fresh_prompts(1, 16), 4)
    time.sleep(SETTLE_S)
    processes = server.processes()

    def cpu_seconds() -> dict[str, float]:
        times = {name: process.cpu_times() for name, process in processes.items()}
        return {name: spent.user + spent.system for name, spent in times.items()}

    start, before = time.perf_counter(), cpu_seconds()
    time.sleep(seconds)
    after, elapsed = cpu_seconds(), time.perf_counter() - start
    shares = {f"cpu_share_{name}": (after[name] - before[name]) / elapsed for name in processes}
    return {**shares, "cpu_share_all": sum(shares.values())}
