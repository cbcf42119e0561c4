"""A signal before the server is serving stops the start, wherever it falls."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]

STARTING = """
import os, signal, sys, time
from shared.launch.stop_signal import StopRequested, StopSignal

try:
    with StopSignal():
        import a_module
        time.sleep(60)
except StopRequested:
    os.kill(os.getpid(), signal.SIGALRM)  # an alarm that comes late
    print("stopped; the module is", "whole" if sys.modules["a_module"].whole else "broken")
"""

SIGNAL = "import os, signal\nos.kill(os.getpid(), signal.{})\n"

IN_A_CALLBACK = """
import weakref
class Thing: pass
thing = Thing()
def callback(_):
    import os, signal
    os.kill(os.getpid(), signal.{})
    sum(range(100))
ref = weakref.ref(thing, callback)
del thing
"""
"""What a callback raises is printed and lost."""


@pytest.mark.parametrize("signum", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("body", [SIGNAL, IN_A_CALLBACK], ids=["in the module", "in a callback"])
def test_a_signal_in_an_import_stops_the_start_after_it(tmp_path: Path, body: str, signum: str) -> None:
    (tmp_path / "a_module.py").write_text(body.format(signum) + "whole = True\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", STARTING],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "stopped; the module is whole\n", "")


def test_a_signal_outside_an_import_stops_at_once() -> None:
    code = STARTING.replace("import a_module", "os.kill(os.getpid(), signal.SIGTERM)").replace(
        'sys.modules["a_module"].whole', "True"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert done.stdout == "stopped; the module is whole\n"


SLOW_IMPORT = """
import os, signal, sys, time
from shared.launch import Supervisor
from shared.launch.logs import set_up_logging
from shared.launch.stop_signal import StopRequested, StopSignal
from shared.launch.supervisor import TOLD_TO_END_S, ChildFailed
from tests.launch import toys

set_up_logging("test", "info")
supervisor = Supervisor(at_exit=lambda: print("cleaned up", flush=True))
supervisor.start("child", "child", toys.never_ready, (sys.argv[1], "child"))
while not os.path.exists(os.path.join(sys.argv[1], "child")):
    time.sleep(0.01)
try:
    with StopSignal():
        import a_module
        supervisor.wait_ready()
except StopRequested:
    print("stopped")
except ChildFailed as failure:
    print("stopped" if failure.exitcode == 0 else failure)
"""


@pytest.mark.parametrize(
    ("body", "out"),
    [
        ("os.killpg(os.getpgid(0), signal.SIGTERM)\ntime.sleep(3 * TOLD_TO_END_S)\n", "stopped\n"),
        ("os.kill(os.getpid(), signal.SIGINT)\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(40)\n", "cleaned up\n"),
    ],
    ids=["children end first", "Ctrl-C twice"],
)
def test_a_signal_in_a_slow_import_finds_children(tmp_path: Path, body: str, out: str) -> None:
    (tmp_path / "a_module.py").write_text(
        "import os, signal, time\nfrom shared.launch.supervisor import TOLD_TO_END_S\n" + body
    )
    done = subprocess.run(
        [sys.executable, "-c", SLOW_IMPORT, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=50,
        start_new_session=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, out, "")
    pid = int((tmp_path / "child").read_text())
    assert not psutil.pid_exists(pid)
