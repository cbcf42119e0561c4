"""Records where a process spends its time, on CLOCK_MONOTONIC, and writes it beside the work.

A loop owns a `Track` and calls `lap(name)` where one part of it ends and the next begins: one clock read, so that
the parts tile the loop.  `end_step` closes an iteration.  What was recorded is written by a thread of its own,
four times a second, as length-prefixed `marshal` blocks in `DIR/<pid>.spans`.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import struct
import threading
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Final

from shared.messages import TokenizedGenerateReqInput

if TYPE_CHECKING:
    from shared.scheduling.batch import ScheduleBatch

WRITE_INTERVAL_S: Final = 0.25
IDLE_SPAN_NS: Final = 250_000_000
"""Empty iterations in a row become one span, of this length at most."""

DEVICE_THREAD: Final = "device"
"""The track of what the device does, which in `sim` is what it pretends to do."""

LENGTH: Final = struct.Struct("<Q")


class NullTrack:
    """What `track` gives where nothing is recorded: every call does nothing."""

    def lap(self, name: str, num_bytes: int | None = None) -> None:
        """Ends the part that began with the last lap of this track, under this name."""

    def lap_in(self, name: str, reqs: Iterable[Any], num_bytes: int | None = None) -> None:
        """The same, with the ids of the requests among `reqs`."""

    def lap_out(self, name: str, outputs: Iterable[Any], num_bytes: int | None = None) -> None:
        """The same, with the ids of the requests that begin or end in `outputs`."""

    def lap_batch(self, batch: ScheduleBatch | None) -> None:
        """Ends the part in which the next batch was formed: "prepare batch", or "schedule" if there is none."""

    def end_step(self, busy: bool = False) -> None:
        """Ends an iteration.  One without a forward or a request counts as idle unless it was `busy`."""

    def now(self) -> int:
        """The start for a `span`, in ns."""
        return 0

    def span(
        self,
        name: str,
        start_ns: int,
        end_ns: int | None = None,
        *,
        rids: Iterable[str] = (),
        messages: Collection[Any] = (),
        num_bytes: int | None = None,
    ) -> None:
        """A part outside the tiling: from `start_ns` to `end_ns`, by default now; with the requests of `messages`."""


class Track(NullTrack):
    """One loop's record.  All calls come from one thread (those of an event loop, from that loop)."""

    def __init__(self, records: list[Any], thread: str, drives: str | None) -> None:
        self._append = records.append
        self._thread = thread
        # Flat, because the garbage collector would follow a tuple a lap.
        self._laps: list[Any] = []
        self._notes: list[tuple[int, int | None, tuple[str, ...]]] = []
        self._step = 0
        self._running = self._forwards = 0
        self._is_prefill = self._carries = False
        self._start_ns = monotonic_ns()
        self._idle_since_ns = 0
        self._append(("track", thread, drives))

    def lap(self, name: str, num_bytes: int | None = None) -> None:
        self._laps += (name, monotonic_ns())
        if num_bytes is not None:
            self._notes.append((len(self._laps), num_bytes, ()))

    def lap_in(self, name: str, reqs: Iterable[Any], num_bytes: int | None = None) -> None:
        self._laps += (name, monotonic_ns())
        self._note(arrived_rids(reqs), num_bytes)

    def lap_out(self, name: str, outputs: Iterable[Any], num_bytes: int | None = None) -> None:
        self._laps += (name, monotonic_ns())
        self._note(arrived_rids(outputs) or ended_rids(outputs), num_bytes)

    def lap_batch(self, batch: ScheduleBatch | None) -> None:
        if batch is None:
            self._laps += ("schedule", monotonic_ns())
            return
        self._laps += ("prepare batch", monotonic_ns())
        self._running = len(batch.reqs)
        self._forwards += 1
        if batch.is_prefill:
            self._is_prefill = True
            self._note(tuple([req.rid for req in batch.reqs]), None)

    def _note(self, rids: tuple[str, ...], num_bytes: int | None) -> None:
        if rids or num_bytes is not None:
            self._notes.append((len(self._laps), num_bytes, rids))
            self._carries = self._carries or bool(rids)

    def end_step(self, busy: bool = False) -> None:
        laps = self._laps
        if not laps:
            return
        end_ns: int = laps[-1]
        if busy or self._forwards or self._carries:
            if self._idle_since_ns:
                self._end_idle(self._start_ns)
            kind = "prefill" if self._is_prefill else "decode" if self._forwards else "idle"
            self._step += 1
            head = (self._thread, self._step, kind, self._running, self._forwards, self._start_ns)
            self._append(("step", head, tuple(laps), tuple(self._notes)))
            self._running = self._forwards = 0
            self._is_prefill = self._carries = False
        else:
            self._idle_since_ns = self._idle_since_ns or self._start_ns
            if end_ns - self._idle_since_ns > IDLE_SPAN_NS:
                self._end_idle(end_ns)
        self._start_ns = end_ns
        laps.clear()
        self._notes.clear()

    def _end_idle(self, end_ns: int) -> None:
        self._step += 1
        head = (self._thread, self._step, "idle", 0, 0, self._idle_since_ns)
        self._append(("step", head, ("idle", end_ns), ()))
        self._idle_since_ns = 0

    def now(self) -> int:
        return monotonic_ns()

    def span(
        self,
        name: str,
        start_ns: int,
        end_ns: int | None = None,
        *,
        rids: Iterable[str] = (),
        messages: Collection[Any] = (),
        num_bytes: int | None = None,
    ) -> None:
        end_ns = monotonic_ns() if end_ns is None else end_ns
        if messages:
            rids = (*rids, *arrived_rids(messages), *ended_rids(messages))
        self._append(("span", self._thread, name, start_ns, end_ns, tuple(rids), num_bytes))


