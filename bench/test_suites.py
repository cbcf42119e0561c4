"""The suites under pytest-benchmark: `pytest bench --stage=1 --stage=4 --benchmark-json=out.json`.

One test a suite, server and round; the figures of its cases are in `extra_info`, the time is that of the whole.
"""

from __future__ import annotations

from pytest_benchmark.fixture import BenchmarkFixture

from bench.plan import Case
from bench.runner import Failed, Measured, measure_unit


def test_suite(unit: list[Case], benchmark: BenchmarkFixture) -> None:
    failed: list[Failed] = []

    def take(result: Measured | Failed) -> None:
        if isinstance(result, Failed):
            failed.append(result)
        else:
            benchmark.extra_info[result.case.key] = result.figures

    benchmark.pedantic(measure_unit, (unit, take), rounds=1)  # type: ignore[no-untyped-call]
    if failed:
        raise failed[0].error
