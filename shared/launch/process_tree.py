"""The processes of a server as a tree: what would start, and what runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import psutil


@dataclass(frozen=True)
class ProcessNode:
    """One process.

    `title` is what `ps` shows, `role` says what the process does, `pid` is None where it does not run.
    """

    role: str
    title: str
    children: tuple[ProcessNode, ...] = ()
    pid: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON: `{"role", "title", "pid", "children"}`."""
        children = [child.as_dict() for child in self.children]
        return {"role": self.role, "title": self.title, "pid": self.pid, "children": children}

    def count(self) -> int:
        """How many processes the tree has."""
        return 1 + sum(child.count() for child in self.children)


def with_pids(tree: ProcessNode) -> ProcessNode:
    """The tree with the pids of the running processes; its root is this process.

    A child is the process of the same title under the same parent.
    """
    return _with_pids(tree, psutil.Process())


def _with_pids(node: ProcessNode, process: psutil.Process) -> ProcessNode:
    running = {_title(child): child for child in process.children()}
    children = tuple(
        _with_pids(child, running[child.title]) if child.title in running else child for child in node.children
    )
    return replace(node, pid=process.pid, children=children)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.Error:
        return ""


def format_tree(tree: ProcessNode) -> str:
    """One line a process: the title in its place, the pid where there is one, the role."""
    rows = _rows(tree, "", "")
    width = max(len(name) for name, _ in rows)
    lines = []
    for name, node in rows:
        pid = "" if node.pid is None else f"pid {node.pid:<8}"
        lines.append(f"{name:<{width}}  {pid}{node.role}".rstrip())
    return "\n".join(lines)


def _rows(node: ProcessNode, lead: str, below: str) -> list[tuple[str, ProcessNode]]:
    rows = [(lead + node.title, node)]
    for child in node.children:
        last = child is node.children[-1]
        rows += _rows(child, below + ("└─ " if last else "├─ "), below + ("   " if last else "│  "))
    return rows