class Recorder:
    """This process's file, and the thread that writes it."""

    def __init__(self, folder: Path, title: str) -> None:
        self.folder = folder
        self._tracks: dict[str, Track] = {}
        self._records: list[Any] = [("process", os.getpid(), title)]
        self._file = open(folder / f"{os.getpid()}.spans", "xb")  # noqa: SIM115  written until the process ends
        self._lock = threading.Lock()
        threading.Thread(target=self._write_on, name="trace", daemon=True).start()

    def track(self, thread: str, drives: str | None) -> Track:
        """The track of this name, made by the first call."""
        if thread not in self._tracks:
            self._tracks.setdefault(thread, Track(self._records, thread, drives))
        return self._tracks[thread]

    def _write_on(self) -> None:
        while True:
            self.flush()
            time.sleep(WRITE_INTERVAL_S)

    def flush(self) -> None:
        """Writes what has been recorded so far."""
        with self._lock:
            # Others append meanwhile, through a bound method: the list must stay the same one.
            block = self._records[:]
            if not block:
                return
            del self._records[: len(block)]
            data = marshal.dumps(block)
            with contextlib.suppress(OSError):  # a full disk costs the trace, not the server
                self._file.write(LENGTH.pack(len(data)) + data)
                self._file.flush()


def arrived_rids(messages: Iterable[Any]) -> tuple[str, ...]:
    """The requests that these messages bring."""
    return tuple([message.rid for message in messages if isinstance(message, TokenizedGenerateReqInput)])


def ended_rids(outputs: Iterable[Any]) -> tuple[str, ...]:
    """The requests whose last tokens are in these messages (`BatchTokenIDOut` or `BatchStrOut`)."""
    return tuple(
        [
            rid
            for output in outputs
            if hasattr(output, "finish_reasons")
            for rid, reason in zip(output.rids, output.finish_reasons, strict=True)
            if reason is not None
        ]
    )


_NULL: Final = NullTrack()
_recorder: Recorder | None = None


def start(folder: str | None, title: str) -> None:
    """From now on this process records into `folder`; with None, nothing."""
    global _recorder
    if folder is not None:
        _recorder = Recorder(Path(folder), title)


def current_folder() -> str | None:
    """Where this process records, for the processes that it starts."""
    return None if _recorder is None else str(_recorder.folder)


def track(thread: str = "loop", drives: str | None = None) -> NullTrack:
    """This process's track for one loop, shown as a thread of this name.

    `drives` is the title of the process that each iteration calls and waits for.
    """
    return _NULL if _recorder is None else _recorder.track(thread, drives)


def flush() -> None:
    """Writes what is recorded, before this process ends."""
    if _recorder is not None:
        _recorder.flush()


def stop() -> str | None:
    """Ends the recording; returns the folder if there was one."""
    global _recorder
    flush()
    folder, _recorder = current_folder(), None
    return folder


class TraceFolderUnusable(Exception):
    """The folder of `--trace-dir` cannot be written, or holds a trace; the message is one line with the fix."""


def prepare_folder(folder: str) -> str:
    """Makes the folder if it is missing; returns its absolute path.  Raises `TraceFolderUnusable`."""
    path = Path(folder).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".probe"
        probe.write_bytes(b"")
        probe.unlink()
        if any(path.glob("*.spans")) or (path / "trace.json").exists():
            raise TraceFolderUnusable(f"--trace-dir {folder} already holds a trace; give an empty or new folder")
    except OSError as error:
        raise TraceFolderUnusable(f"--trace-dir {folder} cannot be written: {error.strerror}") from None
    return str(path)
