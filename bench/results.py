"""The results file: one JSON document, whole at any time."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT = "process-eras-bench/1"


class BadResults(Exception):
    pass


@dataclass
class Record:
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
    profile: str
    machine: dict[str, Any]
    versions: dict[str, str]
    commit: dict[str, Any]
    started: str
    finished: str | None = None
    records: list[Record] = field(default_factory=list)


def load(path: Path) -> Results:
    try:
        data = json.loads(path.read_text())
        if data.pop("format") != FORMAT:
            raise ValueError("format")
        return Results(**{**data, "records": [Record(**record) for record in data["records"]]})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadResults(f"{path}: {error}") from error


def save(results: Results, path: Path) -> None:
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps({"format": FORMAT, **asdict(results)}))
    os.replace(temporary, path)
