"""What it costs the running requests that k others arrive: 8 decode, and k requests for one token come at once."""

from __future__ import annotations

import functools
import time
from pathlib import Path

import numpy as np

from bench.live_server import LiveServer
from bench.plan import Case, Figures, Pending, Plan, Setup
from bench.suites import setups
from bench.traced import steps_between, steps_during

BACKGROUND = 8
BACKGROUND_TOKENS = 3900
PROMPT_TOKENS = 16
QUIET_S = 0.03


def cases(plan: Plan) -> list[Case]:
    found = []
    for setup in setups.steady(plan):
        if setup.dp > 1 or setup.decode_ms or setup.device != "sim" or (setup.tp == 1 and not plan.full):
            continue
        for arriving in (0, 1, 16, 64):
            what = {**setups.what(setup), "arriving": arriving, "running": BACKGROUND}
            run = functools.partial(measure, arriving=arriving, repeats=8 if plan.full else 3)
            found.append(Case("arrivals", f"stage{setup.stage}", what, run, setup))
    return found


def measure(server: LiveServer, arriving: int, repeats: int) -> Pending:
    windows = []
    for _ in range(repeats):
        with server.background(BACKGROUND, BACKGROUND_TOKENS):
            start_ns = time.monotonic_ns()
            time.sleep(QUIET_S)
            sent_ns = time.monotonic_ns()
            if arriving:
                server.generate(server.fresh_prompts(arriving, PROMPT_TOKENS), 1)
            else:
                time.sleep(QUIET_S)
            windows.append((start_ns, sent_ns, time.monotonic_ns()))
    return functools.partial(figures, setup=server.setup, arriving=arriving, windows=windows)


def figures(trace_dir: Path, *, setup: Setup, arriving: int, windows: list[tuple[int, int, int]]) -> Figures:
    """Medians over the repeats.  `extra` is what the steps took beyond as many decode forwards before the arrival."""
    extra, longest = [], []
    for start_ns, sent_ns, end_ns in windows:
        before = steps_between(trace_dir, start_ns, sent_ns)
        meanwhile = steps_during(trace_dir, sent_ns, end_ns)
        usual = [(step.end_ns - step.start_ns) / step.forwards for step in before if step.forwards]
        if not usual or not meanwhile:
            raise RuntimeError(f"{setup.name}: no step before or during an arrival")
        decodes = sum(step.forwards for step in meanwhile if step.kind == "decode")
        took = sum(step.end_ns - step.start_ns for step in meanwhile)
        extra.append((took - decodes * float(np.mean(usual))) / 1e3)
        longest.append(max(step.end_ns - step.start_ns for step in meanwhile) / 1e3)
    return {
        "extra_us_median": float(np.median(extra)),
        "extra_per_request_us_median": float(np.median(extra)) / max(1, arriving),
        "longest_step_us_median": float(np.median(longest)),
    }
