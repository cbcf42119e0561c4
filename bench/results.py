"""The results file: one JSON document, whole at any time."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

FORMAT = "process-eras-bench/1"


class BadResults(Exception):
    """A file that is not whole results of this benchmark; the message is one line that names it."""


@dataclass
class Record:
    """The figures of one case in one round, from 0.  `stage` is `stage1` to `stage4`, `bare` or a peer."""

    suite: str
    stage: str
    case: dict[str, str | int | float | bool]
    round: int
    figures: dict[str, float]
    command: str
    seconds: float
    started: str


@dataclass(frozen=True)
class Machine:
    """What the figures were measured on."""

    cpu: str
    cores: int
    memory_bytes: int
    os: str
    python: str


@dataclass(frozen=True)
class Commit:
    """The checked-out commit, and whether tracked files differed from it."""

    id: str
    dirty: bool


@dataclass
class Results:
    """A run.  `finished` is None while something is missing."""

    profile: str
    machine: Machine
    versions: dict[str, str]
    commit: Commit
    started: str
    finished: str | None = None
    records: list[Record] = field(default_factory=list)


def load(path: Path) -> Results:
    """The results in `path`.  Raises `BadResults`."""
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise BadResults(f"{path} is not a results file: its format is not {FORMAT}")
        return TypeAdapter(Results).validate_json(text, strict=True)
    except OSError as error:
        raise BadResults(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise BadResults(f"{path} is not a whole results file: {place}: {first['msg']}") from error
    except ValueError as error:
        raise BadResults(f"{path} is not a whole results file: {error}") from error


def save(results: Results, path: Path) -> None:
    """Replaces the file at once, so that an interruption leaves the old one or the new one."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps({"format": FORMAT, **asdict(results)}))
    os.replace(temporary, path)
