"""What the suites measure, without waiting for figures worth reading."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench import bare_loops
from bench.live_server import LiveServer
from bench.load import Hit, LoadResult, poisson
from bench.plan import Case, Plan, Setup
from bench.runner import Failed, Measured, measure_unit
from bench.suites import floors, serving
from shared.trace import Span, Trace
from shared.trace.reader import StepSpans
from tests.server.process import Server

SETUP = Setup(4, decode_ms=1)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with Server(4, *SETUP.command_line()) as process:
        yield LiveServer(SETUP, process, 0.0)


@pytest.mark.parametrize("full", [False, True])
def test_within_a_round_the_stages_take_turns(full: bool) -> None:
    stages = [unit[0].setup.stage for unit in Plan(full=full, suites=("step_overhead",)).units() if unit[0].setup]
    assert stages[:8] == [1, 2, 3, 4] * 2
    assert set(stages) == {1, 2, 3, 4}


@pytest.mark.parametrize("full", [False, True])
def test_every_case_is_there_once(full: bool) -> None:
    keys = [case.key for unit in Plan(full=full).units() for case in unit]
    assert len(keys) == len(set(keys)) > 80


def test_arrivals_have_their_rate_and_are_the_same_for_a_seed() -> None:
    times = poisson(50, 100, seed=1)
    assert times == poisson(50, 100, seed=1) != poisson(50, 100, seed=2)
    assert times == sorted(times) and times[0] > 0 and times[-1] < 100
    assert 4500 < len(times) < 5500
    assert np.diff(times).std() == pytest.approx(1 / 50, rel=0.1)


def test_the_load_generator_checks_every_answer(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    load = serving.Load(20, 0.5)
    figures = serving.measure(server, load)
    assert figures["requests"] == len(load.shots()) > 3
    assert 0 < figures["ttft_ms_p50"] <= figures["ttft_ms_p99"] < figures["e2e_ms_p99"]
    right = serving.expected
    monkeypatch.setattr(serving, "expected", lambda text: "wrong" if text.startswith("2 ") else right(text))
    with pytest.raises(RuntimeError, match="1 of"):
        serving.measure(server, load)


def test_goodput_counts_the_answers_within_both_limits() -> None:
    def hit(first_s: float, last_s: float) -> Hit:
        return Hit(late_s=0, first_s=first_s, last_s=last_s, tokens=11, text="", error=None)

    good, late, slow = hit(0.19, 0.39), hit(0.21, 0.31), hit(0.1, 0.4)
    figures = serving.figures_of(LoadResult([good, late, slow], seconds=2.0, cpu_share=0.1))
    assert figures["goodput_per_s"] == 0.5
    assert figures["tokens_per_s"] == 16.5
    assert figures["tpot_ms_p50"] == pytest.approx(20)
    failed = Hit(late_s=0, first_s=0, last_s=0, tokens=3, text="", error="3 tokens instead of 11")
    with pytest.raises(RuntimeError, match=r"1 of 2 requests failed.*3 tokens instead"):
        serving.figures_of(LoadResult([good, failed], seconds=2.0, cpu_share=0.1))


def test_the_bare_loops_carry_requests() -> None:
    reqs = bare_loops.requests(2, payload_bytes=1000)
    measured = [bare_loops.rpyc_step(2, 3, reqs), bare_loops.zmq_hop(3, reqs), bare_loops.mp_queue_hop(3, reqs)]
    measured.append(bare_loops.gloo_broadcast(2, "buffer", 3, reqs))
    for figures in measured:
        assert all(math.isfinite(value) and value > 0 for value in figures.values())
        assert figures["call_us_median"] <= figures["call_us_p99"]


@pytest.mark.stages(1, 3)  # a driver that waits for its rank, and a rank that drives
def test_the_segments_of_a_step_add_up_to_its_period(stage: int) -> None:
    setup = Setup(stage, 2, traced=True)
    cases = [case for unit in Plan(stages=(stage,), suites=("step_overhead", "arrivals")).units() for case in unit]
    done: list[Measured | Failed] = []
    measure_unit([case for case in cases if case.setup == setup], done.append)
    measured = {result.case.key: result.figures for result in done if isinstance(result, Measured)}
    assert len(measured) == len(done) == 6, done
    for key, figures in measured.items():
        if key.startswith("step_overhead"):
            parts = sum(value for name, value in figures.items() if name.startswith("segment_"))
            assert parts == pytest.approx(figures["period_us_mean"], rel=0.05)
            assert figures["forwards"] > 1000


def test_a_server_that_does_not_start_fails_its_cases_and_no_more() -> None:
    broken = Setup(4, tp=999)
    case = Case("start_memory", "stage4", {}, lambda server: {}, broken)
    done: list[Measured | Failed] = []
    measure_unit([case], done.append)
    (failed,) = done
    assert isinstance(failed, Failed) and "--tp-size 999" in str(failed.error)


def _step(process: str, kind: str, start_ns: int, *laps: tuple[str, int], drives: str | None = None) -> StepSpans:
    """An iteration whose parts, named, end at the times given."""
    spans = []
    for name, end_ns in laps:
        spans.append(Span(process, 1, "main", name, start_ns, end_ns, 0, (), None, 1))
        start_ns = end_ns
    return StepSpans(kind, 1, 1, drives, tuple(spans))


def test_a_broadcast_does_not_wait_for_a_step_that_another_rank_has_not_ended() -> None:
    steps = [
        _step("stage3: controller", "prefill", 0, ("broadcast", 90), ("device wait", 100)),
        _step("stage3: controller", "decode", 100, ("broadcast", 103), ("device wait", 200)),
        _step("stage3: controller", "decode", 200, ("broadcast", 204), ("device wait", 300)),
        _step("stage3: controller", "decode", 300, ("broadcast", 309), ("device wait", 400)),
        _step("stage3: model TP1", "decode", 20, ("broadcast", 107), ("device wait", 250)),  # waited for rank 0
        _step("stage3: model TP1", "decode", 250, ("broadcast", 252), ("device wait", 302)),  # found its message
        _step("stage3: model TP1", "decode", 302, ("broadcast", 308), ("device wait", 400)),
    ]
    assert floors.broadcasts_ns(Trace({}, [], steps)) == [(100, 7), (200, 4), (300, 9)]


def test_a_call_is_the_drivers_time_without_that_in_which_a_rank_computes() -> None:
    rank = "stage1: model TP0"
    steps = [
        _step(
            "stage1: router", "idle", 0, ("rpyc call", 5), ("rpyc wait", 80), ("obtain", 85), ("send", 99), drives=rank
        ),
        _step("stage1: router", "idle", 99, ("rpyc call", 105), ("rpyc wait", 190), ("obtain", 195), drives=rank),
        _step(rank, "prefill", 0, ("wait for call", 8), ("obtain", 10), ("device wait", 70)),
        _step(rank, "decode", 70, ("wait for call", 110), ("obtain", 120), ("schedule", 130), ("device wait", 160)),
        _step("stage1: model TP1", "decode", 75, ("wait for call", 112), ("obtain", 125), ("device wait", 170)),
        _step("stage1: model TP1", "decode", 170, ("wait for call", 250), ("obtain", 260), ("device wait", 270)),
    ]
    assert floors.rpyc_calls_ns(Trace({}, [], steps)) == [(99, 195 - 99 - 50)]


@pytest.mark.parametrize("transport", ["rpyc", "gloo list"])
def test_a_trace_without_calls_is_no_floor(transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [_step("stage3: controller", "decode", 100, ("broadcast", 103), ("device wait", 200))]
    for found in ([], steps):
        monkeypatch.setattr(floors, "read", lambda folder, found=found: Trace({}, [], found))
        with pytest.raises(RuntimeError, match=f"no step had a segment of {transport}"):
            floors.figures(tmp_path, transport=transport, start_ns=500, end_ns=900)
