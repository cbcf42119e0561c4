"""Every command in the READMEs and the docs is one that works."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.server.process import Server
from tests.server.trees import module_of, planned_tree

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "bench" / "README.md",
    *sorted(ROOT.glob("stage*/README.md")),
    *sorted(ROOT.glob("docs/*.md")),
]
PYTHON = ("python", "python3", ".venv/bin/python")
PROGRAMS = (*PYTHON, "make", "pytest")


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [text for its_language, text in found if its_language == language]


def commands() -> list[list[str]]:
    """The words of each command line, once, without comments and pipes."""
    found: dict[str, list[str]] = {}
    for page in PAGES:
        for block in [text for language in ("", "sh", "bash", "shell", "console") for text in blocks(page, language)]:
            for line in block.replace("\\\n", " ").splitlines():
                command = line.strip().removeprefix("$ ").partition(" | ")[0].removesuffix("&").strip()
                if command.split(" ", 1)[0] in PROGRAMS:
                    found.setdefault(command, shlex.split(command, comments=True))
    return list(found.values())


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def stage_of_module(module: str) -> int:
    (stage,) = [number for number in (1, 2, 3, 4) if module_of(number) == module]
    return stage


@pytest.mark.parametrize("words", [pytest.param(words, id=" ".join(words)) for words in commands()])
def test_a_command_of_the_pages_is_one_that_works(words: list[str]) -> None:
    program, *rest = words
    if program == "make":
        made = run("make", "--dry-run", "--old-file", ".venv/.installed", *rest)
        assert made.returncode == 0, made.stderr
    elif program == "pytest":
        collected = run(sys.executable, "-m", "pytest", "--collect-only", "-q", *rest)
        assert collected.returncode == 0, collected.stdout[-2000:]
    elif rest[0] == "-m" and rest[1].endswith(".server"):
        assert planned_tree(stage_of_module(rest[1]), *rest[2:]).count() >= 2
    elif rest[0] == "-m":
        subcommand = [word for word in rest[2:3] if rest[1] == "bench"]
        helped = run(sys.executable, "-m", rest[1], *subcommand, "--help")
        assert helped.returncode == 0, helped.stderr
        split = rest.index("--") if "--" in rest else len(rest)
        for word in rest[2:split]:
            assert not word.startswith("--") or word.partition("=")[0] in helped.stdout, word
        assert planned_tree(1, *rest[split + 1 :]).count() >= 2  # what follows are flags of the server
    else:
        assert (ROOT / rest[0]).is_file(), rest


TRACE_LINE = re.compile(r"^ *(track = trace\.track\(\)|(self\._?trace|track)\.\w+\(.*\))\n", re.MULTILINE)
"""What records the trace: quotes leave it out."""


def quotes() -> list[tuple[Path, str]]:
    """The Python blocks of the pages that are pieces of this repository's code, not programs that import it."""
    return [(page, block) for page in PAGES for block in blocks(page, "python") if "import " not in block]


@pytest.mark.parametrize(("page", "quote"), [pytest.param(*quote, id=quote[1].split("\n")[0]) for quote in quotes()])
def test_quoted_code_is_the_code(page: Path, quote: str) -> None:
    files = [path for folder in ("shared", "stage*") for path in ROOT.glob(f"{folder}/**/*.py")]
    quoted = [path for path in files if quote in TRACE_LINE.sub("", path.read_text())]
    assert quoted
    named = page.read_text().partition(quote)[0].rsplit("\n## ", 1)[-1]
    assert any(str(path.relative_to(ROOT)) in named for path in quoted)


def test_the_readme_has_a_command_for_each_thing_one_does_first() -> None:
    programs = {" ".join(words[:2]) for words in commands()}
    assert {"make serve", "make test", "pytest --stage=1", "python -m"} <= programs


def test_the_first_server_of_the_readme_serves() -> None:
    servers = [words for words in commands() if words[-1] == "tiny-random" and words[2].endswith(".server")]
    with Server(stage_of_module(servers[0][2]), *servers[0][3:]) as server:
        answer = server.generate(text="Hello", sampling_params={"max_new_tokens": 4, "ignore_eos": True})
        assert answer["meta_info"]["completion_tokens"] == 4


def test_the_programs_of_the_readme_run(tmp_path: Path) -> None:
    programs = [block for block in blocks(ROOT / "README.md", "python") if "__main__" in block]
    assert programs
    for number, block in enumerate(programs):
        script = tmp_path / f"program_{number}.py"
        script.write_text(block)
        ran = subprocess.run(
            [sys.executable, script],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.strip()


def test_the_client_of_the_readme_gets_an_answer(tmp_path: Path) -> None:
    (block,) = [block for block in blocks(ROOT / "README.md", "python") if "openai" in block]
    with Server(4) as server:
        assert "http://127.0.0.1:30000/" in block
        script = tmp_path / "client.py"
        script.write_text(block.replace("http://127.0.0.1:30000", server.url))
        ran = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()
