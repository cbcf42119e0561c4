"""`Supervisor`: the one way to have child processes.

Whoever starts processes (the main process, a router, a controller) owns one.  It knows when each child is
ready, notices the end of any of them from a thread of its own, then ends the others and this process too, so
that a death anywhere in the tree travels up to the main process within moments.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, NoReturn

from shared import trace
from shared.launch.logs import current_level

logger = logging.getLogger(__name__)

DEATH_GRACE_S = 0.5
"""Seconds between SIGTERM and SIGKILL for the other children once one has died."""

LEAVE_GRACE_S = 2.5
"""Seconds that a process with an `on_death` callback has to leave by itself before it is ended."""

_ENDED_AT_ONCE_S = 2.0

TOLD_TO_END_S = 0.5
"""Seconds in which a signal that ended a child in order may reach this process too: `timeout`, systemd and some
shells send SIGTERM to all processes at once."""


class ChildFailed(Exception):
    """A child process ended that should not have.

    Attributes:
        title: the child's process title.
        pid: its process id.
        exitcode: its exit status, or minus the number of the signal that killed it.
        traceback: the traceback that it reported, "" if it could not.
    """

    def __init__(self, title: str, pid: int, exitcode: int, ready: bool, reason: str, traceback: str) -> None:
        how = f"killed by {signal.Signals(-exitcode).name}" if exitcode < 0 else f"exit status {exitcode}"
        when = "died" if ready else "died before it was ready"
        super().__init__(f"{title} (pid {pid}) {when}: {how}" + (f": {reason}" if reason else ""))
        self.title = title
        self.pid = pid
        self.exitcode = exitcode
        self.traceback = traceback


@dataclass
class _Child:
    title: str
    process: SpawnProcess
    reader: Connection
    on_death: Callable[[ChildFailed], bool] | None
    ready: dict[str, Any] | None = None
    reason: str = ""
    traceback: str = ""
    reader_open: bool = True
    dead: bool = False
    ended: bool = False


class Supervisor:
    """Starts, watches and ends this process's children.

    `at_exit` is called before the supervisor ends this process because of a death.  Children inherit the log
    level and the trace folder of this process.
    """

    def __init__(self, at_exit: Callable[[], None] | None = None) -> None:
        self._at_exit = at_exit
        self._context = multiprocessing.get_context("spawn")
        self._children: dict[str, _Child] = {}
        self._changed = threading.Condition(threading.RLock())
        self._waiting = 0
        self._failure: ChildFailed | None = None
        self._stopping = False
        self._told_to_end = threading.Event()
        self._callback: Callable[[ChildFailed], None] | None = None
        self._wake_reader, self._wake_writer = self._context.Pipe(duplex=False)
        _supervisors.append(self)
        atexit.register(self.stop, grace=1.0)  # else multiprocessing would wait for the children at exit

    def start(
        self,
        name: str,
        title: str,
        target: Callable[..., None],
        args: tuple[Any, ...] = (),
        on_death: Callable[[ChildFailed], bool] | None = None,
    ) -> None:
        """Starts a process that runs `target(*args, pipe_writer)`.

        `name` is the key in `wait_ready`'s answer.  `target` is a function of a module; it sends
        `{"status": "ready", ...}` once through `pipe_writer`, a `Connection`, and works until it is ended.
        Call it from a thread that lives as long as this process: on Linux a child ends with the thread that
        started it.

        `on_death(failure)` is asked, from the watching thread, when this child dies after every child was
        ready: True says that this process goes on without it.
        """
        from shared.launch.child import run_child  # here, because it imports this module

        _quiet_resource_tracker()
        with self._changed:
            if self._failure is not None:
                raise self._failure
            if self._stopping:
                raise RuntimeError(f"{title} cannot start: this process is ending")
            reader, writer = self._context.Pipe(duplex=False)
            process = self._context.Process(
                target=run_child,
                args=(
                    title,
                    current_level(),
                    trace.current_folder(),
                    target.__module__,
                    target.__qualname__,
                    args,
                    writer,
                ),
                name=title,
            )
            # A signal that comes before the child has set up its own handling waits until it has.
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
            try:
                process.start()
                writer.close()
                if not self._children:
                    threading.Thread(target=self._watch, name="supervisor", daemon=True).start()
                self._children[name] = _Child(title, process, reader, on_death)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self._wake_writer.send_bytes(b"new")

    def wait_ready(self) -> dict[str, dict[str, Any]]:
        """Waits until every child has reported ready.

        Returns their payloads by name, in the order of `start`.  Raises `ChildFailed` for the first child
        that dies before then (ready or not), which is logged already unless it ended in order.  There is no
        time limit: slowness is not death.
        """
        with self._changed:
            self._waiting += 1
            try:
                while True:
                    if self._failure is not None:
                        raise self._failure
                    payloads = {name: child.ready for name, child in self._children.items() if child.ready}
                    if len(payloads) == len(self._children):
                        return payloads
                    self._changed.wait()
            finally:
                self._waiting -= 1

    def on_death(self, callback: Callable[[ChildFailed], None]) -> None:
        """Calls `callback(failure)` from the watching thread when a child dies outside `wait_ready`.

        The other children are ended meanwhile.  This process then has `LEAVE_GRACE_S` to leave by itself with
        a non-zero status; without a callback, or after that, it is ended with status 1.
        """
        self._callback = callback

    def expect_ends(self) -> None:
        """This process has been told to end, and its children perhaps too: those that exit with 0 did not die."""
        if not self._told_to_end.is_set():  # a signal handler that falls into `set` must not wait for it
            self._told_to_end.set()

    def lost_a_child(self, within: float) -> bool:
        """Whether a child has died, or does within so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._failure is not None, within)

    def pids(self) -> dict[str, int]:
        """The pid of each child by name."""
        with self._changed:
            return {name: _pid(child) for name, child in self._children.items()}

    def stop(self, grace: float = 2.0) -> None:
        """Ends the children: SIGTERM to all, SIGKILL after `grace` seconds to those that are left.

        Returns when all are gone.  Nothing can be started afterwards.
        """
        with self._changed:
            self._stopping = True
            children = list(self._children.values())
        self.expect_ends()
        self._end(children, grace)
        with self._changed:
            self._changed.notify_all()

    def end(self, names: Iterable[str], grace: float = DEATH_GRACE_S) -> None:
        """Ends some children as `stop` does; this process and its other children go on."""
        with self._changed:
            children = [self._children[name] for name in names]
            for child in children:
                child.ended = True
        self._end(children, grace)

    def _end(self, children: list[_Child], grace: float) -> None:
        for kill, seconds in ((SpawnProcess.terminate, grace), (SpawnProcess.kill, _ENDED_AT_ONCE_S)):
            left = [child for child in children if self._alive(child)]
            for child in left:
                kill(child.process)
            deadline = time.monotonic() + seconds
            while left and (remaining := deadline - time.monotonic()) > 0:
                multiprocessing.connection.wait([child.process.sentinel for child in left], remaining)
                left = [child for child in left if self._alive(child)]

    def _alive(self, child: _Child) -> bool:
        with self._changed:  # one thread at a time may reap
            return child.process.exitcode is None

    def _watch(self) -> None:
        while True:
            with self._changed:
                alive = [child for child in self._children.values() if not child.dead]
            readers = {child.reader: child for child in alive if child.reader_open}
            sentinels = {child.process.sentinel: child for child in alive}
            for event in multiprocessing.connection.wait([self._wake_reader, *readers, *sentinels]):
                if event is self._wake_reader:
                    self._wake_reader.recv_bytes()
                elif isinstance(event, Connection):
                    self._receive(readers[event])
                elif isinstance(event, int):
                    self._bury(sentinels[event])

    def _receive(self, child: _Child) -> None:
        try:
            message = child.reader.recv()
        except (EOFError, OSError):
            child.reader_open = False
            return
        with self._changed:
            if message["status"] == "ready":
                child.ready = message
            else:
                child.reason, child.traceback = message["reason"], message["traceback"]
            self._changed.notify_all()

    def _bury(self, child: _Child) -> None:
        while child.reader_open and child.reader.poll():
            self._receive(child)
        with self._changed:
            child.dead = True
            child.process.join()
            exitcode = child.process.exitcode
        in_order = exitcode == 0 and not child.ended and self._told_to_end.wait(TOLD_TO_END_S)
        with self._changed:
            if self._stopping or child.ended or self._failure is not None or exitcode is None:
                return
            ready = child.ready is not None
            failure = ChildFailed(child.title, _pid(child), exitcode, ready, child.reason, child.traceback)
            if in_order:  # whoever was told to end this process does
                self._failure = failure
                self._changed.notify_all()
                return
            logger.error("%s", failure)
            all_ready = all(other.ready for other in self._children.values())
        if child.on_death and all_ready and child.on_death(failure):
            return
        with self._changed:
            self._failure = failure
            self._changed.notify_all()
            if self._waiting:
                return
        self._end_after(failure)

    def _end_after(self, failure: ChildFailed) -> NoReturn:
        deadline = time.monotonic() + (LEAVE_GRACE_S if self._callback else 0.0)
        try:
            if self._callback:
                self._callback(failure)
        finally:
            self.stop(DEATH_GRACE_S)
            if _pipe_to_parent is not None:
                report(_pipe_to_parent, str(failure), failure.traceback)
            time.sleep(max(0.0, deadline - time.monotonic()))
            if self._at_exit:
                self._at_exit()
            trace.flush()
            logging.shutdown()
            os._exit(1)


