"""A child that never outlives its parent, whatever ends the parent.

Linux sends a signal when the parent ends (`prctl(PR_SET_PDEATHSIG)`), which works even while this process
holds the interpreter lock in native code.  Everywhere else a daemon thread waits for the end of the pipe that
only the parent holds open; on Linux it runs too, for sandboxes that refuse prctl.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Ends this `multiprocessing` child, as by SIGKILL, once its parent is gone; at once if it already is.

    On Linux the signal also comes when the *thread* that started this process ends.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError("end_with_parent is for a process that multiprocessing started")
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:
        _end()
    threading.Thread(target=_wait_for_parent, args=(parent.sentinel,), name="parent watch", daemon=True).start()


def _wait_for_parent(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    _end()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
