"""Collectives of a tensor-parallel group, over gloo on loopback and, those of the forward, in shared memory."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from shared.parallel.tp_group import TpGroup
from tests.parallel.ranks import run_ranks


def _collectives(tp_group: TpGroup) -> dict[str, Any]:
    rank = tp_group.rank
    large = [np.arange(1 << 20, dtype=np.float32), "tail"] if rank == 0 else []
    received = tp_group.broadcast_pyobj(large)
    widths = [3, 1, 2][: tp_group.size]
    shard = torch.full((2, widths[rank]), float(rank))
    over_gloo = copy.copy(tp_group)
    over_gloo.shared_memory = None
    groups = [over_gloo] if tp_group.shared_memory is None else [over_gloo, tp_group]
    return {
        "reduced": [group.all_reduce(torch.tensor([1.5, rank])).tolist() for group in groups],
        "gathered": [group.all_gather(shard, widths).tolist() for group in groups],
        "empty": tp_group.broadcast_pyobj([] if rank == 0 else ["ignored"]),
        "small": tp_group.broadcast_pyobj([{"rid": "x"}] if rank == 0 else []),
        "large_sum": float(received[0].sum()),
        "large_tail": received[1],
        "smallest": tp_group.agree_min([600, 500, 700][rank]),
        "checked": tp_group.gather_for_check(np.array([rank, -rank], dtype=np.int64)).tolist(),
        "listening": [
            connection.laddr.ip
            for connection in psutil.Process().net_connections(kind="inet")
            if connection.status == psutil.CONN_LISTEN
        ],
    }


@pytest.fixture(scope="module", params=[2, 3])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    meeting_place: Path = tmp_path_factory.mktemp("ranks") / "tp"
    return run_ranks(request.param, _collectives, meeting_place)


def test_all_reduce_gives_every_rank_the_sum(outcomes: list[dict[str, Any]]) -> None:
    size = len(outcomes)
    for outcome in outcomes:
        for reduced in outcome["reduced"]:
            assert reduced == [1.5 * size, size * (size - 1) / 2]


def test_all_gather_joins_shards_of_different_widths(outcomes: list[dict[str, Any]]) -> None:
    row = [0.0, 0.0, 0.0, 1.0, 2.0, 2.0][: 4 if len(outcomes) == 2 else 6]
    for outcome in outcomes:
        for gathered in outcome["gathered"]:
            assert gathered == [row, row]


def test_broadcast_carries_rank_0s_list_to_all(outcomes: list[dict[str, Any]]) -> None:
    expected_sum = float(np.arange(1 << 20, dtype=np.float32).sum())
    for outcome in outcomes:
        assert outcome["empty"] == []
        assert outcome["small"] == [{"rid": "x"}]
        assert (outcome["large_sum"], outcome["large_tail"]) == (expected_sum, "tail")


def test_agree_min_is_the_smallest_of_all_ranks(outcomes: list[dict[str, Any]]) -> None:
    assert {outcome["smallest"] for outcome in outcomes} == {500}


def test_gather_for_check_shows_every_rank_all_values(outcomes: list[dict[str, Any]]) -> None:
    expected = [[rank, -rank] for rank in range(len(outcomes))]
    assert [outcome["checked"] for outcome in outcomes] == [expected] * len(outcomes)


@pytest.mark.skipif(sys.platform == "darwin", reason="psutil needs root there")
def test_ranks_listen_on_loopback_only(outcomes: list[dict[str, Any]]) -> None:
    for outcome in outcomes:
        assert outcome["listening"], "gloo listens somewhere, or this looks in the wrong place"
        assert set(outcome["listening"]) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_a_group_of_one_needs_no_process_group() -> None:
    alone = TpGroup(0, 1)
    tensor = torch.ones(2, 3)
    assert alone.all_reduce(tensor) is tensor
    assert alone.all_gather(tensor, [3]) is tensor
    assert alone.broadcast_pyobj([1]) == [1]
    assert alone.agree_min(5) == 5
    assert alone.gather_for_check(np.array([4])).tolist() == [[4]]
    assert not torch.distributed.is_initialized()
