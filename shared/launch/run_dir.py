"""The run directory: where the private sockets of one launch lie, for this user only (mode 0700).

It is locked for as long as the server lives.  What a killed server has left is found unlocked by the next
start, and removed: a lock, unlike a pid, cannot be mistaken for another process's.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import secrets
import shutil
import tempfile
from pathlib import Path

from shared.messages import PortArgs

_PREFIX = "process-eras-"
_LOCK = "lock"
_LONGEST_SOCKET_PATH = 100
"""Bytes of a Unix socket's path that every system takes (Linux 107, macOS 103)."""


class RunDir:
    """A fresh run directory, removed by `remove`, and at the latest when the interpreter ends."""

    def __init__(self) -> None:
        base = Path(tempfile.gettempdir())
        if len(os.fsencode(base / _PREFIX)) > _LONGEST_SOCKET_PATH - 40:
            base = Path("/tmp")
        sweep(base)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        new = self.path / "new"
        self._lock = open(new, "wb")  # noqa: SIM115  held until the process ends
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(self.path / _LOCK)  # under this name it has always been locked by its owner
        atexit.register(self.remove)

    def port_args(self) -> PortArgs:
        """Addresses in this directory and a fresh random secret."""

        def ipc(name: str) -> str:
            return f"ipc://{self.path}/{name}"

        return PortArgs(
            run_dir=str(self.path),
            tokenizer_ipc_name=ipc("tokenizer"),
            scheduler_input_ipc_name=ipc("scheduler"),
            detokenizer_ipc_name=ipc("detokenizer"),
            secret=secrets.token_bytes(32),
        )

    def remove(self) -> None:
        """Removes the directory and what is in it; may be called twice."""
        atexit.unregister(self.remove)
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def sweep(base: Path) -> None:
    """Removes this user's run directories under `base` whose server is gone."""
    for path in base.glob(_PREFIX + "*"):
        if path.is_symlink() or not path.is_dir() or path.stat().st_uid != os.getuid():
            continue
        try:
            with open(path / _LOCK, "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue  # in use, or being made or removed by another
