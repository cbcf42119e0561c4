"""Figures read off a server's trace: the steps of the first replica in a span of time."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.plan import Figures
from shared import trace
from shared.trace.summary import Step, loops, steps


def steps_between(trace_dir: Path, start_ns: int, end_ns: int) -> list[Step]:
    """The first replica's steps that began and ended in `[start_ns, end_ns]` (CLOCK_MONOTONIC)."""
    return [step for step in _steps(trace_dir) if start_ns <= step.start_ns and step.end_ns <= end_ns]


def steps_during(trace_dir: Path, start_ns: int, end_ns: int) -> list[Step]:
    """The first replica's steps of which any part lies in `[start_ns, end_ns]`."""
    return [step for step in _steps(trace_dir) if start_ns < step.end_ns and step.start_ns < end_ns]


@functools.lru_cache(maxsize=1)
def read(trace_dir: Path) -> trace.Trace:
    """The trace in `trace_dir`, whose server has stopped."""
    return trace.read(trace_dir)


@functools.lru_cache(maxsize=1)
def _steps(trace_dir: Path) -> list[Step]:
    """The steps of the loop that drives rank 0 of the first replica, or is it."""
    found = read(trace_dir)
    drivers = {(step.spans[0].process, step.spans[0].thread) for step in found.steps if step.drives}
    for title, thread in sorted(loops(found), key=lambda loop: (loop not in drivers, loop)):
        its_steps = steps(found, title, thread)
        if any(step.forwards for step in its_steps):
            return its_steps
    raise RuntimeError(f"{trace_dir} has no steps with a forward")


def per_forward_us(found: Sequence[Step]) -> npt.NDArray[np.float64]:
    """Microseconds of each step over the forwards in it."""
    return np.array([(step.end_ns - step.start_ns) / 1e3 / step.forwards for step in found])


def segments_us(found: Sequence[Step], per: float) -> Figures:
    """Microseconds in each segment, all steps together, over `per`."""
    totals: dict[str, int] = {}
    for step in found:
        for name, spent_ns in step.segments.items():
            totals[name] = totals.get(name, 0) + spent_ns
    return {f"segment_{name.replace(' ', '_')}_us": spent_ns / 1e3 / per for name, spent_ns in totals.items()}
