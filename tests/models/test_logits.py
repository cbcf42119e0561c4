"""Logits of every architecture against `transformers`, in float32, to 1e-4."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shared.executor.forward_batch import ForwardMode
from shared.executor.model_runner import ModelRunner
from tests.models.tiny_models import (
    SIZES,
    VARIANTS,
    HandScheduler,
    make_runner,
    reference_logits,
    save_tiny_model,
)

TOLERANCE = 1e-4
Model = tuple[Any, ModelRunner]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    made: dict[str, Model] = {}

    def get(variant: str) -> Model:
        if variant not in made:
            folder: Path = tmp_path_factory.mktemp(variant)
            made[variant] = save_tiny_model(variant, folder), make_runner(folder)
        return made[variant]

    return get


def random_ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, SIZES["vocab_size"], count).tolist()


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_chunks_and_decode_give_the_logits_of_transformers(
    variant: str, tiny_model: Callable[[str], Model]
) -> None:
    model, runner = tiny_model(variant)
    ids = random_ids(60)
    expected = reference_logits(model, ids)
    scheduler = HandScheduler(1)
    done = 0
    for count in (30, 1, 13):  # a prompt, a chunk of one token, a chunk that looks back
        logits = runner.forward(scheduler.extend({0: ids[done : done + count]}))
        done += count
        assert_close(logits[0], expected[done - 1])
    for token in ids[done:]:
        logits = runner.forward(scheduler.extend({0: [token]}, ForwardMode.DECODE))
        done += 1
        assert_close(logits[0], expected[done - 1])


@pytest.mark.parametrize("variant", ["llama", "mistral_sliding_window"])
def test_a_ragged_batch_gives_each_request_its_own_logits(variant: str, tiny_model: Callable[[str], Model]) -> None:
    model, runner = tiny_model(variant)
    ids = {row: random_ids(length, seed=row) for row, length in enumerate([1, 40, 7, 1, 23, 90])}
    expected = {row: reference_logits(model, [*tokens, 5, 6]) for row, tokens in ids.items()}
    scheduler = HandScheduler(len(ids))
    logits = runner.forward(scheduler.extend(ids))
    for at, (row, tokens) in enumerate(ids.items()):
        assert_close(logits[at], expected[row][len(tokens) - 1])
    for step, token in enumerate([5, 6]):
        logits = runner.forward(scheduler.extend({row: [token] for row in ids}, ForwardMode.DECODE))
        for at, (row, tokens) in enumerate(ids.items()):
            assert_close(logits[at], expected[row][len(tokens) + step])


def test_a_request_reads_slots_that_another_of_its_batch_writes(tiny_model: Callable[[str], Model]) -> None:
    model, runner = tiny_model("llama")
    common = random_ids(20)
    first, second = common + random_ids(5, seed=1), common + random_ids(9, seed=2)
    scheduler = HandScheduler(2)
    scheduler.extend({0: first})
    scheduler.share(0, 1, len(common))
    scheduler.extend({1: second[len(common) :]})
    # The reader stands before the writer: only storing all KV first makes this work.
    logits = runner.forward(scheduler.batch({1: second[len(common) :], 0: first}, ForwardMode.EXTEND))
    assert_close(logits[0], reference_logits(model, second)[-1])
    assert_close(logits[1], reference_logits(model, first)[-1])


@torch.inference_mode()
def test_nan_in_one_request_leaves_its_neighbours_alone(tiny_model: Callable[[str], Model]) -> None:
    model, runner = tiny_model("llama")
    ids = {1: random_ids(30, seed=1), 0: random_ids(28), 2: random_ids(29, seed=2)}
    scheduler = HandScheduler(len(ids))
    scheduler.free.remove(0)
    scheduler.free.append(0)  # the broken request gets slot 0, the one that padding would most likely name
    runner.forward(scheduler.extend(ids))
    for pool in runner._pools:
        pool[scheduler.table[1, :30].astype(np.int64)] = torch.nan
    logits = runner.forward(scheduler.extend({row: [4] for row in ids}, ForwardMode.DECODE))
    assert logits[0].isnan().all()
    for at, row in ((1, 0), (2, 2)):
        assert_close(logits[at], reference_logits(model, [*ids[row], 4])[-1])


def test_launch_samples_the_likeliest_token(tiny_model: Callable[[str], Model]) -> None:
    model, runner = tiny_model("qwen3")
    ids = random_ids(12)
    pending = runner.launch(HandScheduler(1).extend({0: ids}))
    expected = int(reference_logits(model, ids)[-1].argmax())
    assert pending.wait().next_token_ids.tolist() == [expected]
    assert list(pending.device_token_ids) == [expected]
