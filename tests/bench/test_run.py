"""`python -m bench run`: what it keeps, what it takes up again, and what it refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import ROOT
from tests.server.process import wait_gone

SELECTION = ("--stage", "3", "--suite", "idle", "--rounds", "1")


def start(results: Path, *more: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "bench", "run", *SELECTION, "-o", str(results), *more]
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(results: Path, *more: str) -> tuple[int, str]:
    """Exit status and what was printed to stderr."""
    process = start(results, *more)
    _, errors = process.communicate(timeout=120)
    return process.returncode, errors


def records(results: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(results.read_text())["records"] if results.exists() else []
    return found


def wait_for(check: Any, within: float = 100.0) -> None:
    """An outer limit, not a measurement."""
    deadline = time.monotonic() + within
    while not check():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A results file whose run was stopped by Ctrl-C after its first case, with the second server running."""
    results = tmp_path_factory.mktemp("bench") / "results.json"
    process = start(results)
    us = psutil.Process(process.pid)
    wait_for(us.children)
    first = us.children()
    wait_for(lambda: len(records(results)) == 1)
    wait_for(lambda: set(us.children()) - set(first))
    started = us.children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert f"{results} has what was measured" in errors
    assert wait_gone(started, within=10) == []
    return results, records(results)


def test_ctrl_c_keeps_what_was_measured(interrupted: tuple[Path, list[dict[str, Any]]]) -> None:
    results, kept = interrupted
    (record,) = kept
    assert record["stage"] == "stage3" and record["case"]["sleep_on_idle"] is False
    assert 0.1 < record["figures"]["cpu_share_all"] < 3
    assert json.loads(results.read_text())["finished"] is None


def test_the_same_command_measures_what_is_missing_and_nothing_twice(
    interrupted: tuple[Path, list[dict[str, Any]]],
) -> None:
    results, kept = interrupted
    assert finish(results)[0] == 0
    whole = records(results)
    assert whole[0] == kept[0]
    assert [record["case"]["sleep_on_idle"] for record in whole] == [False, True]
    assert json.loads(results.read_text())["finished"] is not None
    assert finish(results)[0] == 0
    assert records(results) == whole


@pytest.mark.parametrize(
    ("field", "value"),
    [("commit", {"id": "0" * 40, "dirty": False}), ("profile", "full")],
)
def test_results_of_another_run_are_left_alone_without_force(
    interrupted: tuple[Path, list[dict[str, Any]]], tmp_path: Path, field: str, value: Any
) -> None:
    results = tmp_path / "other.json"
    before = json.dumps({**json.loads(interrupted[0].read_text()), field: value})
    results.write_text(before)
    status, errors = finish(results)
    assert status == 2
    assert errors.count("\n") == 1 and field in errors and "--force" in errors
    assert results.read_text() == before


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": "another"}', '{"format": "process-eras-bench/1"}'])
def test_a_broken_results_file_is_one_line_that_names_it(tmp_path: Path, content: str) -> None:
    results = tmp_path / "broken.json"
    results.write_text(content)
    status, errors = finish(results)
    assert status == 2
    assert errors.count("\n") == 1 and "broken.json" in errors
    assert results.read_text() == content


@pytest.mark.parametrize("peer", ["vllm", "=http://127.0.0.1:1", "vllm=127.0.0.1:8000"])
def test_a_peer_without_a_name_or_url_is_refused(tmp_path: Path, peer: str) -> None:
    status, errors = finish(tmp_path / "results.json", "--peer", peer)
    assert status == 2 and "NAME=URL" in errors
