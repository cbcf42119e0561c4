"""Figures read off a server's trace: the steps of rank 0 in a span of time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from shared.trace.summary import Step, steps

from bench.plan import Figures, Setup
from shared import trace


def steps_between(trace_dir: Path, setup: Setup, start_ns: int, end_ns: int) -> list[Step]:
    """The steps of the first replica's rank 0 that began and ended in `[start_ns, end_ns]` (monotonic clock)."""
    found = steps(trace.read(trace_dir), stepping_process(setup))
    return [step for step in found if start_ns <= step.start_ns and step.end_ns <= end_ns]


def stepping_process(setup: Setup) -> str:
    """The title of the process whose loop makes the steps of the first replica."""
    replica = "DP0 " if setup.dp > 1 else ""
    if setup.stage == 4:
        return f"stage4: scheduler {replica}TP0"
    raise NotImplementedError(setup.stage)


def per_forward_us(steps: Sequence[Step]) -> np.ndarray:
    """Microseconds of each step over the forwards in it."""
    return np.array([(step.end_ns - step.start_ns) / 1e3 / step.forwards for step in steps])


def segments_us(steps: Sequence[Step], per: float) -> Figures:
    """Microseconds in each segment, all steps together, over `per`."""
    totals: dict[str, int] = {}
    for step in steps:
        for name, spent_ns in step.segments.items():
            totals[name] = totals.get(name, 0) + spent_ns
    return {f"segment_{name}_us": spent_ns / 1e3 / per for name, spent_ns in totals.items()}
