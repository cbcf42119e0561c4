"""Draws under top-k and top-p: every backend that promises it gives the very tokens of the torch backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.kernels import make_sampling_kernels
from shared.kernels.base import Limits
from shared.layers.sampler import Sampler
from tests.kernels.conftest import DEVICE, TRITON
from tests.layers.test_sampler import PROBABILITIES, batch_of, row

pytestmark = pytest.mark.parametrize("backend", [TRITON])


def tokens(backend: str, logits: torch.Tensor, rows: list[dict[str, Any]]) -> list[int]:
    sampler = Sampler(make_sampling_kernels(backend))
    batch = batch_of(rows, logits.shape[1])
    return sampler.sample(logits.to(DEVICE), batch).to_host().token_ids.tolist()


def filtered(logits: torch.Tensor, top_k: int, top_p: float) -> list[int]:
    from shared.kernels.triton_backend import keep_limited

    scores = (logits - logits.max())[None].to(DEVICE)
    limits = Limits(
        torch.tensor([top_k], device=DEVICE),
        torch.tensor([np.float64(np.float32(top_p))], device=DEVICE),
        torch.zeros(1, 1, device=DEVICE),
    )
    return keep_limited(scores, scores.exp(), limits)[0].nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("top_k", "top_p", "expected"),
    [
        (2, 1.0, [1, 3]),
        (3, 1.0, [1, 3, 5]),
        (5, 1.0, [0, 1, 3, 4, 5]),
        (6, 0.3, [1]),
        (6, 0.7, [1, 3, 5]),
        (6, 0.93, [0, 1, 3, 4, 5]),
        (6, 1e-9, [1]),
        (3, 0.7, [1, 3]),
        (6, 1.0, [0, 1, 2, 3, 4, 5]),
        (1, 0.5, [1]),
    ],
)
def test_exactly_the_tokens_of_the_definition_are_kept(
    backend: str, top_k: int, top_p: float, expected: list[int]
) -> None:
    assert filtered(torch.tensor(np.log(PROBABILITIES), dtype=torch.float32), top_k, top_p) == expected


def test_ties_are_cut_by_id_across_blocks(backend: str) -> None:
    logits = torch.zeros(9000)
    logits[[8999, 5000]] = 1.0
    assert filtered(logits, 5000, 1.0) == sorted([*range(4998), 5000, 8999])
    assert filtered(torch.zeros(9000), 9000, 0.5) == list(range(4500))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_tokens_are_those_of_the_torch_backend(backend: str, dtype: torch.dtype) -> None:
    # bfloat16 logits are full of ties.
    logits = (torch.randn(20, 1500, generator=torch.Generator().manual_seed(5)) * 2).to(dtype)
    kinds: list[dict[str, Any]] = [
        {"top_k": 40}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.8, "min_p": 0.02}, {"temperature": 3.0, "top_p": 0.99},
        {}, {"greedy": True}, {"top_k": 1499}, {"top_k": 1}, {"top_p": 0.5, "temperature": 0.2}, {"min_p": 0.1},
    ]  # fmt: skip
    rows = [row(**kinds[i % len(kinds)], seed=i * 31, position=i) for i in range(20)]
    assert tokens(backend, logits, rows) == tokens("torch", logits, rows)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    levels=st.lists(st.integers(-40, 40), min_size=2, max_size=120),
    top_k=st.integers(1, 120),
    top_p=st.floats(2.0**-7, 1.0, width=32),
    temperature=st.sampled_from([0.3, 1.0, 4.0]),
    seed=st.integers(0, 2**64 - 1),
)
def test_any_limits_give_the_same_token(
    backend: str, levels: list[int], top_k: int, top_p: float, temperature: float, seed: int
) -> None:
    logits = torch.tensor([levels], dtype=torch.float32) / 4  # few levels, so many ties
    rows = [row(top_k=min(top_k, len(levels)), top_p=top_p, temperature=temperature, seed=seed)]
    assert tokens(backend, logits, rows) == tokens("torch", logits, rows)


def test_a_row_that_cannot_be_sampled_fails_alone(backend: str) -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(1))
    rows = [row(top_p=0.9, seed=i) for i in range(3)]
    unharmed = tokens(backend, logits, rows)
    logits[1, 77] = torch.nan
    sampled = Sampler(make_sampling_kernels(backend)).sample(logits.to(DEVICE), batch_of(rows, 500)).to_host()
    assert sampled.failed.tolist() == [False, True, False]
    assert [sampled.token_ids[i] for i in (0, 2)] == [unharmed[0], unharmed[2]]
    assert 0 <= sampled.token_ids[1] < 500
