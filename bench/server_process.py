"""A stage's server in a process of its own, started as a user would start it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parent.parent
START_TIMEOUT_S = 180
STOP_TIMEOUT_S = 20


def end_on_sigterm() -> None:
    """Makes SIGTERM leave through the `with` blocks of the main thread, which end their servers."""
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))


class ServerFailed(RuntimeError):
    """The server did not start; the message is its output."""


class ServerProcess:
    """`with ServerProcess(1, ["--tp-size", "2"]) as server: httpx.get(server.url + "/health")`.

    Takes a free port unless `flags` name one.  `output` is everything the server has printed so far.
    """

    def __init__(
        self, stage: int, flags: Sequence[str] = (), *, wait: bool = True, env: dict[str, str] | None = None
    ) -> None:
        (package,) = ROOT.glob(f"stage{stage}_*")
        port = [] if "--port" in flags else ["--port", "0"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"{package.name}.server", *port, *flags],
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.output = ""
        self.url = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if wait:
            try:
                self.wait_ready()
            except BaseException:
                self.kill()
                raise

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            found = re.search(r"is ready at (http://\S+)", line)
            if found:
                self.url = found[1]
                self._ready.set()
        self._ready.set()

    def wait_ready(self) -> None:
        """Waits until `url` is served.  Raises `ServerFailed`."""
        if not self._ready.wait(START_TIMEOUT_S) or not self.url:
            self.kill()
            raise ServerFailed(f"the server did not start:\n{self.output}")

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_exit(self, within: float) -> int:
        """The exit status.  Raises `subprocess.TimeoutExpired` where it runs on for `within` seconds."""
        status = self.process.wait(within)
        self._reader.join(5)
        return status

    def stop(self) -> int:
        """Ends the server in order; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.wait_exit(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def kill(self) -> None:
        """Ends the main process at once; the others end with it."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
