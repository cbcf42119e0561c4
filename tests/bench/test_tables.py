"""Measured tables in documents, and what bench.throughput and bench.profile make of their figures."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import profile, this_machine, throughput, weight_formats
from bench.tables import NoPlace, between, markdown, show
from shared.executor.forward_batch import ForwardBatch, ForwardMode
from shared.executor.model_runner import ModelRunner

ROWS = [["what", "µs"], ["a step", "1.5"], ["another", "20.0"]]


def test_a_table_takes_its_place_in_a_document_and_nothing_else(tmp_path: Path) -> None:
    document = tmp_path / "doc.md"
    document.write_text("above\n<!-- cost: -->\nold\n<!-- :cost -->\nbelow\n")
    for _ in range(2):
        show(ROWS, "the cost", "cost", document)
        text = document.read_text()
        assert text.startswith("above\n<!-- cost: -->\n\nthe cost. ")
        assert text.endswith("| a step | 1.5 |\n| another | 20.0 |\n\n<!-- :cost -->\nbelow\n")
        assert f"torch {torch.__version__.partition('+')[0]}" in text and "old" not in text


def test_a_document_without_the_marks_is_left_alone(tmp_path: Path) -> None:
    document = tmp_path / "doc.md"
    document.write_text("<!-- cost: -->\n")
    with pytest.raises(NoPlace, match="lacks"):
        show(ROWS, "the cost", "cost", document)
    assert document.read_text() == "<!-- cost: -->\n"
    assert between("xaybz", "a", "b", "new") == "xa\n\nnew\nbz"


def test_numbers_stand_on_the_right() -> None:
    assert markdown(ROWS).splitlines()[:2] == ["| what | µs |", "| --- | --: |"]


def test_engines_take_turns_and_a_ratio_is_of_one_round() -> None:
    calls: list[str] = []

    def engine(name: str, token: int) -> throughput.Generate:
        def generate(prompts: throughput.Prompts) -> throughput.Prompts:
            calls.append(name)
            time.sleep(0.001)
            return [[token] * throughput.NEW_TOKENS for _ in prompts]

        return generate

    engines = {"ours": engine("ours", 7), "same": engine("same", 7), "text only": engine("text only", -1)}
    measured = throughput.measure(engines, vocab_size=1000, rounds=2)
    assert [calls[i] for i in range(0, len(calls), 3)] == ["ours", "ours", "same", "same", "text only", "text only"]
    assert {len(one.rates) for one in measured.values()} == {2}
    _, *lines = throughput.rows(measured)
    assert [line[:2] for line in lines[:3]] == [["1", "ours"], ["1", "same"], ["1", "text only"]]
    assert [line[3] for line in lines if line[1] == "ours"] == ["1.00 (1.00-1.00)"] * 2
    assert [line[4] for line in lines[:3]] == ["100%", "100%", ""]


def test_a_turn_begins_when_the_cores_are_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = iter([100.0, 60.0, 3.0])
    monkeypatch.setattr(this_machine.psutil, "cpu_percent", lambda interval: next(loads))
    throughput.timed(lambda prompts: [[1] * throughput.NEW_TOKENS], [[5]])
    assert list(loads) == []


def test_a_turn_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(this_machine.psutil, "cpu_percent", lambda interval: 100.0)
    monkeypatch.setattr(this_machine, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    this_machine.wait_until_quiet()
    assert next(clock) > this_machine.LONGEST_WAIT_S


def test_an_answer_of_the_wrong_length_is_not_a_rate() -> None:
    with pytest.raises(RuntimeError, match="wrong number"):
        throughput.timed(lambda prompts: [[1, 2] for _ in prompts], [[5]])


def test_a_profile_accounts_for_the_whole_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROCESS_ERAS_CACHE", str(tmp_path))
    found = profile.measure(["--model-path", "tiny-random"], [2], context=40, repeats=2)
    assert len(found) == 2
    for kinds in found.values():
        assert all(ms > 0 for ms in kinds.values()) and len(kinds) == 6
        # Two forwards, whose mean is their median.
        assert sum(ms for kind, ms in kinds.items() if kind != "whole") == pytest.approx(kinds["whole"])
    before = {name: dict.fromkeys(kinds, 1.0) for name, kinds in found.items()}
    assert profile.rows(found, before)[1][1] == f"1.00 → {found['decode of 2 at 40']['whole']:.2f}"


def test_a_method_that_calls_another_is_charged_for_its_own_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Backend:
        def rms_norm(self) -> None: ...

        def linear(self) -> None:
            self.rms_norm()

        def __getattr__(self, name: str) -> object:
            return self.rms_norm

    clock = itertools.count()
    monkeypatch.setattr(profile, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    backend = Backend()
    stopwatch = profile.Stopwatch(backend)
    backend.linear()
    assert stopwatch.ms["norms, RoPE, activation"] == 1000
    assert stopwatch.ms["matrix products"] == 2000


def test_a_profiled_decode_reads_slots_that_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that was never written is one page of zeros, and always in the cache."""
    seen = []

    def look(runner: ModelRunner, stopwatch: profile.Stopwatch, batch: ForwardBatch, repeats: int) -> dict[str, float]:
        if batch.mode is ForwardMode.DECODE:
            table = batch.req_to_token[batch.req_pool_indices, : int(batch.seq_lens.max()) - 1]
            seen.append([bool(pool[torch.from_numpy(table)].any(dim=-1).all()) for pool in runner._pools])
        return {}

    monkeypatch.setenv("PROCESS_ERAS_CACHE", str(tmp_path))
    monkeypatch.setattr(profile, "profile", look)
    profile.measure(["--model-path", "tiny-random"], [2, 3], context=40, repeats=1)
    assert len(seen) == 2 and all(map(all, seen))


def test_answers_agree_up_to_the_first_difference() -> None:
    assert weight_formats.tokens_in_common([1, 2, 3], [1, 2, 3]) == 3
    assert weight_formats.tokens_in_common([1, 9, 3], [1, 2, 3]) == 1
    assert weight_formats.tokens_in_common([9, 2, 3], [1, 2, 3]) == 0
