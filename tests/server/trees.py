"""What a stage would start, asked of the stage itself."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator

from shared.launch.process_tree import ProcessNode
from shared.launch.stage import Stage
from shared.server_args import parse_server_args
from tests.conftest import ROOT


def module_of(number: int) -> str:
    """What `python -m` starts."""
    (package,) = ROOT.glob(f"stage{number}_*")
    return f"{package.name}.server"


def stage_of(number: int) -> Stage:
    stage: Stage = importlib.import_module(module_of(number)).STAGE
    return stage


def has_replicas(number: int) -> bool:
    return "dp" in stage_of(number).takes


def widest_flags(number: int) -> tuple[str, ...]:
    """Two ranks, and two replicas where the stage has them."""
    return ("--tp-size", "2", *(("--dp-size", "2") if has_replicas(number) else ()))


def planned_tree(number: int, *flags: str) -> ProcessNode:
    """The tree of `--print-process-tree`."""
    stage = stage_of(number)
    return stage.process_tree(parse_server_args(stage.name, stage.takes, flags))


def titles(tree: ProcessNode) -> Iterator[str]:
    yield tree.title
    for child in tree.children:
        yield from titles(child)


def one_of_each_role(tree: ProcessNode) -> list[str]:
    """Titles, one for each role: what only the number of the replica tells apart is one role."""
    by_role = {re.sub(r"DP\d+", "DP", title): title for title in titles(tree)}
    return list(by_role.values())
