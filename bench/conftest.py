"""What `pytest bench` takes beside the `--stage` of the tests."""

from __future__ import annotations

import pytest

from bench.plan import Case, Plan, parse_peer
from conftest import selected_stages


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("bench")
    group.addoption("--bench-profile", choices=("quick", "full"), default="quick", help="how much is measured")
    group.addoption("--bench-rounds", type=int, default=1, metavar="N", help="how often, the stages taking turns")
    group.addoption("--peer", action="append", default=[], type=parse_peer, metavar="NAME=URL", help="see bench run")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each suite on each server, round after round."""
    if "unit" not in metafunc.fixturenames:
        return
    config = metafunc.config
    full = config.getoption("--bench-profile") == "full"
    plan = Plan(full=full, stages=tuple(selected_stages(config)), peers=tuple(config.getoption("--peer")))
    params = []
    for round in range(config.getoption("--bench-rounds")):
        for unit in plan.units():
            by_suite: dict[str, list[Case]] = {}
            for case in unit:
                by_suite.setdefault(case.suite, []).append(case)
            for cases in by_suite.values():
                setup = cases[0].setup
                marks = [pytest.mark.stages(setup.stage)] if setup else []
                params.append(pytest.param(cases, id=f"{cases[0].test_id}-round{round + 1}", marks=marks))
    metafunc.parametrize("unit", params)
