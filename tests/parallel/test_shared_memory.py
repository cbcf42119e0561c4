"""Sums and joins through memory that the ranks share."""

from __future__ import annotations

import functools
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.parallel import shared_memory, tp_group
from shared.parallel.tp_group import TpGroup
from tests.parallel.ranks import run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no memfd")

WIDTHS = [5, 0, 9]


def drawn(rank: int, call: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * call + rank)
    return torch.randn(*shape, generator=generator)


def summed(size: int, call: int, *shape: int) -> Tensor:
    total = drawn(0, call, *shape)
    for rank in range(1, size):
        total = total + drawn(rank, call, *shape)
    return total


def _many_calls(group: TpGroup) -> str:
    """Runs 300 calls of changing sizes, this rank late at some of them.  What went wrong, or ""."""
    shared_memory.PIECE_BYTES = 4096  # the memory is larger than that; pieces are cut by it
    memory, size = group.shared_memory, group.size
    if memory is None:
        return "there is no shared memory"
    memory._rooms = memory._rooms[:, :, :4096]
    late = random.Random(group.rank)
    for call in range(300):
        if late.random() < 0.05:
            time.sleep(0.003)
        rows = 1 + call % 40
        tensor = drawn(group.rank, call, rows, 64)
        if not torch.equal(group.all_reduce(tensor), summed(size, call, rows, 64)):
            return f"the sum of call {call}"
        joined = group.all_gather(drawn(group.rank, call, rows, WIDTHS[group.rank]), WIDTHS[:size])
        expected = [drawn(rank, call, rows, WIDTHS[rank]) for rank in range(size)]
        if not torch.equal(joined, torch.cat(expected, dim=1)):
            return f"the join of call {call}"
    return ""


@pytest.mark.parametrize("size", [2, 3])
def test_every_call_of_many_is_right_whoever_is_late(size: int, tmp_path: Path) -> None:
    assert run_ranks(size, _many_calls, tmp_path / "tp") == [""] * size


def _half_precision(group: TpGroup) -> Any:
    tensor = group.all_reduce(torch.full((3, 7), 0.1 + group.rank, dtype=torch.bfloat16))
    return str(tensor.dtype), tensor[0, 0].item()


def test_a_sum_keeps_its_type(tmp_path: Path) -> None:
    expected = torch.tensor(0.1, dtype=torch.bfloat16) + torch.tensor(1.1, dtype=torch.bfloat16)
    assert run_ranks(2, _half_precision, tmp_path / "tp") == [("torch.bfloat16", expected.item())] * 2


def _unreadable(group: TpGroup, refused_to: int) -> Any:
    def refuse(pid: int, descriptor: int) -> None:
        raise PermissionError

    if group.rank == refused_to:
        tp_group.open_memory = refuse
    again = tp_group._share_memory(group)
    return again is None, group.all_reduce(torch.ones(2)).tolist()


def test_without_a_rank_that_may_open_it_nobody_uses_it(tmp_path: Path) -> None:
    outcomes = run_ranks(3, functools.partial(_unreadable, refused_to=2), tmp_path / "tp")
    assert outcomes == [(True, [3.0, 3.0])] * 3
