"""What the README of the stage shows is what happens."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.stages(4)

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "stage4_peer_schedulers" / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    python (-m stage4_peer_schedulers\.server .*)$", README, re.MULTILINE)


def run(*arguments: str) -> str:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout


def test_the_process_tree_is_the_one_shown() -> None:
    shown = re.search(r"```\n(stage4: main.*?)```", README, re.DOTALL)
    assert shown is not None
    assert run(*shlex.split(COMMANDS[0])) == shown[1]


@pytest.mark.parametrize("command", COMMANDS[1:])
def test_the_flags_of_the_other_commands_are_right(command: str) -> None:
    assert "stage4: main" in run(*shlex.split(command), "--print-process-tree")


def test_the_engine_example_runs(tmp_path: Path) -> None:
    example = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert example is not None
    script = tmp_path / "example.py"
    script.write_text(example[1])
    lines = run(str(script)).splitlines()
    assert lines[0].endswith(" tokens")
    assert int(lines[1].split()[-1]) <= 16
