"""The processes that run are those that `--print-process-tree` announces."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import psutil

from shared.launch.process_tree import format_tree
from tests.conftest import ROOT
from tests.server.process import Server, title
from tests.server.trees import has_replicas, module_of, planned_tree, titles, widest_flags


def printed(stage: int, *flags: str) -> str:
    command = [sys.executable, "-m", module_of(stage), "--print-process-tree", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def without_pids(node: dict[str, Any]) -> dict[str, Any]:
    return {**node, "pid": None, "children": [without_pids(child) for child in node["children"]]}


def pairs(node: dict[str, Any], parent: int | None = None) -> list[tuple[str, int, int | None]]:
    """Title, pid and the parent's pid of every process."""
    found = [(node["title"], node["pid"], parent)]
    for child in node["children"]:
        found += pairs(child, node["pid"])
    return found


def test_the_running_tree_is_the_printed_one(stage: int) -> None:
    flags = widest_flags(stage)
    planned = planned_tree(stage, *flags)
    assert printed(stage, *flags) == format_tree(planned)
    with Server(stage, "--device", "sim", *flags) as server:
        reported = server.info()["process_tree"]
        running = server.tree()
        assert without_pids(reported) == planned.as_dict()
        assert sorted(title(process) for process in running) == sorted(titles(planned))
        parents = {process.pid: process.ppid() for process in running}
        for wanted, pid, parent in pairs(reported):
            assert title(psutil.Process(pid)) == wanted
            assert parent is None or parents[pid] == parent
        assert len(running) == planned.count()
        for _, pid, _ in pairs(reported):
            assert f"pid {pid}" in server.output


def test_the_number_of_processes_is_that_of_the_era(stage: int) -> None:
    for tp, dp in itertools.product((1, 2, 3), (1, 2) if has_replicas(stage) else (1,)):
        flags = ("--tp-size", str(tp), *(("--dp-size", str(dp)) if dp > 1 else ()))
        ranks = dp * tp
        expected = {
            1: 3 + (ranks if ranks > 1 else 0),
            2: 3 + (ranks if ranks > 1 else 0),
            3: 3 + ranks if dp > 1 else 2 + ranks,
            4: 2 + (dp > 1) + ranks,
        }
        assert planned_tree(stage, *flags).count() == expected[stage], flags
