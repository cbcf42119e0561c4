"""What each suite shows: plots, a table, and sentences that are made from the figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.report import plots
from bench.report.estimate import Estimate, number, shown, verdict
from bench.report.table import LABELS, Row, Table

FREE_DEVICE = "sim 0 ms"
GOAL_OVER_BARE = 1.3
"""Of a transport's time inside its stage, to its time in a bare loop."""


@dataclass(frozen=True)
class Grid:
    """A table: column heads, and rows of text."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """One heading of the report.  `plots` are pairs of a caption and an SVG; empty ones were not measured."""

    id: str
    title: str
    says: list[str]
    plots: list[tuple[str, str]] = field(default_factory=list)
    grid: Grid | None = None
    command: str = ""

    @property
    def measured(self) -> bool:
        return bool(self.plots or (self.grid and self.grid.rows))


FAMILIES = {
    "waiting": ("sleep", "idle", "wait", "wait for call", "rpyc wait", "launch wait"),
    "transport": ("receive", "send", "broadcast", "rpyc call", "obtain", "queue get", "queue put", "take requests"),
    "pickling": ("serialize", "deserialize"),
    "scheduling": ("process input", "schedule", "prepare batch", "process result", "collect outputs"),
    "device": ("device launch", "device wait", "sample", "forward"),
}
"""The segments of a step, gathered."""


def sections(table: Table) -> list[Section]:
    """All of them, in reading order."""
    makers: list[Callable[[Table], Section]] = [
        step_segments,
        overhead,
        arrivals,
        payload,
        dispatch,
        serving,
        idle,
        start_memory,
        floors,
        peers,
    ]
    return [make(table) for make in makers]


def step_segments(table: Table) -> Section:
    """Where one decode forward's time goes, on a device that takes none."""
    pictures, rows, says = [], [], []
    for tp in (1, 2):
        stacks: dict[str, dict[str, float]] = {}
        for row in _steps(table, tp=tp, running=1):
            segments = row.prefixed("segment_")
            if segments:
                stacks[row.label] = _by_family(segments)
            rows.append([row.label, f"TP {tp}", shown(row.get("period_us_mean")), _largest(segments)])
        if stacks:
            caption = f"TP {tp}, one request, free device: microseconds per decode forward"
            pictures.append((caption, plots.bars(f"segments-tp{tp}", stacks, "µs per decode forward")))
            says.append(_dearest(stacks, tp))
    heads = ("stage", "layout", "period, µs", "largest segments, µs")
    return Section(
        "steps", "Where a step's time goes", says, pictures, Grid(heads, rows), _command(table, "step_overhead")
    )


def overhead(table: Table) -> Section:
    """The period less the device's time, by tensor parallelism and by running requests."""
    pictures, says = [], []
    by_tp = _series(table.select("step_overhead", device=FREE_DEVICE, dp=1, running=1), "tp", "overhead_us_mean")
    if by_tp:
        picture = plots.lines("overhead-tp", by_tp, "tensor-parallel ranks", "µs per decode forward", log_x=True)
        pictures.append(("Overhead against TP, one request", picture))
        says.append(_growth(by_tp, "tensor-parallel ranks with one request"))
    for tp in (1, 2):
        at_tp = table.select("step_overhead", device=FREE_DEVICE, dp=1, tp=tp)
        by_running = _series(at_tp, "running", "overhead_us_mean")
        if by_running:
            name = f"overhead-running-tp{tp}"
            picture = plots.lines(name, by_running, "running requests", "µs per decode forward", log_x=True)
            pictures.append((f"Overhead against running requests, TP {tp}", picture))
            says.append(_growth(by_running, f"running requests at TP {tp}"))
    heads = ("stage", "layout", "device", "running", "overhead, µs a forward", "µs a token", "µs a step call")
    names = ("overhead_us_mean", "overhead_per_token_us_mean", "step_us_mean")
    rows = [
        [row.label, _layout(row), str(row.case["device"]), str(row.case["running"]), *_shown(row, names)]
        for row in table.select("step_overhead")
    ]
    return Section(
        "overhead", "Overhead of a decode step", says, pictures, Grid(heads, rows), _command(table, "step_overhead")
    )


