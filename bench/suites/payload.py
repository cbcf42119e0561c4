"""What a picture costs on its way to the ranks: requests for one token, one after the other, on an idle server."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path

import numpy as np

from bench.live_server import LiveServer
from bench.plan import Case, Figures, Pending, Plan, Setup
from bench.suites import setups
from bench.traced import segments_us, steps_between

KIB = (0, 64, 1024, 4096)
PROMPT_TOKENS = 64
BUFFER = Setup(3, 2, variant="buffer", flags=("--broadcast-codec", "buffer"), traced=True)


def cases(plan: Plan) -> list[Case]:
    found = []
    for stage in plan.stages:
        for setup, codec in _setups(stage):
            for kib in KIB:
                what = {**setups.what(setup), **({"codec": codec} if codec else {}), "image_kib": kib}
                run = functools.partial(measure, kib=kib, repeats=_repeats(kib, plan.full))
                found.append(Case("payload", f"stage{stage}", what, run, setup, rounds=plan.once_in_quick))
    return found


def _setups(stage: int) -> list[tuple[Setup, str]]:
    plain = Setup(stage, 2, traced=True)
    if stage == 3:
        return [(plain, "list"), (BUFFER, "buffer")]
    if stage == 4:
        return [(plain, ""), (setups.in_turn(2, 1, 0.0), "")]
    return [(plain, "")]


def _repeats(kib: int, full: bool) -> int:
    """Through a Python list a megabyte takes a good part of a second."""
    return (20 if kib < 1024 else 8) if full else (10 if kib < 1024 else 3)


def measure(server: LiveServer, kib: int, repeats: int) -> Pending:
    picture = os.urandom(kib * 1024) or None
    server.generate(server.fresh_prompts(1, PROMPT_TOKENS), 1, picture)
    latencies = []
    start_ns = time.monotonic_ns()
    for _ in range(repeats):
        prompts = server.fresh_prompts(1, PROMPT_TOKENS)
        sent = time.perf_counter()
        server.generate(prompts, 1, picture)
        latencies.append((time.perf_counter() - sent) * 1e3)
    end_ns = time.monotonic_ns()
    return functools.partial(figures, latencies=latencies, start_ns=start_ns, end_ns=end_ns)


def figures(trace_dir: Path, *, latencies: list[float], start_ns: int, end_ns: int) -> Figures:
    """Latency as the client sees it; segments of the steps that had a request, by request."""
    working = [step for step in steps_between(trace_dir, start_ns, end_ns) if step.forwards]
    return {
        "latency_ms_mean": float(np.mean(latencies)),
        "latency_ms_p50": float(np.median(latencies)),
        "latency_ms_max": max(latencies),
        **segments_us(working, len(latencies)),
    }
