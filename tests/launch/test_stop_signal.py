"""A signal before the server is serving stops the start, wherever it falls."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

STARTING = """
import os, signal, sys, time
from shared.launch.stop_signal import StopRequested, StopSignal

stop = StopSignal()
stop.install()
try:
    import a_module
    time.sleep(60)
except StopRequested:
    stop.leave()
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
