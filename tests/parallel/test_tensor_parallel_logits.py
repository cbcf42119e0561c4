"""A split model computes what the whole one does, and every rank the same bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shared.executor.forward_batch import ForwardMode
from shared.parallel.tp_group import TpGroup
from tests.models.tiny_models import HandScheduler, make_runner, save_tiny_model
from tests.parallel.ranks import run_ranks

VARIANTS = ["llama_biases", "qwen2_tied", "qwen3"]
PROMPTS = {0: [5, 9, 77, 120, 3, 64, 8], 1: [101, 7, 99]}


def _logits(tp_group: TpGroup, folders: list[Path]) -> list[list[np.ndarray]]:
    """Of each folder's model: logits of a prefill and of a decode, `[2, vocab]` each."""
    outcome = []
    for folder in folders:
        runner = make_runner(folder, tp_group)
        scheduler = HandScheduler(len(PROMPTS))
        prefill = runner.forward(scheduler.extend(PROMPTS))
        decode = runner.forward(scheduler.extend({0: [11], 1: [129]}, ForwardMode.DECODE))
        outcome.append([prefill.numpy(), decode.numpy()])
    return outcome


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    made = [tmp_path_factory.mktemp(variant) for variant in VARIANTS]
    for variant, folder in zip(VARIANTS, made, strict=True):
        save_tiny_model(variant, folder)
    return made


@pytest.mark.parametrize("size", [2, 3])
def test_logits_are_the_same_at_every_tp(size: int, folders: list[Path], tmp_path: Path) -> None:
    alone = _logits(TpGroup(0, 1), folders)
    ranks = run_ranks(size, _logits, tmp_path / "tp", folders)
    for model, expected in enumerate(alone):
        for step, logits in enumerate(expected):
            np.testing.assert_allclose(ranks[0][model][step], logits, rtol=0, atol=1e-4)
            for rank in ranks[1:]:
                assert np.array_equal(rank[model][step], ranks[0][model][step])
