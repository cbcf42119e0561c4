"""Plots as inline SVG that takes its colours from the page, so that one picture serves light and dark."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

from bench.report.estimate import Estimate
from bench.report.table import LABELS

_WIDTH_IN = 4.6
_PALETTE = 8
_MARKERS = "osD^vP*X"

# Colours that stand for the page's: matplotlib takes no CSS, so these are replaced in what it wrote.
_TEXT, _GRID = "#010203", "#010204"
_COLOURS = [f"#0102{16 + i:02x}" for i in range(_PALETTE)]

Series = Mapping[str, Sequence[tuple[float, Estimate]]]
"""A line's name to its points."""

Stacks = Mapping[str, Mapping[str, float]]
"""A bar's name to its parts, by name."""


def lines(name: str, series: Series, x_label: str, y_label: str, *, log_x: bool = False, log_y: bool = True) -> str:
    """One line per series through its medians, with bars for the intervals.  `log_x` takes a 0 as well."""
    figure, axes = _axes(3.3)
    ticks = sorted({x for points in series.values() for x, _ in points})
    if log_x:
        axes.set_xscale("symlog", base=2, linthresh=1)
    if log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    for label, points in series.items():
        index = _index(label, list(series))
        xs = [x for x, _ in points]
        ys = [y.median for _, y in points]
        # Where few rounds straddle a jump of the machine, a log axis has no room for a bar down to zero.
        spread = [[max(0.0, y.median - y.low) for _, y in points], [max(0.0, y.high - y.median) for _, y in points]]
        style: dict[str, Any] = {"marker": _MARKERS[index], "markersize": 4, "linewidth": 1.6, "capsize": 2}
        axes.errorbar(xs, ys, yerr=spread, label=label, color=_COLOURS[index], **style)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    _legend(axes, len(series))
    return _svg(figure, name)


def bars(name: str, stacks: Stacks, x_label: str) -> str:
    """One horizontal bar per stack, its parts in the order in which the first of them names them."""
    parts = list(dict.fromkeys(part for stack in stacks.values() for part in stack))
    figure, axes = _axes(1.15 + 0.32 * len(stacks) + 0.22 * ((len(parts) + 1) // 2))
    names = list(stacks)
    left = [0.0] * len(names)
    for index, part in enumerate(parts):
        widths = [stacks[stack].get(part, 0.0) for stack in names]
        axes.barh(names, widths, left=left, height=0.66, label=part, color=_COLOURS[index % _PALETTE])
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel(x_label)
    if len(parts) > 1:
        _legend(axes, len(parts))
    return _svg(figure, name)


def _index(label: str, labels: list[str]) -> int:
    """A stage has the same colour in every plot; anything else takes the next one that no stage has."""
    stage = label.removesuffix(", list")
    if stage in LABELS:
        return LABELS.index(stage)
    others = [other for other in labels if other.removesuffix(", list") not in LABELS]
    used = len(LABELS) if len(others) < len(labels) else 0
    return (used + others.index(label)) % _PALETTE


def _axes(height_in: float) -> tuple[Figure, Axes]:
    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "process-eras",
        "font.family": "sans-serif",
        "font.size": 11,
        "text.color": _TEXT,
        "axes.labelcolor": _TEXT,
        "axes.edgecolor": _GRID,
        "xtick.color": _TEXT,
        "ytick.color": _TEXT,
        "grid.color": _GRID,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    matplotlib.rcParams.update(style)
    figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
    return figure, figure.subplots()


def _legend(axes: Axes, entries: int) -> None:
    figure = axes.figure
    assert isinstance(figure, Figure)
    figure.legend(loc="outside upper left", ncols=2 if entries > 1 else 1, frameon=False, fontsize=11)


def _svg(figure: Figure, name: str) -> str:
    """The picture without its prologue and size, ids made unique to the page."""
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', rf'\1 data-plot="{name}"', svg, count=1)
    svg = re.sub(r'\bid="', f'id="{name}-', svg).replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    svg = svg.replace(_TEXT, "var(--text)").replace(_GRID, "var(--line)")
    for index, colour in enumerate(_COLOURS):
        svg = svg.replace(colour, f"var(--c{index})")
    return svg