def arrivals(table: Table) -> Section:
    """What k requests arriving at once cost those that run."""
    series = _series(table.select("arrivals", tp=2), "arriving", "longest_step_us_median")
    pictures, says = [], []
    if series:
        caption = "The longest step while k requests arrive, TP 2, 8 running"
        picture = plots.lines("arrivals", series, "requests that arrive at once", "µs, longest step", log_x=True)
        pictures.append((caption, picture))
        says.append(_growth(series, "arriving requests"))
    heads = ("stage", "layout", "arriving", "extra, µs", "longest step, µs")
    rows = [
        [
            row.label,
            _layout(row),
            str(row.case["arriving"]),
            *_shown(row, ("extra_us_median", "longest_step_us_median")),
        ]
        for row in table.select("arrivals")
    ]
    return Section("arrivals", "When requests arrive", says, pictures, Grid(heads, rows), _command(table, "arrivals"))


def payload(table: Table) -> Section:
    """One request with a picture: the price of moving bytes to every rank."""
    series: dict[str, list[tuple[float, Estimate]]] = {}
    rows = []
    for row in table.select("payload"):
        codec = row.case.get("codec")
        label = f"{row.label}, {codec}" if codec else row.label
        latency = row.get("latency_ms_p50")
        if latency and row.case["image_kib"]:
            series.setdefault(label, []).append((row.case["image_kib"], latency))
        rows.append([label, f"{row.case['image_kib']:g} KiB", shown(latency), _largest(row.prefixed("segment_"))])
    pictures, says = [], []
    if series:
        picture = plots.lines("payload", series, "picture, KiB", "ms, median latency", log_x=True)
        pictures.append(("Latency of one request with a picture, TP 2, both axes logarithmic", picture))
        largest = {label: points[-1][1] for label, points in series.items()}
        says.append(_extremes(largest, "ms", f"With a picture of {number(_last_x(series))} KiB"))
    heads = ("stage", "picture", "latency, ms", "largest segments, µs")
    return Section(
        "payload", "A request that carries a picture", says, pictures, Grid(heads, rows), _command(table, "payload")
    )


def dispatch(table: Table) -> Section:
    """Round robin against shortest queue."""
    pictures, says, rows = [], [], []
    for dp in sorted({row.case["dp"] for row in table.select("dispatch")}):
        for load in ("even", "skewed"):
            stacks, p99s = {}, {}
            for row in table.select("dispatch", dp=dp, load=load):
                name = f"{row.label}, {row.case['method'].replace('_', ' ')}"
                p50, p99 = row.get("ttft_ms_p50"), row.get("ttft_ms_p99")
                if p50 and p99:
                    stacks[name] = {"median": p50.median, "up to the 99th percentile": p99.median - p50.median}
                    p99s[name] = p99
            if stacks:
                caption = f"Time to first token, DP {dp}, {load} load"
                pictures.append((caption, plots.bars(f"dispatch-dp{dp}-{load}", stacks, "ms to the first token")))
                says.append(_extremes(p99s, "ms", f"DP {dp}, {load} load, first token at the 99th percentile"))
    heads = ("stage", "DP", "policy", "load", "first token p50, ms", "p99, ms", "largest over mean load")
    names = ("ttft_ms_p50", "ttft_ms_p99", "largest_over_mean_load")
    for row in table.select("dispatch"):
        case = row.case
        rows.append([row.label, str(case["dp"]), case["method"].replace("_", " "), case["load"], *_shown(row, names)])
    return Section("dispatch", "Dispatch to replicas", says, pictures, Grid(heads, rows), _command(table, "dispatch"))