def _pid(child: _Child) -> int:
    assert child.process.pid is not None
    return child.process.pid


_supervisors: list[Supervisor] = []
_pipe_to_parent: Connection | None = None
_report_lock = threading.Lock()


def stop_all(grace: float) -> None:
    """Ends the children of every supervisor of this process."""
    for supervisor in _supervisors:
        supervisor.stop(grace)


def expect_all_ends() -> None:
    """This process has been told to end: `Supervisor.expect_ends` of every supervisor of this process."""
    for supervisor in _supervisors:
        supervisor.expect_ends()


def leave_now() -> NoReturn:
    """Ends this process with status 0 and its children with SIGKILL, whatever it was doing."""
    stop_all(grace=0.0)
    for supervisor in _supervisors:
        if supervisor._at_exit:
            supervisor._at_exit()
    trace.flush()
    os._exit(0)


def has_children() -> bool:
    """Whether this process has ever started another."""
    return bool(_supervisors)


def lost_a_child(within: float) -> bool:
    """Whether a child of this process has died, or does within so many seconds."""
    return any(supervisor.lost_a_child(within) for supervisor in _supervisors)


def report_deaths_to(pipe_writer: Connection) -> None:
    """From now on the death of a child of this process is reported to its parent through `pipe_writer`."""
    global _pipe_to_parent
    _pipe_to_parent = pipe_writer


def report(pipe_writer: Connection, reason: str, traceback: str) -> None:
    """Tells the parent why this process ends; a parent that is gone is no error."""
    try:
        with _report_lock:
            pipe_writer.send({"status": "error", "reason": reason, "traceback": traceback})
    except OSError:
        pass


def _quiet_resource_tracker() -> None:
    """Starts Python's helper process for shared semaphores, told not to warn.

    It removes what a killed process has left behind, and would otherwise print a warning about having had to.
    """
    quiet = "ignore:resource_tracker:UserWarning"
    if quiet not in sys.warnoptions:
        sys.warnoptions.append(quiet)
    resource_tracker.ensure_running()
