"""`python -m bench run | report | compare | readme`."""

from __future__ import annotations

import argparse
import sys

from bench import compare, readme, run
from bench.report import command as report

COMMANDS = (
    ("run", run, "measure, into a results file"),
    ("report", report, "show a results file as a page, Markdown or JSON"),
    ("compare", compare, "tell what changed between two results files"),
    ("readme", readme, "write the figures into the README and docs"),
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description="What the process models cost.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module, help in COMMANDS:
        command = commands.add_parser(name, help=help, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(main=module.main)
    args = parser.parse_args(argv)
    status: int = args.main(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
