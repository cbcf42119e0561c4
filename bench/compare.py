"""`python -m bench compare`: what changed from one results file to another, and whether it is more than noise."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable

from bench.report.estimate import Estimate, number, shown, verdict
from bench.report.table import Row, Table
from bench.results import BadResults, Results, load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", type=Path, metavar="A")
    parser.add_argument("after", type=Path, metavar="B")
    parser.add_argument("--all", action="store_true", help="also what has not changed beyond the noise")


def main(args: argparse.Namespace) -> int:
    try:
        before, after = load(args.before), load(args.after)
    except BadResults as error:
        print(f"python -m bench compare: {error}", file=sys.stderr)
        return 2
    console = Console()
    for name in ("machine", "versions", "commit", "profile"):
        a, b = getattr(before, name), getattr(after, name)
        if a != b:
            console.print(f"another {name}: {a} / {b}", soft_wrap=True, highlight=False)
    changes = compare(before, after)
    told = [change for change in changes if args.all or change[-1] in ("more", "less")]
    if told:
        console.print(_as_table(told))
    console.print(f"{len(changes)} figures are in both; {len(told)} shown, {_count(changes)} changed beyond the noise.")
    return 0


Change = tuple[Row, str, Estimate, Estimate, str]
"""The case, the figure, before, after, and what is to be said of it."""


def compare(before: Results, after: Results) -> list[Change]:
    """Every figure that both files have, in the order of the second."""
    rows = {_key(row): row for row in Table(before).rows}
    return [
        (row, name, old.figures[name], new, verdict(old.figures[name], new))
        for row in Table(after).rows
        if (old := rows.get(_key(row))) is not None
        for name, new in row.figures.items()
        if name in old.figures
    ]


def _key(row: Row) -> tuple[object, ...]:
    return (row.suite, row.label, *sorted(row.case.items()))


def _count(changes: list[Change]) -> int:
    return sum(change[-1] in ("more", "less") for change in changes)


def _as_table(changes: list[Change]) -> RichTable:
    table = RichTable("case", "figure", "A", "B", "B / A", "verdict")
    for row, name, old, new, said in changes:
        case = ", ".join(f"{key} {value}" for key, value in row.case.items())
        ratio = number(new.median / old.median) if old.median else "–"
        table.add_row(f"{row.suite}, {row.label}, {case}", name, shown(old), shown(new), ratio, said)
    return table
