"""The model cache: a folder in it is complete, or is not there.

A model is built in a temporary folder beside its place, under a lock, written through to the disk, and
renamed.  Its manifest lists every file with size, sha256 and inode change time.  At the next start sizes and
change times are compared, which costs a `stat` per file; a file that was written to, replaced, or copied with
the cache has another change time and is read again in full.  A file that turns out truncated, overwritten or
missing makes the folder be built anew.  Bits that rot on the disk without any write go unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from filelock import FileLock, Timeout

MANIFEST: Final = "process-eras.json"
FORMAT_VERSION: Final = 1  # raise it when what gets built changes: older folders are then built anew


def cache_root() -> Path:
    """$PROCESS_ERAS_CACHE, else ~/.cache/process-eras."""
    return Path(os.environ.get("PROCESS_ERAS_CACHE") or "~/.cache/process-eras").expanduser().absolute()


def cached_folder(name: str, source: str, build: Callable[[Path], None]) -> Path:
    """The cache's folder `name`, made by `build(empty folder)` unless it is there, whole and from `source`.

    Processes that ask at the same time build once; the others wait.  Raises what `build` raises, and OSError
    when the cache cannot be written.
    """
    models = cache_root() / "models"
    place = models / name
    if _is_whole(place, source):
        return place
    models.mkdir(parents=True, exist_ok=True)
    with _locked(models / f".{name}.lock", name):
        if _is_whole(place, source):  # the process that held the lock before has built it
            return place
        for leftover in models.glob(f".{name}.build-*"):  # of killed builds: the lock says that none is running
            shutil.rmtree(leftover, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=f".{name}.build-", dir=models))
        try:
            fresh = work / "fresh"
            fresh.mkdir()
            build(fresh)
            _write_manifest(fresh, source, _describe(fresh))
            _flush_to_disk(fresh)
            if place.exists():
                place.rename(work / "broken")
            fresh.rename(place)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return place


def sha256_of(path: Path) -> str:
    """Hexadecimal sha256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    """Holds a lock file, which the system lets go of when its holder dies."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"waiting for another process that prepares {name}", file=sys.stderr, flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _describe(folder: Path) -> dict[str, dict[str, Any]]:
    files = sorted(path for path in folder.iterdir() if path.name != MANIFEST)
    return {path.name: {**_stamp(path), "sha256": sha256_of(path)} for path in files}


def _stamp(path: Path) -> dict[str, int]:
    stat = path.stat()
    return {"size": stat.st_size, "changed_ns": stat.st_ctime_ns}


def _write_manifest(folder: Path, source: str, files: dict[str, dict[str, Any]]) -> None:
    manifest = {"format": FORMAT_VERSION, "source": source, "files": files}
    temporary = folder / f"{MANIFEST}.{os.getpid()}"
    temporary.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    temporary.replace(folder / MANIFEST)


def _is_whole(folder: Path, source: str) -> bool:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT_VERSION or manifest["source"] != source or not manifest["files"]:
            return False
        files: dict[str, dict[str, Any]] = manifest["files"]
        stamps = {name: _stamp(folder / name) for name in files}
        touched = [name for name, stamp in stamps.items() if stamp["changed_ns"] != files[name]["changed_ns"]]
        if any(stamp["size"] != files[name]["size"] for name, stamp in stamps.items()):
            return False
        if any(sha256_of(folder / name) != files[name]["sha256"] for name in touched):
            return False
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return False
    if touched:
        _remember(folder, source, {name: {**files[name], **stamps[name]} for name in files})
    return True


def _remember(folder: Path, source: str, files: dict[str, dict[str, Any]]) -> None:
    """Notes the new change times of files whose contents were found right; a read-only cache stays."""
    try:
        _write_manifest(folder, source, files)
    except OSError:
        return


def _flush_to_disk(folder: Path) -> None:
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
