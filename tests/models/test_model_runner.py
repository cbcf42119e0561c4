"""What a runner refuses, and how much KV it takes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from shared.executor.kv_pool import make_kv_pools, num_slots_that_fit
from shared.layers.rope import rotary_frequencies
from shared.server_args import ServerArgs
from shared.weights.model_config import ModelConfig
from tests.models.tiny_models import make_runner, save_tiny_model
from tests.parallel.test_partition import SMOLLM2

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "longrope", "factor": 2.0},
        {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
    ],
)
def test_rope_scaling_that_is_not_implemented_is_refused(scaling: dict[str, object]) -> None:
    config: ModelConfig = dataclasses.replace(SMOLLM2, rope_scaling=scaling)
    with pytest.raises(ValueError, match="not supported"):
        rotary_frequencies(config)


def test_max_total_tokens_decides_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=0))
    assert num_slots_that_fit(ServerArgs(max_total_tokens=77), 10**9, 4096, 1, CPU) == 77


def test_ranks_of_a_machine_share_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 30))
    server_args = ServerArgs(mem_fraction_static=0.5)
    assert num_slots_that_fit(server_args, 10**9, 1 << 10, 1, CPU) == 1 << 19
    assert num_slots_that_fit(server_args, 10**9, 1 << 10, 2, CPU) == 1 << 18


def test_no_more_slots_than_running_requests_can_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 40))
    assert num_slots_that_fit(ServerArgs(), 5000, 1 << 10, 1, CPU) == 5000


def test_too_little_memory_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 10))
    with pytest.raises(ValueError, match="free some memory"):
        num_slots_that_fit(ServerArgs(), 5000, 1 << 10, 1, CPU)


def test_pools_hold_keys_and_values_of_every_layer() -> None:
    pools = make_kv_pools(5, 3, 2, 16, torch.float32, CPU)
    assert [pool.shape for pool in pools] == [(5, 2, 2, 16)] * 3


def test_cores_are_divided_among_the_ranks_of_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model("llama", tmp_path)
    chosen: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    make_runner(tmp_path)
    make_runner(tmp_path, dp_size=2)
    make_runner(tmp_path, dp_size=12)
    assert chosen == [6, 3, 1]
