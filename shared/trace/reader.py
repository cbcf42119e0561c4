"""Reads a trace folder, finished or still being written."""

from __future__ import annotations

import marshal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from shared.trace.recorder import LENGTH


class Span(NamedTuple):
    """One part of one process's time.  Times are CLOCK_MONOTONIC ns; `step` numbers the loop's iterations."""

    process: str
    pid: int
    thread: str
    name: str
    start_ns: int
    end_ns: int
    step: int | None
    rids: tuple[str, ...]
    bytes: int | None
    running: int | None


@dataclass(frozen=True)
class StepSpans:
    """One iteration of one loop: its spans tile it.  `drives` is the process that it called, if any."""

    kind: str
    running: int
    forwards: int
    drives: str | None
    spans: tuple[Span, ...]

    @property
    def start_ns(self) -> int:
        return self.spans[0].start_ns

    @property
    def end_ns(self) -> int:
        return self.spans[-1].end_ns


@dataclass(frozen=True)
class Trace:
    """`processes` maps pids to titles; `spans` holds every span, of steps or not, by start."""

    processes: dict[int, str]
    spans: list[Span]
    steps: list[StepSpans] = field(repr=False)


def read(folder: str | Path) -> Trace:
    """The trace in `folder`.  Raises FileNotFoundError where there is none.

    A last block that is cut off, as a killed process leaves it, is passed over.
    """
    files = sorted(Path(folder).glob("*.spans"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no trace (*.spans)")
    processes: dict[int, str] = {}
    spans: list[Span] = []
    steps: list[StepSpans] = []
    for file in files:
        pid, title, drives = 0, "", dict[str, str | None]()
        for kind, *rest in _records(file):
            if kind == "process":
                pid, title = rest
                processes[pid] = title
            elif kind == "track":
                drives[rest[0]] = rest[1]
            elif kind == "span":
                thread, name, start_ns, end_ns, rids, num_bytes = rest
                spans.append(Span(title, pid, thread, name, start_ns, end_ns, None, rids, num_bytes, None))
            else:
                steps.append(_step(title, pid, drives[rest[0][0]], *rest))
    spans += [span for step in steps for span in step.spans]
    return Trace(processes, sorted(spans, key=_start), sorted(steps, key=_start))


def _start(one: Span | StepSpans) -> int:
    return one.start_ns


def _step(
    title: str,
    pid: int,
    drives: str | None,
    head: tuple[str, int, str, int, int, int],
    laps: tuple[Any, ...],
    notes: tuple[tuple[int, int | None, tuple[str, ...]], ...],
) -> StepSpans:
    """`laps` are names and ends in turn; a note belongs to the lap that ends at its place among them."""
    thread, number, kind, running, forwards, start_ns = head
    noted = {place: (num_bytes, rids) for place, num_bytes, rids in notes}
    spans = []
    for place in range(2, len(laps) + 1, 2):
        name, end_ns = laps[place - 2 : place]
        num_bytes, rids = noted.get(place, (None, ()))
        spans.append(Span(title, pid, thread, name, start_ns, end_ns, number, rids, num_bytes, running or None))
        start_ns = end_ns
    return StepSpans(kind, running, forwards, drives, tuple(spans))


def _records(file: Path) -> Iterator[tuple[Any, ...]]:
    data = file.read_bytes()
    at = 0
    while at + LENGTH.size <= len(data):
        (length,) = LENGTH.unpack_from(data, at)
        at += LENGTH.size
        if at + length > len(data):
            return
        yield from marshal.loads(data[at : at + length])
        at += length
