"""The main process around a stage: port, flags, signals, the way out."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]

Start = Callable[..., "Server"]


class Server:
    """A running toy stage."""

    def __init__(self, base: Path, how: str, *flags: str) -> None:
        self.base = base
        self.marker = base / "started"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.launch.toy_stage", str(self.marker), how, *flags],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(base)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.announcement = ""

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.announcement += line
            if line.startswith("curl"):
                break

    def tree(self) -> list[psutil.Process]:
        main = psutil.Process(self.process.pid)
        return [main, *main.children(recursive=True)]

    def run_dirs(self) -> list[Path]:
        return list(self.base.glob("process-eras-*"))

    def end(self, processes: list[psutil.Process] | None = None) -> tuple[int, str, str]:
        """Exit status, the rest of stdout, stderr; nothing of the server is left."""
        out, err = self.process.communicate(timeout=30)
        _, alive = psutil.wait_procs(processes or [], timeout=5)
        assert not alive
        assert self.run_dirs() == []
        return self.process.returncode, out, err


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def start(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setenv("PROCESS_ERAS_CACHE", str(cache))
    base = Path(tempfile.mkdtemp(dir="/tmp"))
    servers: list[Server] = []

    def start_server(how: str, *flags: str) -> Server:
        servers.append(Server(base, how, *flags))
        return servers[-1]

    yield start_server
    for server in servers:
        if server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGKILL)
            server.process.wait()
    shutil.rmtree(base)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_taken_port_fails_the_start_before_anything_is_started(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = start("works", "--port", str(port))
        status, out, err = server.end()
    assert (status, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert f"port {port}" in err
    assert not server.marker.exists()


def test_a_tensor_parallel_size_that_cannot_work_is_refused_with_those_that_can(start: Start) -> None:
    server = start("works", "--port", "0", "--tp-size", "5")
    status, _, err = server.end()
    assert status == 2
    assert "--tp-size 5" in err.splitlines()[-1]
    assert "give one of 1, 2, 3, 4" in err.splitlines()[-1]
    assert not server.marker.exists()


def test_a_model_that_is_not_there_is_one_line(start: Start, tmp_path: Path) -> None:
    server = start("works", "--port", "0", "--model-path", str(tmp_path / "nothing"))
    status, _, err = server.end()
    assert status == 1
    assert "nothing" in err
    assert "Traceback" not in err


def test_the_process_tree_is_printed_without_starting_it(start: Start) -> None:
    server = start("works", "--print-process-tree")
    status, out, _ = server.end()
    assert status == 0
    assert [line.split("  ")[0] for line in out.splitlines()] == [
        "toy: main",
        "├─ toy: detokenizer",
        "└─ toy: middle",
    ]
    assert not server.marker.exists()


def test_a_ready_server_shows_its_real_processes_and_keeps_its_sockets_private(start: Start) -> None:
    server = start("works", "--port", "0")
    server.wait_ready()
    processes = server.tree()
    titles = {process.pid: process.cmdline()[0].strip() for process in processes}
    shown = {
        title: int(server.announcement.split(title)[1].split("pid ")[1].split()[0])
        for title in ("toy: main", "toy: detokenizer", "toy: middle")
    }
    assert all(titles[pid] == title for title, pid in shown.items())
    (run_dir,) = server.run_dirs()
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    listening = [
        connection.laddr
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    (address,) = set(listening)
    assert address.ip == "127.0.0.1"
    assert f"http://127.0.0.1:{address.port}/" in server.announcement
    server.process.terminate()
    status, _, err = server.end(processes)
    assert (status, err) == (0, "")
    socket.create_server(("127.0.0.1", address.port)).close()


def test_ctrl_c_to_the_process_group_ends_a_ready_server_with_status_0(start: Start) -> None:
    server = start("works", "--port", "0")
    server.wait_ready()
    processes = server.tree()
    os.killpg(server.process.pid, signal.SIGINT)
    status, _, err = server.end(processes)
    assert (status, err) == (0, "")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_start_ends_it_with_status_0(start: Start, signum: signal.Signals) -> None:
    server = start("starts", "--port", "0")
    wait_until(server.marker.exists)
    processes = server.tree()
    os.killpg(server.process.pid, signum)
    status, out, err = server.end(processes)
    assert (status, out, err) == (0, "", "")


@pytest.mark.parametrize("victim", ["toy: detokenizer", "toy: middle"])
def test_the_death_of_a_process_ends_the_server_with_status_1(start: Start, victim: str) -> None:
    server = start("works", "--port", "0")
    server.wait_ready()
    processes = server.tree()
    dying = next(process for process in processes if process.cmdline()[0].strip() == victim)
    dying.kill()
    status, _, err = server.end(processes)
    assert status == 1
    assert len(err.splitlines()) == 1
    assert f"{victim} (pid {dying.pid}) died: killed by SIGKILL" in err


def test_a_killed_main_process_leaves_no_process_behind(start: Start) -> None:
    server = start("works", "--port", "0")
    server.wait_ready()
    processes = server.tree()
    server.process.kill()
    server.process.wait()
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert not alive
