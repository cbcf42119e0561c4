"""A folder of the cache is complete or absent, whatever happened to its maker or to its files."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.weights.cache import MANIFEST, cache_root, cached_folder


class Builder:
    """Writes two files and counts how often it is asked to."""

    def __init__(self) -> None:
        self.builds = 0

    def __call__(self, folder: Path) -> None:
        self.builds += 1
        (folder / "weights").write_bytes(b"w" * 100_000)
        (folder / "config").write_text("config")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PROCESS_ERAS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def assert_whole(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(["config", "weights", MANIFEST])
    assert (folder / "weights").read_bytes() == b"w" * 100_000


def test_the_root_is_the_variable_or_the_home_folder(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_root() == cache
    monkeypatch.delenv("PROCESS_ERAS_CACHE")
    monkeypatch.setenv("HOME", "/somewhere")
    assert cache_root() == Path("/somewhere/.cache/process-eras")


def test_it_is_built_once_and_again_for_another_source(cache: Path) -> None:
    build = Builder()
    for _ in range(3):
        assert_whole(cached_folder("m", "one", build))
    assert build.builds == 1
    assert_whole(cached_folder("m", "two", build))
    assert build.builds == 2


def overwrite_one_byte(folder: Path) -> None:
    with (folder / "weights").open("r+b") as file:
        file.seek(50_000)
        file.write(b"x")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda folder: os.truncate(folder / "weights", 50_000),
    "empty": lambda folder: (folder / "weights").write_bytes(b""),
    "overwritten": overwrite_one_byte,
    "missing": lambda folder: (folder / "config").unlink(),
    "no manifest": lambda folder: (folder / MANIFEST).unlink(),
    "broken manifest": lambda folder: (folder / MANIFEST).write_text('{"format": 1'),
    "foreign manifest": lambda folder: (folder / MANIFEST).write_text("[]"),
    "only the folder": lambda folder: [path.unlink() for path in folder.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_noticed_and_made_anew(damage: str) -> None:
    build = Builder()
    folder = cached_folder("m", "one", build)
    DAMAGES[damage](folder)
    assert_whole(cached_folder("m", "one", build))
    assert build.builds == 2


def test_a_copied_cache_is_checked_and_kept(cache: Path) -> None:
    build = Builder()
    folder = cached_folder("m", "one", build)
    shutil.copytree(folder, cache / "copy")
    shutil.rmtree(folder)
    (cache / "copy").rename(folder)
    manifest = (folder / MANIFEST).read_bytes()
    assert_whole(cached_folder("m", "one", build))
    assert build.builds == 1
    assert (folder / MANIFEST).read_bytes() != manifest  # it knows the copies now


def test_a_failed_build_leaves_nothing_and_the_next_one_works(cache: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "weights").write_bytes(b"half")
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        cached_folder("m", "one", fail)
    assert [path.name for path in (cache / "models").iterdir()] == [".m.lock"]
    assert_whole(cached_folder("m", "one", Builder()))


def test_a_killed_build_leaves_nothing_to_be_used(cache: Path) -> None:
    script = """
import sys, time
from shared.weights.cache import cached_folder
def build(folder):
    (folder / "weights").write_bytes(b"half")
    print("building", flush=True)
    time.sleep(60)
cached_folder("m", "one", build)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not (cache / "models" / "m").exists()
    assert_whole(cached_folder("m", "one", Builder()))
    assert sorted(path.name for path in (cache / "models").iterdir()) == [".m.lock", "m"]


def test_two_at_the_same_time_build_once_and_both_get_it() -> None:
    build = Builder()

    def slow(folder: Path) -> None:
        time.sleep(0.2)
        build(folder)

    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(cached_folder("m", "one", slow))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert build.builds == 1
    assert len(found) == 4
    assert_whole(found[0])
