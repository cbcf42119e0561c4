"""The results file: what is written comes back, and what is not whole is refused with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.results import BadResults, load, save
from tests.bench.sample_results import sample_results


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    save(sample_results(), path)
    assert load(path) == sample_results()
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("format", "another/1"),
        ("machine", {}),
        ("machine", "a machine"),
        ("commit", None),
        ("records", {}),
        ("records.0.stage", 4),
        ("records.0.case", ["tp", 2]),
        ("records.0.figures", []),
        ("records.0.figures.period_us_mean", "151"),
        ("records.0.figures.period_us_mean", None),
        ("records.0.round", 0.5),
    ],
)
def test_a_wrong_value_is_refused_in_one_line_that_names_it(tmp_path: Path, place: str, value: object) -> None:
    path = tmp_path / "results.json"
    save(sample_results(), path)
    data = json.loads(path.read_text())
    node: Any = data
    *parents, name = [int(part) if part.isdecimal() else part for part in place.split(".")]
    for part in parents:
        node = node[part]
    node[name] = value
    path.write_text(json.dumps(data))
    with pytest.raises(BadResults) as refused:
        load(path)
    assert str(path) in str(refused.value) and place in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"\xff\xfe", b'{"format": "process-eras-bench/1"', b"{}"])
def test_a_file_of_something_else_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "results.json"
    path.write_bytes(content)
    with pytest.raises(BadResults, match=r"results\.json") as refused:
        load(path)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(BadResults, match="No such file"):
        load(tmp_path / "results.json")
