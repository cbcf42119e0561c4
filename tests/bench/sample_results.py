"""A results file with every suite in it, its figures made up by a rule."""

from __future__ import annotations

from typing import Any

from bench.results import Commit, Machine, Record, Results

STAGES = [("stage1", {}), ("stage2", {}), ("stage3", {}), ("stage4", {"overlap": False}), ("stage4", {"overlap": True})]


def sample_results(rounds: int = 2) -> Results:
    """Every figure of a case is a number of its own, a little more in every round."""
    results = Results(
        profile="quick",
        machine=Machine("A CPU", cores=2, memory_bytes=1 << 34, os="an OS", python="3.11.0"),
        versions={"torch": "2.13.0"},
        commit=Commit("0123456789abcdef", dirty=False),
        started="2026-01-01T00:00:00+00:00",
        finished="2026-01-01T00:06:00+00:00",
    )
    for round in range(rounds):
        for number, (suite, stage, case, names) in enumerate(_cases()):
            figures = {name: 10.0 * (number + 1) + place + 0.25 * round for place, name in enumerate(names)}
            command = f"pytest bench --bench-profile=quick -k {suite}"
            results.records.append(Record(suite, stage, case, round, figures, command, 0.1, results.started))
    return results


def _cases() -> list[tuple[str, str, dict[str, Any], list[str]]]:
    found: list[tuple[str, str, dict[str, Any], list[str]]] = []
    step = ["period_us_mean", "overhead_us_mean", "overhead_per_token_us_mean", "step_us_mean"]
    segments = ["segment_sleep_us", "segment_broadcast_us", "segment_schedule_us", "segment_a_new_one_us"]
    processes = ["main", "detokenizer", "controller", "model_TP0", "all"]
    latency = [f"{kind}_ms_{p}" for kind in ("ttft", "tpot", "e2e") for p in ("p50", "p90", "p99")]
    for stage, more in STAGES:
        for tp in (1, 2):
            for running in (1, 32):
                case = {"tp": tp, "dp": 1, "device": "sim 0 ms", "running": running, **more}
                found.append(("step_overhead", stage, case, step + segments))
        for arriving in (0, 16):
            case = {"tp": 2, "dp": 1, "device": "sim 0 ms", "arriving": arriving, "running": 8, **more}
            found.append(("arrivals", stage, case, ["extra_us_median", "longest_step_us_median"]))
        for kib in (0, 64, 4096):
            codecs: list[dict[str, str]] = [{"codec": "list"}, {"codec": "buffer"}] if stage == "stage3" else [{}]
            for codec in codecs:
                case = {"tp": 2, "dp": 1, "image_kib": kib, **codec, **more}
                found.append(("payload", stage, case, ["latency_ms_p50", *segments]))
        for rate in (8, 24):
            case = {"tp": 2, "dp": 1, "rate": rate, "ttft_limit_ms": 200, "tpot_limit_ms": 25, **more}
            found.append(("serving", stage, case, ["tokens_per_s", "goodput_per_s", *latency]))
        for sleeps in (False, True):
            case = {"tp": 2, "dp": 1, "sleep_on_idle": sleeps, **more}
            found.append(("idle", stage, case, [f"cpu_share_{name}" for name in processes]))
        case = {"tp": 2, "dp": 1, **more}
        found.append(("start_memory", stage, case, ["ready_s", *(f"pss_mb_{name}" for name in processes)]))
    for stage in ("stage2", "stage3"):
        for method in ("round_robin", "shortest_queue"):
            case = {"dp": 2, "method": method, "load": "skewed"}
            found.append(("dispatch", stage, case, ["ttft_ms_p50", "ttft_ms_p99", "largest_over_mean_load"]))
    for measured in ("bare", "stage3"):
        case = {"transport": "gloo list", "ranks": 2, "arriving": 0, "image_kib": 0}
        found.append(("floors", measured, case, ["call_us_mean"]))
    found.append(("peers", "transformers", {"requests": 1}, ["tokens_per_s"]))
    return found
