"""`python -m shared.trace summary DIR` and `python -m shared.trace merge DIR`."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict

from rich.console import Console
from rich.table import Table

from shared.trace.merge import merge
from shared.trace.reader import Trace, read
from shared.trace.summary import Step, loops, steps

LABELS = {"decode": "decode steps", "prefill": "prefill steps", "idle": "idle"}


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 1 where the folder holds no trace."""
    parser = argparse.ArgumentParser(prog="python -m shared.trace", description="Reads what --trace-dir has written.")
    parser.add_argument("command", choices=("summary", "merge"), help="a table of each loop's parts, or trace.json")
    parser.add_argument("folder", metavar="DIR", help="the folder of --trace-dir, also of a server that runs")
    args = parser.parse_args(argv)
    try:
        if args.command == "merge":
            print(merge(args.folder))
        else:
            _print_summary(read(args.folder))
    except FileNotFoundError as problem:
        print(problem, file=sys.stderr)
        return 1
    return 0


def _print_summary(trace: Trace) -> None:
    console = Console()
    for title, thread in loops(trace):
        all_steps = steps(trace, title, thread)
        name = title if thread == "loop" else f"{title} ({thread})"
        runs_forwards = any(step.forwards for step in all_steps)
        for kind, label in LABELS.items():
            of_kind = [step for step in all_steps if step.kind == kind]
            if of_kind:
                console.print(_table(f"{name}: {len(of_kind)} {label if runs_forwards else 'rounds'}", of_kind))


def _table(title: str, of_kind: list[Step]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("part")
    for heading in ("median us", "mean us", "share"):
        table.add_column(heading, justify="right")
    periods = [step.end_ns - step.start_ns for step in of_kind]
    parts: defaultdict[str, list[int]] = defaultdict(list)
    for step in of_kind:
        for part, took_ns in step.segments.items():
            parts[part].append(took_ns)
    for part, took in sorted(parts.items(), key=lambda item: -sum(item[1])):
        _add_row(table, part, took + [0] * (len(of_kind) - len(took)), sum(periods))
    table.add_section()
    _add_row(table, "period", periods, sum(periods))
    _add_row(table, "device busy", [step.device_ns for step in of_kind], sum(periods))
    return table


def _add_row(table: Table, part: str, took_ns: list[int], whole_ns: int) -> None:
    median, mean = statistics.median(took_ns), statistics.fmean(took_ns)
    table.add_row(part, f"{median / 1e3:.1f}", f"{mean / 1e3:.1f}", f"{sum(took_ns) / max(1, whole_ns):.1%}")


if __name__ == "__main__":
    sys.exit(main())
