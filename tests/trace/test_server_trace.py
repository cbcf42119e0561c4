"""The trace of a whole server: 100 requests, and a sleep planted in one part of the step."""

from __future__ import annotations

import functools
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from shared import trace
from shared.trace.merge import flows
from shared.trace.summary import steps
from tests.conftest import ROOT
from tests.server.plugin import changing
from tests.server.process import Server

RIDS = [f"request-{i}" for i in range(100)]
PLANTED_NS = 5_000_000
SLEEP = """
def change(core):
    import time

    process = core.SchedulerCore.process_batch_result

    def process_and_sleep(self, batch, result):
        process(self, batch, result)
        time.sleep(0.005)

    core.SchedulerCore.process_batch_result = process_and_sleep
"""
DRIVER = {
    1: "stage1: router",
    2: "stage2: controller",
    3: "stage3: controller TP0",
    4: "stage4: scheduler TP0",
}
OTHER_RANK = {1: "stage1: model TP1", 2: "stage2: model TP1", 3: "stage3: model TP1", 4: "stage4: scheduler TP1"}


FOLDERS: list[tempfile.TemporaryDirectory[str]] = []
"""Of this run, removed when it ends."""


def new_folder() -> Path:
    FOLDERS.append(tempfile.TemporaryDirectory(prefix="eras-trace-"))
    return Path(FOLDERS[-1].name)


@functools.cache
def traced(stage: int) -> Path:
    """The folder of a server with two ranks that has answered `RIDS`, one of them alone."""
    folder = new_folder()
    env = changing("shared.scheduling.core", SLEEP, new_folder())
    flags = ("--device", "sim", "--sim-decode-ms", "1", "--tp-size", "2", "--trace-dir", str(folder))
    with Server(stage, *flags, env=env) as server:

        def ask(rid: str, count: int = 4) -> None:
            params = {"max_new_tokens": count, "ignore_eos": True}
            server.generate(text=f"This is {rid}", rid=rid, sampling_params=params)

        ask(RIDS[0], 100)
        with ThreadPoolExecutor(32) as pool:
            list(pool.map(ask, RIDS[1:]))
    return folder


def test_the_parts_of_a_step_add_up_to_its_period(stage: int) -> None:
    found = [step for step in steps(trace.read(traced(stage)), DRIVER[stage]) if step.kind == "decode"]
    assert len(found) >= 5
    for step in found:
        period = step.end_ns - step.start_ns
        assert abs(sum(step.segments.values()) - period) <= 0.05 * period
        assert min(step.segments.values()) >= -0.05 * period
        assert step.forwards * PLANTED_NS < period
        assert 0 <= step.device_ns <= period


def test_steps_follow_each_other_without_a_gap(stage: int) -> None:
    found = steps(trace.read(traced(stage)), DRIVER[stage])
    assert all(one.end_ns == following.start_ns for one, following in itertools.pairwise(found))


def test_a_planted_sleep_shows_up_in_its_part_and_no_other(stage: int) -> None:
    found = [step for step in steps(trace.read(traced(stage)), DRIVER[stage]) if step.kind == "decode"]
    parts: defaultdict[str, list[float]] = defaultdict(list)
    for step in found:
        for name, took_ns in step.segments.items():
            parts[name].append(took_ns / step.forwards)
    slow = {name for name, took in parts.items() if statistics.median(took) >= PLANTED_NS}
    assert slow == {"process result"}


def test_every_request_has_an_unbroken_chain_through_the_processes(stage: int) -> None:
    chains = flows(trace.read(traced(stage)))
    assert set(RIDS) <= chains.keys()
    main, detokenizer = f"stage{stage}: main", f"stage{stage}: detokenizer"
    for rid in RIDS:
        chain = chains[rid]
        assert [(span.process, span.name) for span in chain[:2]] == [(main, "tokenize"), (main, "send")]
        assert [(span.process, span.name) for span in chain[-2:]] == [(main, "hand out"), (main, "respond")]
        firsts = list(dict.fromkeys(span.process for span in chain))
        assert {DRIVER[stage], OTHER_RANK[stage], detokenizer} <= set(firsts)
        assert firsts[-1] == detokenizer


def test_the_merged_file_is_a_chrome_trace_with_names_and_arrows(stage: int) -> None:
    events: list[dict[str, Any]] = json.loads((traced(stage) / "trace.json").read_text())["traceEvents"]
    phases = defaultdict(list)
    for event in events:
        phases[event["ph"]].append(event)
    names = {event["args"]["name"] for event in phases["M"] if event["name"] == "process_name"}
    assert {f"stage{stage}: main", f"stage{stage}: detokenizer", DRIVER[stage], OTHER_RANK[stage]} <= names
    threads = {(event["pid"], event["tid"]) for event in phases["M"] if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in phases["X"]} == threads
    assert all(event["dur"] >= 0 for event in phases["X"])
    begun, ended = ({event["id"] for event in phases[phase]} for phase in "sf")
    assert begun == ended
    assert len(begun) >= len(RIDS)


def test_the_summary_and_a_merge_by_hand_work(stage: int) -> None:
    def run(command: str) -> str:
        words = [sys.executable, "-m", "shared.trace", command, str(traced(stage))]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    summary = run("summary")
    assert DRIVER[stage] in summary
    assert "process result" in summary
    (traced(stage) / "trace.json").unlink()
    assert run("merge").strip() == str(traced(stage) / "trace.json")
    assert json.loads((traced(stage) / "trace.json").read_text())["traceEvents"]
