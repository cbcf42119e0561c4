"""The results file: one JSON document, whole at any time."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT = "process-eras-bench/1"


class BadResults(Exception):
    """A file that is not whole results of this benchmark; the message is one line that names it."""


@dataclass
class Record:
    """The figures of one case in one round, from 0.  `stage` is `stage1` to `stage4`, `bare` or a peer."""

    suite: str
    stage: str
    case: dict[str, Any]
    round: int
    figures: dict[str, float]
    command: str
    seconds: float
    started: str


@dataclass
class Results:
    """A run.  `finished` is None while something is missing."""

    profile: str
    machine: dict[str, Any]
    versions: dict[str, str]
    commit: dict[str, Any]
    started: str
    finished: str | None = None
    records: list[Record] = field(default_factory=list)


def load(path: Path) -> Results:
    """The results in `path`.  Raises `BadResults`."""
    try:
        data = json.loads(path.read_text())
        if data.pop("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        return Results(**{**data, "records": [Record(**record) for record in data["records"]]})
    except OSError as error:
        raise BadResults(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadResults(f"{path} is not a whole results file: {error!r}") from error


def save(results: Results, path: Path) -> None:
    """Replaces the file at once, so that an interruption leaves the old one or the new one."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps({"format": FORMAT, **asdict(results)}))
    os.replace(temporary, path)
