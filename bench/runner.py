"""Measures the cases of a plan, round by round, and hands over each one's figures as soon as they are there."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import cast

from bench.live_server import LiveServer, serving
from bench.plan import Case, Figures, Measure, Pending


@dataclass(frozen=True)
class Measured:
    """A case with its figures; `seconds` is how long it took, without the start of the server."""

    case: Case
    figures: Figures
    started: str
    seconds: float


@dataclass(frozen=True)
class Failed:
    """A case that gave no figures, and why."""

    case: Case
    error: Exception


OnDone = Callable[[Measured | Failed], None]


def measure_unit(cases: Sequence[Case], on_done: OnDone) -> None:
    """Measures cases that share a setup (or have none), one after the other on one server.

    A case or server that fails is reported like a result; what is interrupted leaves no process behind.
    """
    setup = cases[0].setup
    if setup is None:
        for case in cases:
            _measure(case, cast(Callable[[], Figures], case.run), on_done)
        return
    waiting: list[tuple[Case, Pending, str, float]] = []
    with tempfile.TemporaryDirectory(prefix="bench-trace-") as folder:
        trace_dir = Path(folder)
        done: set[str] = set()

        def take(result: Measured | Failed) -> None:
            done.add(result.case.key)
            on_done(result)

        try:
            with serving(setup, trace_dir if setup.traced else None) as server:
                for case in cases:
                    waiting += _measure_on(server, case, take)
        except Exception as error:
            for case in cases:
                if case.key not in done:
                    on_done(Failed(case, error))
            return
        for case, pending, started, seconds in waiting:
            try:
                on_done(Measured(case, pending(trace_dir), started, seconds))
            except Exception as error:
                on_done(Failed(case, error))


def _measure_on(server: LiveServer, case: Case, take: OnDone) -> list[tuple[Case, Pending, str, float]]:
    """The case, where its figures have to wait for the trace."""
    started, start = _now(), time.perf_counter()
    try:
        got = cast(Measure, case.run)(server)
    except Exception as error:
        take(Failed(case, error))
        return []
    seconds = time.perf_counter() - start
    if callable(got):
        return [(case, got, started, seconds)]
    take(Measured(case, got, started, seconds))
    return []


def _measure(case: Case, run: Callable[[], Figures], on_done: OnDone) -> None:
    started, start = _now(), time.perf_counter()
    try:
        figures = run()
    except Exception as error:
        on_done(Failed(case, error))
        return
    on_done(Measured(case, figures, started, time.perf_counter() - start))


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
