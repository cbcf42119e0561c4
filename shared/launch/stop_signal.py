"""SIGINT and SIGTERM in the main process."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from shared.launch import supervisor

IMPORT_RETRY_S = 0.02


class StopRequested(BaseException):
    """SIGINT or SIGTERM came before the server was serving."""


@dataclass
class StopSignal:
    """The main process's signal handler: the first signal stops in order, a second Ctrl-C at once.

    The first raises `StopRequested` in the `with` block, or calls what `hand_over` was given.  After the block
    nothing is raised: the process is ending.

    An exception in the middle of an import is lost where it falls into one of the callbacks that Python calls
    then, and it would leave half a module.  There the handler waits, and is called again by an alarm.
    """

    requested: bool = False
    leaving: bool = False
    stop_serving: Callable[[], None] | None = None

    def __enter__(self) -> None:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(signum, self)

    def __exit__(self, *_: object) -> None:
        self.leaving = True
        signal.setitimer(signal.ITIMER_REAL, 0)  # the interpreter's end would let the alarm kill the process

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.leaving or (self.requested and signum != signal.SIGALRM):
            if signum == signal.SIGINT:
                supervisor.leave_now()
            return
        self.requested = True
        supervisor.expect_all_ends()
        if self.stop_serving is not None:
            self.stop_serving()
        elif _is_importing(frame):
            signal.setitimer(signal.ITIMER_REAL, IMPORT_RETRY_S)
        else:
            raise StopRequested

    def hand_over(self, stop_serving: Callable[[], None]) -> None:
        """From now on the first signal calls `stop_serving`."""
        self.stop_serving = stop_serving


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__") == "importlib._bootstrap":
            return True
        frame = frame.f_back
    return False
