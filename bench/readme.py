"""`python -m bench readme`: writes the main table of a results file into the README."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.report.page import readme_table
from bench.results import BadResults, load
from bench.server_process import ROOT

BEGIN, END = "<!-- the main table: python -m bench readme -->", "<!-- end of the main table -->"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, metavar="RESULTS")


def main(args: argparse.Namespace) -> int:
    path = ROOT / "README.md"
    try:
        path.write_text(
            with_table(path.read_text(encoding="utf-8"), readme_table(load(args.results))), encoding="utf-8"
        )
    except BadResults as error:
        print(f"python -m bench readme: {error}", file=sys.stderr)
        return 2
    return 0


def with_table(readme: str, table: str) -> str:
    """`readme` with `table` between its two marks.  Raises ValueError where they are missing."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the README lacks {BEGIN} or {END}")
    return f"{before}{BEGIN}\n\n{table}\n{END}{after}"
