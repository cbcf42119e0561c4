"""The suites, one module each: `cases(plan)` gives what it measures."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.plan import Case, Plan

NAMES = (
    "start_memory",
    "step_overhead",
    "arrivals",
    "payload",
    "floors",
    "serving",
    "dispatch",
    "idle",
    "peers",
)


def cases(name: str, plan: Plan) -> list[Case]:
    """The cases of the suite `name` that `plan` covers."""
    suite = importlib.import_module(f"bench.suites.{name}")
    found: list[Case] = suite.cases(plan)
    return found
