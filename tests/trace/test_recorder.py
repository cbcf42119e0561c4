"""What a process records is what is read back, also after it was killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shared import trace
from shared.server_args import ServerArgs
from shared.trace.summary import steps
from stage4_peer_schedulers.engine import Engine
from tests.conftest import ROOT
from tests.server.process import Server

CHILD = """
import sys, time
from shared import trace

trace.start(sys.argv[1], "toy")
loop = trace.track()
while True:
    loop.lap("first")
    time.sleep(0.002)
    loop.lap("second", 7)
    loop.end_step(busy=True)
"""


def record(folder: Path) -> None:
    trace.start(trace.prepare_folder(str(folder)), "toy")
    loop = trace.track()
    for _ in range(3):
        loop.lap("first")
        loop.lap("second", 7)
        loop.end_step(busy=True)
    loop.span("alone", loop.now(), rids=["a"])
    assert trace.stop() == str(folder)


def test_what_was_recorded_is_read_back(tmp_path: Path) -> None:
    record(tmp_path)
    found = trace.read(tmp_path)
    assert found.processes == {os.getpid(): "toy"}
    assert [(s.name, s.step, s.bytes, s.rids) for s in found.spans] == [
        ("first", 1, None, ()),
        ("second", 1, 7, ()),
        ("first", 2, None, ()),
        ("second", 2, 7, ()),
        ("first", 3, None, ()),
        ("second", 3, 7, ()),
        ("alone", None, None, ("a",)),
    ]
    for step in steps(found, "toy"):
        assert sum(step.segments.values()) == step.end_ns - step.start_ns


def test_nothing_is_recorded_once_it_was_stopped(tmp_path: Path) -> None:
    record(tmp_path)
    before = len(trace.read(tmp_path).spans)
    trace.track().span("late", 0)
    assert len(trace.read(tmp_path).spans) == before


def test_a_killed_process_leaves_all_but_its_last_moments(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], cwd=ROOT)
    deadline = time.monotonic() + 30
    while not (list(tmp_path.glob("*.spans")) and len(trace.read(tmp_path).steps) > 250):
        assert time.monotonic() < deadline, "nothing was written"
        time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    child.wait()
    whole = len(trace.read(tmp_path).steps)
    (file,) = tmp_path.glob("*.spans")
    file.write_bytes(file.read_bytes()[:-5])
    cut = len(trace.read(tmp_path).steps)
    assert whole > 250
    assert 0 < cut < whole


def test_empty_iterations_become_one_span(tmp_path: Path) -> None:
    trace.start(trace.prepare_folder(str(tmp_path)), "toy")
    loop = trace.track()
    for i in range(1000):
        loop.lap("look")
        loop.end_step(busy=i in (0, 999))
    trace.stop()
    found = steps(trace.read(tmp_path), "toy")
    assert [step.segments.keys() for step in found] == [{"look"}, {"idle"}, {"look"}]
    assert found[0].end_ns == found[1].start_ns
    assert found[1].end_ns == found[2].start_ns


def test_a_folder_with_a_trace_is_refused(tmp_path: Path) -> None:
    record(tmp_path)
    with pytest.raises(trace.TraceFolderUnusable, match="already holds a trace"):
        trace.prepare_folder(str(tmp_path))


@pytest.mark.parametrize("kind", ["holds a trace", "is below a file"])
def test_a_bad_trace_dir_is_one_line_and_status_2(stage: int, tmp_path: Path, kind: str) -> None:
    folder = tmp_path
    if kind == "holds a trace":
        record(tmp_path)
    else:
        (tmp_path / "file").touch()
        folder = tmp_path / "file" / "folder"
    (package,) = ROOT.glob(f"stage{stage}_*")
    command = [sys.executable, "-m", f"{package.name}.server", "--model-path", "tiny-random", "--port", "0"]
    ended = subprocess.run([*command, "--trace-dir", str(folder)], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"stage{stage}: --trace-dir {folder} "), ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.stages(4)
def test_the_offline_engine_writes_a_trace(stage: int, tmp_path: Path) -> None:
    settings = {"model_path": "tiny-random", "device": "sim", "sim_decode_ms": 0.0, "trace_dir": str(tmp_path)}
    assert set(settings) <= set(ServerArgs.__dataclass_fields__)
    with Engine(**settings) as engine:
        engine.generate("Hello", {"max_new_tokens": 4, "ignore_eos": True}, rid="mine")
    assert (tmp_path / "trace.json").exists()
    assert {s.process for s in trace.read(tmp_path).spans if "mine" in s.rids} >= {
        "stage4: main",
        "stage4: scheduler TP0",
        "stage4: detokenizer",
    }


@pytest.mark.stages(4)
def test_a_server_whose_trace_folder_is_removed_answers_on_and_ends_in_peace(stage: int, tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    with Server(stage, "--device", "sim", "--trace-dir", str(folder)) as server:
        shutil.rmtree(folder)
        server.generate(text="Hello", sampling_params={"max_new_tokens": 4})
        server.process.send_signal(signal.SIGINT)
        assert server.wait_exit(within=20) == 0
        assert "there is no whole trace" in server.output
        assert "Traceback" not in server.output
