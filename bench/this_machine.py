"""What a results file says of the machine, the versions and the commit."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import psutil

from bench.results import Commit, Machine
from bench.server_process import ROOT

QUIET_PERCENT = 10.0
QUIET_INTERVAL_S = 0.25
LONGEST_WAIT_S = 10.0

PACKAGES = ("torch", "transformers", "numpy", "pyzmq", "rpyc", "uvicorn", "uvloop", "fastapi", "httpx")


def machine() -> Machine:
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        os=platform.platform(terse=True),
        python=platform.python_version(),
    )


def description() -> str:
    """One line on this machine, this commit and torch's version, for beside a table."""
    found, now = machine(), commit()
    changed = ", with changes" if now.dirty else ""
    return (
        f"{found.cpu}, {found.cores} cores; Python {found.python}, torch {metadata.version('torch')}; "
        f"commit {now.id[:12]}{changed}."
    )


def wait_until_quiet() -> None:
    """Waits until the cores have nothing to do, for ten seconds at most.

    An engine may compute on after its answer, threads that spin: vLLM's keep a core for a second, which made whoever
    was measured next half as quick again.
    """
    deadline = time.monotonic() + LONGEST_WAIT_S
    while psutil.cpu_percent(QUIET_INTERVAL_S) > QUIET_PERCENT and time.monotonic() < deadline:
        pass


def _cpu() -> str:
    """The processor's name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in PACKAGES}


def commit() -> Commit:
    """Id of the checked-out commit, and whether tracked files differ from it; "unknown" outside of git."""
    try:
        found = _git("rev-parse", "HEAD")
        return Commit(found, dirty=bool(_git("status", "--porcelain", "--untracked-files=no")))
    except (OSError, subprocess.CalledProcessError):
        return Commit("unknown", dirty=False)


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
