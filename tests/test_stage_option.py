"""`pytest --stage`: what it selects, on a small project with servers for stages 1 and 3."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import pytest

def test_shared(): pass

@pytest.mark.stages(3)
def test_marked(): pass

def test_each(stage): pass

@pytest.mark.stages(1)
def test_each_marked(stage): pass
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    for package in ("stage1_rpyc", "stage2_static_dp", "stage3_broadcast"):
        pytester.mkdir(package)
        if package != "stage2_static_dp":
            (pytester.path / package / "server.py").touch()
    tests = pytester.mkdir("tests")
    shutil.copy(Path(__file__).parents[1] / "conftest.py", pytester.path)
    shutil.copy(Path(__file__).with_name("conftest.py"), tests)
    (tests / "__init__.py").touch()
    (tests / "test_it.py").write_text(TESTS)
    pytester.makeini("[pytest]\nmarkers = stages")
    return pytester


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            [],
            {
                "test_shared",
                "test_marked",
                "test_each[stage1]",
                "test_each[stage3]",
                "test_each_marked[stage1]",
            },
        ),
        (["--stage=1"], {"test_shared", "test_each[stage1]", "test_each_marked[stage1]"}),
        (["--stage", "3"], {"test_shared", "test_marked", "test_each[stage3]"}),
        (
            ["--stage=1", "--stage=3"],
            {
                "test_shared",
                "test_marked",
                "test_each[stage1]",
                "test_each[stage3]",
                "test_each_marked[stage1]",
            },
        ),
        (["--stage=2"], {"test_shared"}),
    ],
)
def test_the_tests_of_the_named_stages_and_the_shared_ones_run(
    project: pytest.Pytester, flags: list[str], expected: set[str]
) -> None:
    result = project.runpytest_subprocess("-v", "-p", "no:cacheprovider", *flags, "tests")
    ran = {line.split("::")[1].split(" ")[0] for line in result.outlines if " PASSED" in line}
    assert ran == expected
    assert result.parseoutcomes()["passed"] == len(expected)
    assert "skipped" not in result.parseoutcomes()


@pytest.mark.parametrize("name", ["5", "0", "one", ""])
def test_an_unknown_stage_is_an_error_that_lists_the_four(project: pytest.Pytester, name: str) -> None:
    result = project.runpytest_subprocess(f"--stage={name}", "tests")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*--stage {name}: *1, 2, 3 and 4"])


def test_tests_in_the_background_do_not_hand_on_an_ignored_ctrl_c(project: pytest.Pytester) -> None:
    (project.path / "tests" / "test_it.py").write_text(
        "import signal, subprocess, sys\n"
        "ASK = 'import signal; print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)'\n"
        "def test_child(): assert subprocess.check_output([sys.executable, '-c', ASK], text=True) == 'False\\n'\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q"],
        cwd=project.path,
        capture_output=True,
        text=True,
        timeout=50,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
