"""What `make setup` installs, and what `make help` says."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def required() -> list[Requirement]:
    """The requirements in pyproject.toml, read without tomllib for Python 3.10's sake."""
    text = (ROOT / "pyproject.toml").read_text()
    section = text[text.index("\ndependencies = [") : text.index("\n[tool.")]
    return [Requirement(quoted) for quoted in re.findall(r'"([a-z][^"]*>=[^"]*)"', section)]


def pinned(python: str) -> dict[str, str]:
    """Name to version in constraints.txt under that version of Python."""
    pins: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line.startswith("#"):
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"python_version": python}):
                name = canonicalize_name(requirement.name)
                assert name not in pins, f"{name} has two pins under Python {python}"
                (specifier,) = requirement.specifier
                assert specifier.operator == "=="
                pins[name] = specifier.version
    return pins


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_every_requirement_is_pinned_within_its_bounds(python: str) -> None:
    pins = pinned(python)
    assert pins["torch"] == "2.13.0"
    assert len(required()) > 20
    for requirement in required():
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement


def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^([a-z]+):", makefile, re.MULTILINE)
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert len(targets) > 5
    assert [target for target in targets if f"make {target} " not in listed] == []


def test_make_serve_for_a_stage_that_is_not_there_names_those_that_are() -> None:
    made = subprocess.run(
        ["make", "--old-file", ".venv/.installed", "serve", "STAGE=9"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert made.returncode != 0
    assert "no server for STAGE=9; there is one for: 1" in made.stderr
