"""What a decode step takes beyond the device: the price of a process model, and in which segments it lies.

N requests start together and none ends early; the steps in which all N decode are the steady ones.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path

import numpy as np

from bench.live_server import LiveServer
from bench.plan import Case, Figures, Pending, Plan, Setup
from bench.suites import setups
from bench.traced import per_forward_us, segments_us, steps_between

PROMPT_TOKENS = 128


def cases(plan: Plan) -> list[Case]:
    found = []
    for setup in setups.steady(plan):
        for running in _running(setup, plan.full):
            what = {**setups.what(setup), "running": running}
            run = functools.partial(measure, running=running, new_tokens=_new_tokens(setup, running, plan.full))
            rounds = plan.once_in_quick if setup.dp > 1 else None
            found.append(Case("step_overhead", f"stage{setup.stage}", what, run, setup, rounds))
    return found


def _running(setup: Setup, full: bool) -> tuple[int, ...]:
    """How many requests run on each replica; 1 and 32 are what the releases were measured at."""
    if setup.device != "sim":
        return (1, 8)
    return (1, 8, 32, 64, 256) if full else (1, 32)


def _new_tokens(setup: Setup, running: int, full: bool) -> int:
    """Enough for a second or so of steady steps, and not more than the pool holds."""
    if setup.device != "sim":
        return 32
    if not full:
        return 1200
    return 120 if setup.decode_ms else 2000 if running <= 64 else 600


def measure(server: LiveServer, running: int, new_tokens: int) -> Pending:
    prompts = server.fresh_prompts(running * server.setup.dp, PROMPT_TOKENS)
    start_ns = time.monotonic_ns()
    server.generate(prompts, new_tokens)
    end_ns = time.monotonic_ns()
    return functools.partial(figures, setup=server.setup, running=running, start_ns=start_ns, end_ns=end_ns)


def figures(trace_dir: Path, *, setup: Setup, running: int, start_ns: int, end_ns: int) -> Figures:
    """Of one decode forward.  `overhead` is the period less the device's time."""
    found = steps_between(trace_dir, start_ns, end_ns)
    steady = [step for step in found if step.kind == "decode" and step.running == running]
    if not steady:
        raise RuntimeError(f"{setup.name}: no step had all {running} requests running")
    forwards = sum(step.forwards for step in steady)
    period = per_forward_us(steady)
    mean = sum(step.end_ns - step.start_ns for step in steady) / 1e3 / forwards
    device = sum(step.device_ns for step in steady) / 1e3 / forwards
    return {
        "period_us_mean": mean,
        "period_us_median": float(np.median(period)),
        "period_us_p90": float(np.percentile(period, 90)),
        "period_us_p99": float(np.percentile(period, 99)),
        "device_us_mean": device,
        "overhead_us_mean": mean - device,
        "overhead_per_token_us_mean": (mean - device) / running,
        "step_us_mean": mean * forwards / len(steady),
        "forwards": forwards,
        **segments_us(steady, forwards),
    }
