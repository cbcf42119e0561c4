"""The main table: four designs and what each of them costs; and the releases' own figures beside ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.report.estimate import Estimate, number, shown
from bench.report.sections import FREE_DEVICE, Grid
from bench.report.table import Table

_RELEASES = Path(__file__).parent.parent / "releases.json"

DESIGNS = {
    "stage 1": ("router calls rpyc on every rank", "every rank's model process; rank 0's answer counts"),
    "stage 2": ("controller, queue, replica's thread, then rpyc to every rank", "as stage 1"),
    "stage 3": ("rank 0 broadcasts a pickle over gloo", "the control process is rank 0; every other rank repeats it"),
    "stage 4, in turn": ("rank 0 broadcasts, before every forward", "each rank's scheduler process"),
    "stage 4": ("the same", "each rank's scheduler process, one batch ahead of the device"),
}
"""How a request reaches each rank, and where scheduling runs."""


def main_table(table: Table) -> Grid:
    """What the README carries.  A cell is a median over the rounds, with their interval."""
    heads = (
        "design",
        "how a request reaches each rank",
        "where scheduling runs",
        "TP 1: µs a forward, 1 / 32 running",
        "TP 2: µs a forward, 1 / 32 running",
        "4 MiB picture, TP 2: ms",
        "idle, TP 2: cores",
        "start, TP 2: s",
        "memory beside the model, TP 2: MB",
    )
    rows = []
    for label, (reaches, schedules) in DESIGNS.items():
        periods = [" / ".join(shown(_period(table, label, tp, running)) for running in (1, 32)) for tp in (1, 2)]
        others = [
            _picture(table, label),
            _idle(table, label),
            table.figure("ready_s", "start_memory", label, tp=2, dp=1),
            table.figure("pss_mb_all", "start_memory", label, tp=2, dp=1),
        ]
        rows.append([label, reaches, schedules, *periods, *map(shown, others)])
    return Grid(heads, rows)


def _period(table: Table, label: str, tp: int, running: int, dp: int = 1) -> Estimate | None:
    case = {"tp": tp, "dp": dp, "device": FREE_DEVICE, "running": running}
    return table.figure("period_us_mean", "step_overhead", label, **case)


def _picture(table: Table, label: str, codec: str = "list") -> Estimate | None:
    case = {"codec": codec} if label == "stage 3" else {}
    return table.figure("latency_ms_p50", "payload", label, image_kib=4096, **case)


def _idle(table: Table, label: str) -> Estimate | None:
    return table.figure("cpu_share_all", "idle", label, tp=2, sleep_on_idle=False)


def lookups(table: Table) -> dict[str, Callable[..., str]]:
    """What a page asks for by name: medians as text, a dash where there is none."""

    def median(estimate: Estimate | None) -> str:
        return "–" if estimate is None else number(estimate.median)

    def dispatch(label: str, method: str) -> str:
        return median(table.figure("ttft_ms_p99", "dispatch", label, dp=2, method=method, load="skewed"))

    def release(name: str, layout: str, running: str) -> str:
        (cell,) = [
            cell["period_us_mean"][running]
            for release in releases()["releases"]
            for cell in release["cells"]
            if (release["release"], cell["layout"]) == (name, layout)
        ]
        return f"{cell:,}"

    return {
        "period": lambda label, tp, running: median(_period(table, label, tp, running)),
        "picture": lambda label, codec="list": median(_picture(table, label, codec)),
        "idle": lambda label: median(_idle(table, label)),
        "first_token": lambda label: median(table.figure("ttft_ms_p50", "serving", label, rate=24)),
        "dispatch": dispatch,
        "release": release,
    }


def releases() -> dict[str, Any]:
    """`bench/releases.json`: the original releases' figures, with where and when they were measured."""
    content: dict[str, Any] = json.loads(_RELEASES.read_text())
    return content


def against_releases(table: Table) -> Grid:
    """Mean period per decode forward, ours on a free simulated device and the releases' with a stub model."""
    heads = ("stage", "layout", "running", "ours, µs", "release", "its figure, µs", "ours over its")
    rows = []
    for release in releases()["releases"]:
        label = "stage 4, in turn" if release["mode"] == "normal" else f"stage {release['stage'][5:]}"
        for cell in release["cells"]:
            for running, theirs in cell["period_us_mean"].items():
                layout = cell["layout"]
                tp, dp = (2, 1) if layout == "TP 2" else (1, 2) if layout == "DP 2" else (1, 1)
                ours = _period(table, label, tp, int(running), dp)
                ratio = number(ours.median / theirs) if ours else "–"
                name = f"{release['release']} {release['mode']}".strip()
                rows.append([label, layout, running, shown(ours), name, f"{theirs:,}", ratio])
    return Grid(heads, rows)


def says_of_releases(grid: Grid) -> str:
    """One sentence on the goal: no cell above its release's."""
    measured = [row for row in grid.rows if row[-1] != "–"]
    above = [f"{row[0]} {row[1]} at {row[2]}" for row in measured if float(row[-1].replace(",", "")) > 1]
    if not measured:
        return ""
    if above:
        return f"Of {len(measured)} cells, these are above their release: {', '.join(above)}."
    return f"All {len(measured)} cells measured are at or below their release."
