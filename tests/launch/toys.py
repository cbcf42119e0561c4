"""Processes that stand in for a server's, each with one way to live or die."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from multiprocessing.connection import Connection

from shared.launch import Supervisor


def _announce(pid_dir: str, name: str) -> None:
    path = os.path.join(pid_dir, name)
    with open(path + ".tmp", "w") as file:
        file.write(str(os.getpid()))
    os.rename(path + ".tmp", path)


def sleeps(pid_dir: str, name: str, pipe_writer: Connection) -> None:
    _announce(pid_dir, name)
    pipe_writer.send({"status": "ready", "name": name})
    while True:
        time.sleep(60)


def sleeps_in_native_code(pid_dir: str, name: str, pipe_writer: Connection) -> None:
    _announce(pid_dir, name)
    pipe_writer.send({"status": "ready", "name": name})
    ctypes.CDLL(None).sleep(600)


def never_ready(pid_dir: str, name: str, pipe_writer: Connection) -> None:
    _announce(pid_dir, name)
    time.sleep(600)


def raises_before_ready(pid_dir: str, name: str, pipe_writer: Connection) -> None:
    raise ValueError("no weights for " + name)


def killed_before_ready(pid_dir: str, name: str, pipe_writer: Connection) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raises_when_told(pid_dir: str, name: str, pipe_writer: Connection) -> None:
    _run_until_told(pid_dir, name, pipe_writer)
    raise ValueError("told to")


def returns_when_told(pid_dir: str, name: str, pipe_writer: Connection) -> None:
    _run_until_told(pid_dir, name, pipe_writer)


def _run_until_told(pid_dir: str, name: str, pipe_writer: Connection) -> None:
    _announce(pid_dir, name)
    pipe_writer.send({"status": "ready"})
    while not os.path.exists(os.path.join(pid_dir, "go")):
        time.sleep(0.01)


def controls(pid_dir: str, name: str, grandchild: str, pipe_writer: Connection) -> None:
    """Starts two grandchildren, the first of the kind named, and then sits in native code."""
    supervisor = Supervisor()
    supervisor.start("rank0", "toy: rank 0", globals()[grandchild], (pid_dir, "rank0"))
    supervisor.start("rank1", "toy: rank 1", sleeps_in_native_code, (pid_dir, "rank1"))
    supervisor.wait_ready()
    sleeps_in_native_code(pid_dir, name, pipe_writer)


def controls_without_waiting(pid_dir: str, name: str, grandchild: str, pipe_writer: Connection) -> None:
    """Blocked in native code while its children start, as a rank is in a rendezvous."""
    supervisor = Supervisor()
    supervisor.start("rank0", "toy: rank 0", globals()[grandchild], (pid_dir, "rank0"))
    ctypes.CDLL(None).sleep(600)


def main() -> None:
    """`python -m tests.launch.toys PID_DIR (native|python) CHILD ...`: a main process with those children.

    A child is a function of this module, or `controls:GRANDCHILD`.
    """
    from shared.launch import ChildFailed
    from shared.launch.logs import set_up_logging

    set_up_logging("toy: main", "info")
    pid_dir, how, *kinds = sys.argv[1:]
    supervisor = Supervisor()
    module = (
        sys.modules["tests.launch.toys"]
        if "tests.launch.toys" in sys.modules
        else __import__("tests.launch.toys", fromlist=["toys"])
    )
    for index, kind in enumerate(kinds):
        target, _, grandchild = kind.partition(":")
        args = (pid_dir, f"child{index}", grandchild) if grandchild else (pid_dir, f"child{index}")
        supervisor.start(f"child{index}", f"toy: child {index}", getattr(module, target), args)
    try:
        payloads = supervisor.wait_ready()
    except ChildFailed as failure:
        print("ChildFailed", failure.exitcode, failure.traceback, flush=True)
        supervisor.stop(grace=1.0)
        raise SystemExit(1) from None
    if how == "native":
        _announce(pid_dir, "main")
        print("ready", list(payloads), flush=True)
        ctypes.CDLL(None).sleep(600)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        # Whoever sees this may send a signal at once.
        _announce(pid_dir, "main")
        print("ready", list(payloads), flush=True)
        while True:
            time.sleep(60)
    except KeyboardInterrupt:
        pass
    finally:
        supervisor.stop(grace=1.0)


if __name__ == "__main__":
    main()
