"""From the command to a server that answers, and what its processes hold in memory.

Memory is the proportional set size: a page that n processes share counts 1/n for each.
"""

from __future__ import annotations

from bench.live_server import LiveServer
from bench.plan import Case, Figures, Plan
from bench.suites import setups


def cases(plan: Plan) -> list[Case]:
    found = []
    for setup in setups.steady(plan):
        rounds = plan.once_in_quick if setup.dp > 1 else None
        found.append(Case("start_memory", f"stage{setup.stage}", setups.what(setup), measure, setup, rounds))
    return found


def measure(server: LiveServer) -> Figures:
    figures = {"ready_s": server.ready_s}
    for name, process in server.processes().items():
        figures[f"pss_mb_{name}"] = process.memory_full_info().pss / 2**20
    figures["pss_mb_all"] = sum(value for name, value in figures.items() if name.startswith("pss_mb_"))
    figures["processes"] = len(figures) - 2
    return figures
