"""What `--check-determinism` is for: a rank that decides for itself ends the server, with the step and field named."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from bench.sim_reference import SimReference
from tests.server.plugin import changing
from tests.server.process import Server, wait_gone

SIM = ("--device", "sim", "--sim-decode-ms", "1", "--tp-size", "2", "--check-determinism")

AT_RANK_1 = """
def change(rank_module):
    load_rank = rank_module.load_rank

    def load_spoiled(server_args, port_args, tp_rank, *args, **kwargs):
        if tp_rank == 1:
            server_args = spoil(server_args)
        return load_rank(server_args, port_args, tp_rank, *args, **kwargs)

    rank_module.load_rank = load_spoiled

"""
EVICTS_THE_NEWEST = """
def spoil(server_args):
    import heapq

    from shared.mem_cache.radix_cache import RadixCache

    evict = RadixCache.evict

    def evict_newest(tree, count):
        for _, _, node in tree._leaves:
            node.last_access = -node.last_access
        tree._leaves = [(node.last_access, node.id, node) for _, _, node in tree._leaves]
        heapq.heapify(tree._leaves)
        return evict(tree, count)

    RadixCache.evict = evict_newest
    return server_args
"""
DRAWS_FOR_ITSELF = """
def spoil(server_args):
    from shared.executor.sim_runner import SimRunner

    launch = SimRunner.launch

    def launch_with_other_seeds(runner, batch):
        batch.sampling.seed = batch.sampling.seed + 1
        return launch(runner, batch)

    SimRunner.launch = launch_with_other_seeds
    return server_args
"""
HAS_LESS_MEMORY = """
def spoil(server_args):
    import dataclasses

    return dataclasses.replace(server_args, max_total_tokens=500)
"""


def spoiling_rank_1(spoil: str, folder: Path) -> dict[str, str]:
    """The environment in which rank 1 of every replica calls `spoil(server_args)` before it is loaded."""
    return changing("shared.executor.rank", AT_RANK_1 + spoil, folder)


@pytest.mark.parametrize(
    ("spoil", "field"),
    [(EVICTS_THE_NEWEST, "cache slots|lengths|mode|request ids"), (DRAWS_FOR_ITSELF, "sampled tokens")],
    ids=["evicts the newest", "draws for itself"],
)
def test_a_rank_that_comes_apart_ends_the_server(stage: int, tmp_path: Path, spoil: str, field: str) -> None:
    env = spoiling_rank_1(spoil, tmp_path)
    server = Server(stage, *SIM, "--max-total-tokens", "300", env=env)
    try:
        everything = server.everything()
        statuses = []
        for i in range(40):
            params = {"max_new_tokens": 8, "temperature": 1.0, "seed": i}
            request = {"input_ids": [20 + i] * 70, "sampling_params": params}
            try:
                statuses.append(server.post("/generate", request).status_code)
            except httpx.TransportError:
                statuses.append(0)
            if statuses[-1] != 200:
                break
        ended_at = time.monotonic()
        assert statuses[-1] != 200, "no rank was found to differ"
        assert server.wait_exit(10) == 1
        assert wait_gone(everything, ended_at + 10 - time.monotonic()) == []
        found = re.search(rf"step (\d+): ({field}) of rank 1 differ from those of rank 0", server.output)
        assert found, server.output
    finally:
        server.clean_up()


def test_ranks_with_different_memory_agree_on_the_smaller_pool(stage: int, tmp_path: Path) -> None:
    """Case C08: 20 prompts that cannot all be held, so there are evictions and retractions."""
    reference = SimReference()
    prompts = [[20 + i] * 10 + [100 + i] * 50 for i in range(20)]
    env = spoiling_rank_1(HAS_LESS_MEMORY, tmp_path)
    flags = ("--max-total-tokens", "600", "--schedule-conservativeness", "0.0")
    with Server(stage, *SIM, *flags, env=env) as server:
        assert server.info()["max_total_num_tokens"] == 500
        params = {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True}
        answers = server.generate(input_ids=prompts, sampling_params=params)
        assert [answer["output_ids"] for answer in answers] == [reference.solo(prompt, 60).ids for prompt in prompts]
        assert server.info()["internal_states"][0]["retractions"] > 0
        server.assert_whole()


def test_unseeded_samples_are_the_same_on_every_rank(stage: int) -> None:
    """Case C09, on the CPU model: every rank draws from the same logits, and requests end when they like."""
    with Server(stage, "--tp-size", "2", "--check-determinism") as server:
        before = [process.pid for process in server.tree()]

        def ask(i: int) -> int:
            params = {"max_new_tokens": 8 + i * 7 % 90, "temperature": 1.0}
            answer = server.generate(text=f"Request {i}", sampling_params=params)
            return int(answer["meta_info"]["completion_tokens"])

        with ThreadPoolExecutor(16) as pool:
            counts = list(pool.map(ask, range(64)))
        assert all(1 <= count <= 8 + i * 7 % 90 for i, count in enumerate(counts))
        server.assert_whole()
        assert [process.pid for process in server.tree()] == before
