"""`python -m bench readme`: writes a results file's figures into the README and docs/what-the-numbers-say.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.report.page import numbers_page, readme_table
from bench.results import BadResults, Results, load
from bench.server_process import ROOT
from bench.tables import NoPlace, between

BEGIN, END = "<!-- the main table: python -m bench readme -->", "<!-- end of the main table -->"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, metavar="RESULTS")


def main(args: argparse.Namespace) -> int:
    try:
        texts = pages(load(args.results))
    except (BadResults, NoPlace) as error:
        print(f"python -m bench readme: {error}", file=sys.stderr)
        return 2
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return 0


def pages(results: Results) -> dict[Path, str]:
    """The files that carry figures, as `results` make them."""
    readme = ROOT / "README.md"
    return {
        readme: with_table(readme.read_text(encoding="utf-8"), readme_table(results)),
        ROOT / "docs" / "what-the-numbers-say.md": numbers_page(results),
    }


def with_table(readme: str, table: str) -> str:
    """`readme` with `table` between its two marks.  Raises `NoPlace` where they are missing."""
    return between(readme, BEGIN, END, table)
