"""`python -m bench report`: what a results file shows, as a page, as Markdown or as JSON."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.report import page
from bench.results import BadResults, load

FORMATS = {"html": page.html, "md": page.markdown, "json": page.as_json, "readme": page.readme_table}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, metavar="RESULTS")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="instead of standard output")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        help="by default what the name of FILE ends with, else html; readme: the main table alone",
    )


def main(args: argparse.Namespace) -> int:
    ending = args.output.suffix.removeprefix(".") if args.output else ""
    form = args.format or (ending if ending in FORMATS else "html")
    try:
        text = FORMATS[form](load(args.results))
    except BadResults as error:
        print(f"python -m bench report: {error}", file=sys.stderr)
        return 2
    if args.output is None:
        sys.stdout.write(text)
        return 0
    try:
        args.output.write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"python -m bench report: {args.output} cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    return 0
