"""Deaths, at every place of a process tree: what is left, what is said, and with which exit status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shared.launch import ChildFailed, Supervisor
from tests.launch import toys

ROOT = Path(__file__).parents[2]
GONE_S = 5.0


class ToyServer:
    """A toy main process and, under it, what `kinds` says; each process has announced its pid."""

    def __init__(self, pid_dir: Path, how: str, kinds: list[str], expect: list[str]) -> None:
        self.pid_dir = pid_dir
        self.main = subprocess.Popen(
            [sys.executable, "-m", "tests.launch.toys", str(pid_dir), how, *kinds],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for name in expect:
            wait_until(lambda name=name: (pid_dir / name).exists() or self.main.poll() is not None)
        self.processes = [self.main_process(), *self.main_process().children(recursive=True)]

    def main_process(self) -> psutil.Process:
        return psutil.Process(self.main.pid)

    def pid(self, name: str) -> int:
        return int((self.pid_dir / name).read_text())

    def end(self) -> tuple[int, str, str]:
        """Exit status, stdout and stderr, once every process is gone."""
        out, err = self.main.communicate(timeout=GONE_S)
        _, alive = psutil.wait_procs(self.processes, timeout=GONE_S)
        assert not alive
        return self.main.returncode, out, err


def wait_until(condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[type[ToyServer]]:
    started: list[ToyServer] = []

    def start(how: str, kinds: list[str], expect: list[str]) -> ToyServer:
        started.append(ToyServer(tmp_path, how, kinds, expect))
        return started[-1]

    yield start  # type: ignore[misc]
    for toy in started:
        if toy.main.poll() is None:
            os.killpg(toy.main.pid, signal.SIGKILL)
            toy.main.wait()


TREE = ["sleeps", "controls:sleeps"]
NAMES = ["child0", "child1", "rank0", "rank1", "main"]


@pytest.mark.parametrize(
    ("how", "victim"),
    [
        ("native", "child0"),
        ("native", "child1"),
        ("native", "rank0"),
        ("native", "rank1"),
        ("python", "rank0"),
    ],
)
def test_a_killed_process_ends_the_whole_tree_and_is_named_once(server, victim: str, how: str) -> None:
    toy = server(how, TREE, NAMES)
    pid = toy.pid(victim)
    os.kill(pid, signal.SIGKILL)
    status, _, err = toy.end()
    assert status == 1
    titles = {
        "child0": "toy: child 0",
        "child1": "toy: child 1",
        "rank0": "toy: rank 0",
        "rank1": "toy: rank 1",
    }
    parent = "[toy child 1]" if victim.startswith("rank") else "[toy main]"
    named = [line for line in err.splitlines() if f"{parent} ERROR {titles[victim]} (pid {pid}) died" in line]
    assert len(named) == 1
    assert named[0].endswith("killed by SIGKILL")
    assert "Traceback" not in err
    assert "resource_tracker" not in err


def test_a_killed_parent_leaves_no_process_behind(server) -> None:
    toy = server("native", TREE, NAMES)
    os.kill(toy.main.pid, signal.SIGKILL)
    status, _, _ = toy.end()
    assert status == -signal.SIGKILL


@pytest.mark.parametrize("kind", ["sleeps_in_native_code", "never_ready"])
def test_a_killed_parent_leaves_no_starting_process_behind(server, kind: str) -> None:
    toy = server("python", ["never_ready", f"controls_without_waiting:{kind}"], ["child0", "rank0"])
    os.kill(toy.main.pid, signal.SIGKILL)
    toy.end()


def test_sigterm_ends_every_process_with_status_0(server) -> None:
    toy = server("python", TREE, NAMES)
    toy.main.terminate()
    status, _, err = toy.end()
    assert (status, err) == (0, "")


def test_ctrl_c_to_the_process_group_is_left_to_the_main_process(server) -> None:
    toy = server("python", TREE, NAMES)
    os.killpg(toy.main.pid, signal.SIGINT)
    status, _, err = toy.end()
    assert (status, err) == (0, "")


def test_ctrl_c_while_children_start_prints_nothing_of_theirs(server) -> None:
    toy = server("python", ["never_ready"], ["child0"])
    os.killpg(toy.main.pid, signal.SIGINT)
    status, _, err = toy.end()
    assert status != 0
    assert err.count("Traceback") == 1  # the main process's own: the toy does not catch it while starting


def test_a_child_that_fails_to_start_leaves_its_traceback_once_and_gives_it_to_the_parent(server) -> None:
    toy = server("python", ["sleeps", "raises_before_ready"], [])
    status, out, err = toy.end()
    assert status == 1
    assert err.count("Traceback") == 1
    assert err.count("[toy main]") == 1
    assert "toy: child 1 (pid" in err
    assert "died before it was ready: exit status 1: ValueError: no weights for child1" in err
    assert 'raise ValueError("no weights for " + name)' in out


def test_a_grandchild_that_fails_to_start_gives_its_traceback_to_the_main_process(server) -> None:
    toy = server("python", ["sleeps", "controls:raises_before_ready"], [])
    status, out, err = toy.end()
    assert status == 1
    assert err.count("Traceback") == 1
    assert 'raise ValueError("no weights for " + name)' in out
    main_line = next(line for line in err.splitlines() if "[toy main]" in line)
    assert "toy: child 1" in main_line
    assert "toy: rank 0" in main_line
    assert main_line.endswith("ValueError: no weights for rank0")


def test_a_child_that_dies_while_its_parent_is_blocked_in_start_up_ends_the_parent(server) -> None:
    toy = server("python", ["controls_without_waiting:killed_before_ready"], [])
    status, _, err = toy.end()
    assert status == 1
    assert "toy: rank 0" in err


def test_a_child_killed_before_it_is_ready_fails_the_start(server) -> None:
    toy = server("python", ["sleeps", "killed_before_ready"], [])
    status, out, err = toy.end()
    assert status == 1
    assert "ChildFailed -9" in out
    assert "died before it was ready: killed by SIGKILL" in err


@pytest.mark.parametrize(
    ("kind", "how_it_ended"),
    [("raises_when_told", "exit status 1: ValueError: told to"), ("returns_when_told", "exit status 0")],
)
def test_a_child_that_ends_by_itself_ends_the_server(server, kind: str, how_it_ended: str) -> None:
    toy = server("native", ["sleeps", kind], ["child0", "child1", "main"])
    (toy.pid_dir / "go").touch()
    status, _, err = toy.end()
    assert status == 1
    lines = [line for line in err.splitlines() if "[toy main]" in line]
    assert len(lines) == 1
    assert lines[0].endswith(f"died: {how_it_ended}")


def test_processes_carry_their_titles(server) -> None:
    toy = server("python", TREE, NAMES)
    titles = {name: psutil.Process(toy.pid(name)).cmdline()[0].strip() for name in NAMES if name != "main"}
    assert titles == {
        "child0": "toy: child 0",
        "child1": "toy: child 1",
        "rank0": "toy: rank 0",
        "rank1": "toy: rank 1",
    }


def test_ready_payloads_come_by_name_in_the_order_of_start(tmp_path: Path) -> None:
    supervisor = Supervisor()
    try:
        for name in ("b", "a"):
            supervisor.start(name, f"toy: {name}", toys.sleeps, (str(tmp_path), name))
        payloads = supervisor.wait_ready()
        assert list(payloads) == ["b", "a"]
        assert payloads["a"] == {"status": "ready", "name": "a"}
        pids = supervisor.pids()
        assert {name: int((tmp_path / name).read_text()) for name in ("b", "a")} == pids
    finally:
        supervisor.stop(grace=5.0)
    assert not any(psutil.pid_exists(pid) for pid in pids.values())
    with pytest.raises(RuntimeError, match="toy: late cannot start"):
        supervisor.start("late", "toy: late", toys.sleeps, (str(tmp_path), "late"))


def test_stop_kills_what_does_not_heed_sigterm(tmp_path: Path) -> None:
    supervisor = Supervisor()
    supervisor.start("stuck", "toy: stuck", toys.sleeps, (str(tmp_path), "stuck"))
    supervisor.wait_ready()
    pid = supervisor.pids()["stuck"]
    os.kill(pid, signal.SIGSTOP)
    supervisor.stop(grace=0.1)
    assert not psutil.pid_exists(pid)


def test_wait_ready_raises_what_the_child_reported(tmp_path: Path) -> None:
    supervisor = Supervisor()
    try:
        supervisor.start("bad", "toy: bad", toys.raises_before_ready, (str(tmp_path), "bad"))
        with pytest.raises(ChildFailed, match="ValueError: no weights for bad") as caught:
            supervisor.wait_ready()
        assert caught.value.exitcode == 1
        assert 'raise ValueError("no weights for " + name)' in caught.value.traceback
    finally:
        supervisor.stop(grace=1.0)
