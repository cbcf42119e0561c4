"""A real server in a process of its own, as a user would start it."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil

from bench.server_process import ServerProcess


class Server(ServerProcess):
    """`with Server(1, "--tp-size", "2") as server: server.post("/generate", ...)`.

    The model is `tiny-random` and the port one that was free, unless `flags` say otherwise.  `temp_dir` is the
    server's own directory for temporary files, and so the parent of its run directory.
    """

    def __init__(self, stage: int, *flags: str, wait: bool = True, env: dict[str, str] | None = None) -> None:
        defaults = ("--model-path", "tiny-random"), ("--log-level", "warning")
        added = [word for pair in defaults if pair[0] not in flags for word in pair]
        self.flags = flags
        self.temp_dir = Path(tempfile.mkdtemp(prefix="eras-", dir="/tmp"))
        super().__init__(stage, [*added, *flags], wait=wait, env={"TMPDIR": str(self.temp_dir), **(env or {})})

    def wait_ready(self) -> None:
        super().wait_ready()
        self.client = httpx.Client(base_url=self.url, timeout=120, limits=httpx.Limits(max_connections=None))

    def tree(self) -> list[psutil.Process]:
        """Every process of the server, the main process first; without Python's resource trackers."""
        main = psutil.Process(self.pid)
        return [main, *(child for child in main.children(recursive=True) if "stage" in title(child))]

    def everything(self) -> list[psutil.Process]:
        """The tree with Python's resource trackers."""
        main = psutil.Process(self.pid)
        return [main, *main.children(recursive=True)]

    def run_dirs(self) -> list[Path]:
        return list(self.temp_dir.glob("process-eras-*"))

    def signal_group(self, signum: int) -> None:
        """What Ctrl-C in a terminal, `timeout` and systemd do: every process gets the signal at once."""
        os.killpg(self.pid, signum)

    def find(self, wanted: str) -> psutil.Process:
        """The one process with this title."""
        (found,) = [process for process in self.tree() if title(process) == wanted]
        return found

    def post(self, path: str, json: Any, **kwargs: Any) -> httpx.Response:
        return self.client.post(path, json=json, **kwargs)

    def generate(self, **request: Any) -> Any:
        """`/generate`, which must succeed; its JSON."""
        response = self.post("/generate", request)
        assert response.status_code == 200, response.text
        return response.json()

    def info(self) -> Any:
        return self.client.get("/get_server_info").json()

    def assert_whole(self, within: float = 5.0) -> None:
        """Nothing runs and every token and request slot of every replica is accounted for."""
        deadline = time.monotonic() + within
        while True:
            states = self.info()["internal_states"]
            whole = all(
                state["running"] == state["waiting"] == state["protected_tokens"] == state["leaks"] == 0
                and state["free_tokens"] + state["evictable_tokens"] == state["capacity_tokens"]
                and state["free_request_slots"] == state["max_running_requests"]
                for state in states
            )
            if whole:
                return
            assert time.monotonic() < deadline, f"the pool is not whole: {states}"
            time.sleep(0.1)

    def kill(self) -> None:
        """Ends whatever is left, for tests that have failed."""
        for process in reversed(self.tree() if psutil.pid_exists(self.pid) else []):
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.kill()
        self.process.wait()

    def clean_up(self) -> None:
        """Ends what may be left and removes `temp_dir`."""
        self.kill()
        shutil.rmtree(self.temp_dir, ignore_errors=True)

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        finally:
            self.clean_up()


def title(process: psutil.Process) -> str:
    """What `ps` shows, "" for a process that has ended."""
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.Error:
        return ""


def wait_gone(processes: list[psutil.Process], within: float) -> list[psutil.Process]:
    """Those of `processes` that are still alive (zombies are not) after `within` seconds."""
    deadline = time.monotonic() + within
    left = processes
    while left and time.monotonic() < deadline:
        left = [p for p in left if p.is_running() and _status(p) != psutil.STATUS_ZOMBIE]
        time.sleep(0.02)
    return left


def _status(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.Error:
        return str(psutil.STATUS_ZOMBIE)
