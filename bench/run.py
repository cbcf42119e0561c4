"""`python -m bench run`: measures, and keeps every figure in the results file as soon as it is there.

Ctrl-C keeps what has been measured; the same command again measures what is missing.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench import suites, this_machine
from bench.plan import ALL_STAGES, Case, Plan, What, parse_peer
from bench.results import BadResults, Record, Results, load, save
from bench.runner import Failed, Measured, measure_unit
from bench.server_process import end_on_sigterm

QUICK_ROUNDS = 2
FULL_ROUNDS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", choices=("quick", "full"), default="quick", help="minutes, or about an hour")
    parser.add_argument("-o", "--output", type=Path, default=Path("results.json"), metavar="RESULTS")
    parser.add_argument("--suite", action="append", choices=suites.NAMES, help="only this one; repeatable")
    parser.add_argument("--stage", action="append", type=int, choices=ALL_STAGES, help="only this one; repeatable")
    parser.add_argument("--rounds", type=_rounds, metavar="N", help="how often all is measured")
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        type=parse_peer,
        metavar="NAME=URL",
        help="an OpenAI-compatible server to measure beside the stages; repeatable",
    )
    parser.add_argument("--force", action="store_true", help="go on with a file of another commit or machine")


def _rounds(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of rounds; give 1 or more")
    return int(text)


def main(args: argparse.Namespace) -> int:
    """The exit status: 0, or 1 where a case failed, 2 for a file that cannot be used, 130 after Ctrl-C."""
    end_on_sigterm()
    plan = Plan(
        full=args.profile == "full",
        stages=tuple(sorted(set(args.stage or ALL_STAGES))),
        suites=tuple(args.suite or ()),
        peers=tuple(args.peer),
        rounds=args.rounds or (FULL_ROUNDS if args.profile == "full" else QUICK_ROUNDS),
    )
    profile = "custom" if args.stage or args.suite or args.rounds else args.profile
    try:
        results = _open(args.output, profile, args.force)
    except BadResults as error:
        print(f"python -m bench run: {error}", file=sys.stderr)
        return 2
    run = _Run(plan, results, args.output, args.profile)
    try:
        run.all()
    except KeyboardInterrupt:
        print(f"stopped; {args.output} has what was measured, the same command goes on from there", file=sys.stderr)
        return 130
    return 1 if run.failed else 0


def _open(path: Path, profile: str, force: bool) -> Results:
    """The results so far, or new ones.  Raises `BadResults` for a file that is broken or of another run."""
    now = Results(
        profile=profile,
        machine=this_machine.machine(),
        versions=this_machine.versions(),
        commit=this_machine.commit(),
        started=_now(),
    )
    if not path.exists():
        save(now, path)
        return now
    before = load(path)
    differs = [name for name in ("commit", "machine", "profile") if getattr(before, name) != getattr(now, name)]
    if differs and not force:
        raise BadResults(f"{path} is of another {', '.join(differs)}; give another file with -o, or --force to go on")
    return before


@dataclass
class _Run:
    plan: Plan
    results: Results
    path: Path
    profile: str
    failed: int = 0

    def all(self) -> None:
        """Measures what is missing."""
        console = Console(stderr=True)
        rounds = [[self._missing(unit, round) for unit in self.plan.units()] for round in range(self.plan.rounds)]
        total = sum(len(unit) for units in rounds for unit in units)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("", total=total)
            for round, units in enumerate(rounds):
                for unit in filter(None, units):
                    progress.update(task, description=f"round {round + 1}: {unit[0].unit}")

                    def take(result: Measured | Failed, round: int = round) -> None:
                        progress.advance(task)
                        self._take(result, round, console)

                    measure_unit(unit, take)
        self.results.finished = None if self.failed else _now()
        save(self.results, self.path)

    def _missing(self, unit: list[Case], round: int) -> list[Case]:
        done = {(record.suite, record.stage, record.round, *_items(record.case)) for record in self.results.records}
        return [
            case
            for case in unit
            if (case.rounds is None or round < case.rounds)
            and (case.suite, case.measured, round, *_items(case.what)) not in done
        ]

    def _take(self, result: Measured | Failed, round: int, console: Console) -> None:
        case = result.case
        if isinstance(result, Failed):
            self.failed += 1
            problem = str(result.error).strip().splitlines()[-1:] or [type(result.error).__name__]
            console.print(f"[red]failed[/red] {escape(case.key)}: {escape(problem[0])}", soft_wrap=True)
            return
        command = f"pytest bench --bench-profile={self.profile} -k {case.test_id}"
        self.results.records.append(
            Record(
                suite=case.suite,
                stage=case.measured,
                case=dict(case.what),
                round=round,
                figures=result.figures,
                command=command,
                seconds=result.seconds,
                started=result.started,
            )
        )
        save(self.results, self.path)


def _items(case: What) -> tuple[tuple[str, object], ...]:
    return tuple(sorted(case.items()))


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
