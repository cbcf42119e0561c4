"""A results file as rows: one per suite, stage and case, with an `Estimate` for each of its figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bench.report.estimate import Estimate, pooled_noise
from bench.results import Record, Results

LABELS = ("stage 1", "stage 2", "stage 3", "stage 4, in turn", "stage 4")
"""The stages as the report names them; stage 4 "in turn" is `--disable-overlap-schedule`."""


@dataclass(frozen=True)
class Row:
    suite: str
    label: str
    case: dict[str, Any]
    figures: dict[str, Estimate]
    command: str

    def get(self, figure: str) -> Estimate | None:
        return self.figures.get(figure)

    def prefixed(self, prefix: str) -> dict[str, Estimate]:
        """The figures whose names begin with `prefix`, without it, in the order of the file."""
        return {name.removeprefix(prefix): value for name, value in self.figures.items() if name.startswith(prefix)}


class Table:
    """All rows, in the order of the file."""

    def __init__(self, results: Results) -> None:
        grouped: dict[tuple[Any, ...], list[Record]] = {}
        for record in results.records:
            grouped.setdefault((record.suite, record.stage, *sorted(record.case.items())), []).append(record)
        cases = [(records[0], _by_figure(records)) for records in grouped.values()]
        pools: dict[tuple[str, str], list[list[float]]] = {}
        for first, by_figure in cases:
            for name, values in by_figure.items():
                pools.setdefault((first.suite, name), []).append(values)
        noise = {key: pooled_noise(pool) for key, pool in pools.items()}
        self.rows = [
            Row(
                first.suite,
                _label(first.stage, first.case),
                first.case,
                {name: Estimate.of(values, noise[first.suite, name]) for name, values in by_figure.items()},
                first.command,
            )
            for first, by_figure in cases
        ]

    def select(self, suite: str, label: str | None = None, **case: Any) -> Iterator[Row]:
        """The rows of a suite, of one label if it is given, whose cases say what `case` says."""
        for row in self.rows:
            is_asked = row.suite == suite and label in (None, row.label)
            if is_asked and all(row.case.get(name) == value for name, value in case.items()):
                yield row

    def first(self, suite: str, label: str, **case: Any) -> Row | None:
        return next(self.select(suite, label, **case), None)

    def figure(self, name: str, suite: str, label: str, **case: Any) -> Estimate | None:
        row = self.first(suite, label, **case)
        return row.get(name) if row else None


def _by_figure(records: list[Record]) -> dict[str, list[float]]:
    """A case's values in its rounds, by figure."""
    values: dict[str, list[float]] = {}
    for record in records:
        for name, value in record.figures.items():
            values.setdefault(name, []).append(value)
    return values


def _label(stage: str, case: dict[str, Any]) -> str:
    if stage == "stage4" and case.get("overlap") is False:
        return "stage 4, in turn"
    return f"stage {stage[5:]}" if stage.startswith("stage") and stage[5:].isdigit() else stage
