"""What every child process does around its target: its name, its log, its signals, its end.

The target is named, not pickled, so that its module (torch with it) is imported only after the process has
its title and will end with its parent.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from setproctitle import setproctitle

from shared import trace
from shared.launch import supervisor
from shared.launch.logs import set_up_logging
from shared.launch.parent_death import end_with_parent

logger = logging.getLogger(__name__)

CHILDREN_GRACE_S = 1.0
"""Seconds that this process's own children have between SIGTERM and SIGKILL."""

PEER_S = 0.3
"""Seconds that a process without children waits with an exception: if a peer's death is the cause (a lost
connection), whoever started both ends this one meanwhile, and names the other."""

CONSEQUENCE_S = PEER_S + supervisor.TOLD_TO_END_S
"""Seconds in which the death of a child is taken to be the cause of an exception here."""


def run_child(
    title: str,
    log_level: str,
    trace_folder: str | None,
    module: str,
    qualname: str,
    args: tuple[Any, ...],
    pipe_writer: Connection,
) -> NoReturn:
    """Runs `module.qualname(*args, pipe_writer)` as this process's work, then ends the process.

    Exit status 0 after SIGTERM and when the target returns, 1 when it raises; in every case this process's
    own children are ended first.  SIGINT is ignored: Ctrl-C reaches the whole group, and the parent decides.
    A target that raises leaves its traceback in this log and reports it to the parent.
    """
    setproctitle(title)
    end_with_parent()
    # SIGTERM stays blocked in every thread and is taken by one that waits for it: a handler would run in the
    # main thread only, which may sit in a collective.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_on_sigterm, name="SIGTERM", daemon=True).start()
    set_up_logging(title, log_level)
    trace.start(trace_folder, title)
    supervisor.report_deaths_to(pipe_writer)
    try:
        target: Any = importlib.import_module(module)
        for name in qualname.split("."):
            target = getattr(target, name)
        target(*args, pipe_writer)
    except supervisor.ChildFailed as failure:
        supervisor.report(pipe_writer, str(failure), failure.traceback)
        _leave(1)
    except BaseException as error:
        if not supervisor.has_children():
            time.sleep(PEER_S)
        elif supervisor.lost_a_child(within=CONSEQUENCE_S):
            threading.Event().wait()  # the supervisor is ending this process, and has named the cause
        logger.exception("%s ends: %s", title, type(error).__name__)
        supervisor.report(pipe_writer, _summary(error), traceback.format_exc())
        _leave(1)
    _leave(0)


def _summary(error: BaseException) -> str:
    return traceback.format_exception_only(type(error), error)[-1].strip()


def _end_on_sigterm() -> None:
    signal.sigwait({signal.SIGTERM})
    _leave(0)


def _leave(status: int) -> NoReturn:
    """Ends this process now: no interpreter shutdown, which native threads (gloo, CUDA) can hang or crash."""
    trace.flush()
    supervisor.stop_all(CHILDREN_GRACE_S)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
