"""The report as one HTML page, Markdown or JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib import import_module
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from bench.report import tradeoffs
from bench.report.sections import Grid, floors, sections
from bench.report.table import Table
from bench.results import Results
from shared.launch.process_tree import format_tree
from shared.server_args import ServerArgs

TREE_PACKAGES = ("stage1_rpyc", "stage2_static_dp", "stage3_broadcast", "stage4_peer_schedulers")


def html(results: Results) -> str:
    """A page that needs no network."""
    return _render("report.html.j2", _report_context(results), autoescape=True)


def markdown(results: Results) -> str:
    return _render("report.md.j2", _report_context(results), autoescape=False)


def as_json(results: Results) -> str:
    """The rows with their estimates."""
    head = {name: value for name, value in asdict(results).items() if name != "records"}
    rows = [asdict(row) for row in Table(results).rows]
    return json.dumps({**head, "rows": rows}, indent=1) + "\n"


def readme_table(results: Results) -> str:
    """The main table in Markdown, as the README carries it, with where the figures are from."""
    machine = f"{results.machine.cores} cores of {results.machine.cpu}"
    says = f"Medians over rounds, with their interval; profile {results.profile}, {machine}, {results.started[:10]}."
    return f"{grid_markdown(tradeoffs.main_table(Table(results)))}\n\n{says}\n"


def numbers_page(results: Results) -> str:
    """`docs/what-the-numbers-say.md`: its text with the figures of `results` filled in."""
    table = Table(results)
    context = {
        "results": results,
        "floors_say": " ".join(floors(table).says),
        "against_says": tradeoffs.says_of_releases(tradeoffs.against_releases(table)),
        **tradeoffs.lookups(table),
    }
    return _render("what-the-numbers-say.md.j2", context, autoescape=False)


def grid_markdown(grid: Grid) -> str:
    lines = [grid.heads, ["---"] * len(grid.heads), *grid.rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def process_trees() -> list[tuple[str, str]]:
    """Title and text of every stage's tree at TP 2, and at DP 2 where there is such."""
    trees = []
    for package in TREE_PACKAGES:
        process_tree = import_module(f"{package}.server").process_tree
        name = f"stage {package[5]}"
        trees.append((f"{name}, TP 2", format_tree(process_tree(ServerArgs(tp_size=2)))))
        if name != "stage 1":
            trees.append((f"{name}, DP 2", format_tree(process_tree(ServerArgs(dp_size=2)))))
    return trees


def _report_context(results: Results) -> dict[str, Any]:
    table = Table(results)
    against = tradeoffs.against_releases(table)
    return {
        "results": results,
        "rounds": max((record.round for record in results.records), default=-1) + 1,
        "main": tradeoffs.main_table(table),
        "sections": sections(table),
        "releases": tradeoffs.releases(),
        "against": against,
        "against_says": tradeoffs.says_of_releases(against),
        "trees": process_trees(),
        "grid_markdown": grid_markdown,
    }


def _render(template: str, context: dict[str, Any], *, autoescape: bool) -> str:
    environment = Environment(
        loader=PackageLoader("bench.report", "templates"),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(context).rstrip() + "\n"
