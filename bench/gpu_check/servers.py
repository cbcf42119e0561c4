"""The four servers: the same tokens, and what graphs and overlap are worth to the last of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import numpy as np

from bench.gpu_check.report import Report
from bench.server_process import ServerProcess

STAGES = (1, 2, 3, 4)
PROMPT_LENGTHS = (1, 7, 64, 200, 33, 7)
VARIANTS = {
    "graphs and overlap": [],
    "graphs, no overlap": ["--disable-overlap-schedule"],
    "overlap, no graphs": ["--disable-cuda-graph"],
    "neither": ["--disable-overlap-schedule", "--disable-cuda-graph"],
}


def check_stages(report: Report, name: str, model: str, vocab: int, new_tokens: int, flags: Sequence[str]) -> None:
    """Greedy tokens of all stages, for requests that come together and then one by one, are the same."""
    random = np.random.default_rng(0)
    prompts = [random.integers(3, vocab, length).tolist() for length in PROMPT_LENGTHS]
    with _running({str(stage): (stage, ["--model-path", model, *flags]) for stage in STAGES}) as urls:
        together = {stage: _generate(url, prompts, new_tokens) for stage, url in urls.items()}
        alone = {stage: [_generate(url, [p], new_tokens)[0] for p in prompts] for stage, url in urls.items()}
    expected = together["1"]
    for stage in urls:
        same = sum(a == b for a, b in zip(together[stage] + alone[stage], expected * 2, strict=True))
        report.check(
            f"{name}: greedy tokens of stage {stage}", same == 2 * len(prompts), f"{same} of {2 * len(prompts)}"
        )


def measure_steps(
    report: Report, model: str, vocab: int, new_tokens: int, sizes: Sequence[int], flags: Sequence[str]
) -> None:
    """Milliseconds of one decode step of stage 4, as its clients see them."""
    random = np.random.default_rng(1)
    servers = {name: (4, ["--model-path", model, *flags, *extra]) for name, extra in VARIANTS.items()}
    with _running(servers) as urls:
        for count in sizes:
            for name, url in urls.items():
                prompts = [random.integers(3, vocab, 16).tolist() for _ in range(count)]
                _generate(url, prompts, 8)
                short = _seconds(url, prompts, 8)
                long = _seconds(url, prompts, 8 + new_tokens)
                report.figure(f"decode step of {count}, {name}", (long - short) / new_tokens * 1e3, "ms")


@contextmanager
def _running(servers: dict[str, tuple[int, list[str]]]) -> Iterator[dict[str, str]]:
    """Starts all at once, since most of a start is waiting; gives their addresses."""
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(ServerProcess(stage, ["--sleep-on-idle", *flags], wait=False))
            for name, (stage, flags) in servers.items()
        }
        for server in started.values():
            server.wait_ready()
        yield {name: server.url for name, server in started.items()}


def _seconds(url: str, prompts: list[list[int]], new_tokens: int) -> float:
    """The shortest of three times: the difference of two such is taken, in which a disturbance would count double."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        _generate(url, prompts, new_tokens)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _generate(url: str, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Greedy answers, all requests at once."""

    def one(prompt: list[int]) -> list[int]:
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        response = httpx.post(f"{url}/generate", json={"input_ids": prompt, "sampling_params": sampling}, timeout=120)
        response.raise_for_status()
        ids: list[int] = response.json()["output_ids"]
        return ids

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(one, prompts))