def serving(table: Table) -> Section:
    """Open-loop Poisson arrivals over HTTP."""
    pictures, says = [], []
    shapes = sorted({(row.case.get("tp", 1), row.case.get("dp", 1)) for row in table.select("serving")})
    for tp, dp in shapes:
        for statistic, name in (("p50", "median"), ("p99", "99th percentile")):
            series = _series(table.select("serving", tp=tp, dp=dp), "rate", f"ttft_ms_{statistic}")
            if series:
                picture = plots.lines(
                    f"serving-{statistic}-tp{tp}-dp{dp}", series, "requests a second", "ms to the first token"
                )
                pictures.append((f"Time to first token, {name}, TP {tp}, DP {dp}", picture))
                last = {label: points[-1][1] for label, points in series.items()}
                says.append(_extremes(last, "ms", f"At {number(_last_x(series))} requests a second, {name}"))
    heads = (
        "stage",
        "layout",
        "requests/s",
        "tokens/s",
        "goodput/s",
        "first token p50, ms",
        "p99",
        "per token p50, ms",
        "whole p50, ms",
        "p99",
    )
    names = ("tokens_per_s", "goodput_per_s", "ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "e2e_ms_p50", "e2e_ms_p99")
    grid = [[row.label, _layout(row), f"{row.case['rate']:g}", *_shown(row, names)] for row in table.select("serving")]
    limits = {(row.case["ttft_limit_ms"], row.case["tpot_limit_ms"]) for row in table.select("serving")}
    says += [
        f"Goodput counts answers with a first token within {a:g} ms and {b:g} ms per token." for a, b in sorted(limits)
    ]
    return Section("serving", "Serving over HTTP", says, pictures, Grid(heads, grid), _command(table, "serving"))


def idle(table: Table) -> Section:
    """What a server without work burns."""
    pictures, rows, says = [], [], []
    for sleeps, name in ((False, "as the era had it"), (True, "with --sleep-on-idle")):
        stacks = {}
        for row in table.select("idle", sleep_on_idle=sleeps):
            shares = {process: share for process, share in row.prefixed("cpu_share_").items() if process != "all"}
            stacks[f"{row.label}, TP {row.case['tp']}"] = _by_role(shares)
            each = ", ".join(f"{process.replace('_', ' ')} {shown(share)}" for process, share in shares.items())
            rows.append(
                [row.label, f"TP {row.case['tp']}", "yes" if sleeps else "no", shown(row.get("cpu_share_all")), each]
            )
        if stacks:
            picture = plots.bars(f"idle-{'sleep' if sleeps else 'era'}", stacks, "cores")
            pictures.append((f"CPU of an idle server, {name}", picture))
            totals = {stack: sum(parts.values()) for stack, parts in stacks.items()}
            most = max(totals, key=lambda k: totals[k])
            says.append(f"An idle server burns up to {number(totals[most])} cores {name} ({most}).")
    heads = ("stage", "layout", "sleeps", "cores, all", "cores, each process")
    return Section("idle", "Idle", says, pictures, Grid(heads, rows), _command(table, "idle"))


def start_memory(table: Table) -> Section:
    """Time to ready and proportional memory."""
    pictures, rows, says, ready = [], [], [], {}
    stacks: dict[str, dict[str, float]] = {}
    for row in table.select("start_memory"):
        shares = {process: size for process, size in row.prefixed("pss_mb_").items() if process != "all"}
        stacks[f"{row.label}, {_layout(row)}"] = _by_role(shares)
        each = ", ".join(f"{process.replace('_', ' ')} {shown(size)}" for process, size in shares.items())
        rows.append([row.label, _layout(row), shown(row.get("ready_s")), shown(row.get("pss_mb_all")), each])
        if row.get("ready_s"):
            ready[f"{row.label}, {_layout(row)}"] = row.figures["ready_s"]
    if stacks:
        picture = plots.bars("memory", stacks, "MB, proportional (PSS), simulated device")
        pictures.append(("Memory of a server, by process", picture))
        says.append(_extremes(ready, "s", "From the command to ready"))
    heads = ("stage", "layout", "ready, s", "PSS, MB", "each process")
    return Section("start", "Start and memory", says, pictures, Grid(heads, rows), _command(table, "start_memory"))


def floors(table: Table) -> Section:
    """Each transport inside its stage against the same calls in a bare loop."""
    rows, says, over = [], [], []
    for row in table.select("floors"):
        if row.label == "bare":
            continue
        bare = table.first("floors", "bare", **row.case)
        ours, floor = row.get("call_us_mean"), bare.get("call_us_mean") if bare else None
        if not ours or not floor:
            continue
        ratio = ours.median / floor.median
        over += [f"{row.label} ({row.case['transport']})"] if ratio > GOAL_OVER_BARE else []
        name = f"{row.case['transport']}, {row.case['ranks']} ranks"
        rows.append([row.label, name, shown(ours), shown(floor), number(ratio)])
    if rows:
        above = f"above the goal of {GOAL_OVER_BARE}: {', '.join(over)}"
        none = f"none is above the goal of {GOAL_OVER_BARE}"
        says.append(f"Of the transports inside their stages, {above if over else none}.")
    grid = Grid(("stage", "transport, nothing arriving", "in the stage, µs", "bare loop, µs", "ratio"), rows)
    return Section("floors", "Transports against bare loops", says, [], grid, _command(table, "floors"))


def peers(table: Table) -> Section:
    """Other engines, where they were there."""
    heads = ("engine", "case", "figures")
    rows = []
    for row in table.select("peers"):
        case = ", ".join(f"{name} {value}" for name, value in row.case.items())
        rows.append([row.label, case, ", ".join(f"{name} {shown(value)}" for name, value in row.figures.items())])
    return Section("peers", "Peers", [], [], Grid(heads, rows), _command(table, "peers"))


# Helpers


def _steps(table: Table, **case: Any) -> list[Row]:
    found = {row.label: row for row in table.select("step_overhead", device=FREE_DEVICE, dp=1, **case)}
    return [found[label] for label in LABELS if label in found]


def _by_family(segments: dict[str, Estimate]) -> dict[str, float]:
    family_of = {segment: family for family, its in FAMILIES.items() for segment in its}
    parts = dict.fromkeys(FAMILIES, 0.0)
    for name, value in segments.items():
        family = family_of.get(name.removesuffix("_us").replace("_", " "), "other")
        parts[family] = parts.get(family, 0.0) + value.median
    return parts


def _by_role(shares: dict[str, Estimate]) -> dict[str, float]:
    """By kind of process: ranks of a replica together."""
    parts = {"main": 0.0, "detokenizer": 0.0, "control": 0.0, "ranks": 0.0}
    for process, share in shares.items():
        role = process if process in parts else "ranks" if "TP" in process else "control"
        parts[role] += share.median
    return parts


def _largest(segments: dict[str, Estimate], count: int = 3) -> str:
    names = sorted(segments, key=lambda name: -segments[name].median)[:count]
    return ", ".join(f"{name.removesuffix('_us').replace('_', ' ')} {number(segments[name].median)}" for name in names)


def _series(rows: Iterable[Row], x: str, figure: str) -> dict[str, list[tuple[float, Estimate]]]:
    series: dict[str, list[tuple[float, Estimate]]] = {}
    for row in rows:
        value = row.get(figure)
        if value is not None:
            series.setdefault(row.label, []).append((row.case[x], value))
    ordered = sorted(series, key=lambda label: LABELS.index(label) if label in LABELS else len(LABELS))
    return {label: sorted(series[label], key=lambda point: point[0]) for label in ordered}


def _growth(series: dict[str, list[tuple[float, Estimate]]], of: str) -> str:
    """How much each line grows from its first to its last point."""
    said = []
    for label, points in series.items():
        (x0, first), (x1, last) = points[0], points[-1]
        if len(points) < 2 or not first.median:
            continue
        told = verdict(first, last)
        ratio = f"× {number(last.median / first.median)}"
        said.append(f"{label} {ratio}" if told in ("more", "less") else f"{label} {ratio} ({told})")
    if not said:
        return ""
    x0, x1 = next((p[0][0], p[-1][0]) for p in series.values() if len(p) > 1)
    return f"From {x0:g} to {x1:g} {of}: {'; '.join(said)}."


def _extremes(values: dict[str, Estimate], unit: str, lead: str) -> str:
    if not values:
        return ""
    least, most = min(values, key=lambda k: values[k].median), max(values, key=lambda k: values[k].median)
    said = f"{lead}: {shown(values[least])} {unit} ({least}) to {shown(values[most])} {unit} ({most})"
    told = verdict(values[least], values[most])
    return f"{said}." if told in ("more", "less") else f"{said}; {told}."


def _dearest(stacks: dict[str, dict[str, float]], tp: int) -> str:
    said = []
    for label, parts in stacks.items():
        total = sum(parts.values())
        most = max(parts, key=lambda k: parts[k])
        said.append(f"{label} {most} ({parts[most] / total:.0%} of {number(total)} µs)")
    return f"At TP {tp} most of a forward's time is, in {'; '.join(said)}."


def _last_x(series: dict[str, list[tuple[float, Estimate]]]) -> float:
    return max(points[-1][0] for points in series.values())


def _layout(row: Row) -> str:
    tp, dp = row.case.get("tp", 1), row.case.get("dp", 1)
    return f"TP {tp}" if dp == 1 else f"TP {tp}, DP {dp}"


def _shown(row: Row, figures: Sequence[str]) -> list[str]:
    return [shown(row.get(figure)) for figure in figures]


def _command(table: Table, suite: str) -> str:
    """What a reader types to measure this suite again, on all stages."""
    row = next(table.select(suite), None)
    profile = "full" if row is not None and "profile=full" in row.command else "quick"
    return f"python -m bench run --profile {profile} --suite {suite} -o results.json"
