"""What a step consists of: the parts of each iteration of a scheduler, adding up to its period."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from typing import Literal, cast

from shared.trace.reader import StepSpans, Trace
from shared.trace.recorder import DEVICE_THREAD

Kind = Literal["decode", "prefill", "idle"]
WAITS_FOR_CALL = "wait for call"
"""The rank's time between two calls: it belongs to whoever calls."""
WAITS_FOR_RANK = "rpyc wait"


@dataclass(frozen=True)
class Step:
    """One iteration, times in ns.  `segments` add up to `end_ns - start_ns`.

    In stages 1-3 it is one call of `step`, of `forwards` forwards, with the driver's loop around it.
    `device_ns` is how much of it the device was busy.
    """

    kind: Kind
    running: int
    forwards: int
    start_ns: int
    end_ns: int
    device_ns: int
    segments: dict[str, int]


def loops(trace: Trace) -> list[tuple[str, str]]:
    """Title and thread of every loop, without the ranks that are part of another's."""
    driven = {step.drives for step in trace.steps}
    found = {(step.spans[0].process, step.spans[0].thread) for step in trace.steps}
    return sorted((title, thread) for title, thread in found if title not in driven)


def steps(trace: Trace, process_title: str, thread: str | None = None) -> list[Step]:
    """Every step of the process's loop, in order; `thread` chooses one of several loops (stage 2 with DP).

    In stages 1 and 2 with rpyc `process_title` is the driver's (`stage1: router`), and its rank 0 is added in.
    """
    mine = [
        step
        for step in trace.steps
        if step.spans[0].process == process_title and thread in (None, step.spans[0].thread)
    ]
    drives = mine[0].drives if mine else None
    rank = drives or process_title
    device = [(s.start_ns, s.end_ns) for s in trace.spans if s.process == rank and s.thread == DEVICE_THREAD]
    calls = [step for step in trace.steps if step.forwards and step.spans[0].process == drives]
    call_ends = [call.end_ns for call in calls]
    found = []
    for step in mine:
        at = bisect_left(call_ends, step.start_ns)
        call = calls[at] if at < len(calls) and call_ends[at] <= step.end_ns else None
        found.append(_joined(step, call, device))
    return found


def _joined(step: StepSpans, call: StepSpans | None, device: list[tuple[int, int]]) -> Step:
    """A driver's iteration with what its rank did in it: the rank's parts come out of the driver's wait."""
    segments: Counter[str] = Counter()
    for span in step.spans:
        segments[span.name] += span.end_ns - span.start_ns
    source = step
    if call is not None:
        source = call
        for span in call.spans:
            if span.name != WAITS_FOR_CALL:
                segments[span.name] += span.end_ns - span.start_ns
                segments[WAITS_FOR_RANK] -= span.end_ns - span.start_ns
    return Step(
        cast(Kind, source.kind),
        source.running,
        source.forwards,
        step.start_ns,
        step.end_ns,
        _busy(device, step.start_ns, step.end_ns),
        dict(segments),
    )


def _busy(device: list[tuple[int, int]], start_ns: int, end_ns: int) -> int:
    """How much of an interval lies in the device's, which are in order and do not overlap."""
    busy = 0
    at = max(0, bisect_left(device, (start_ns, 0)) - 1)
    while at < len(device) and device[at][0] < end_ns:
        busy += max(0, min(device[at][1], end_ns) - max(device[at][0], start_ns))
        at += 1
    return busy
