"""`broadcast_recv_input` between two ranks, with both codecs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shared.messages import AbortReq, FlushCacheReq, SamplingParams, SchedulerInput, TokenizedGenerateReqInput
from shared.parallel.tp_group import TpGroup
from stage3_broadcast.tp_worker import broadcast_recv_input
from tests.parallel.ranks import run_ranks

pytestmark = pytest.mark.stages(3)

LARGE_TOKENS = 1 << 19
"""As int64, 4 MB: the size of the chapter's image."""


def _exchange(tp_group: TpGroup, codec: str) -> list[tuple[list[str], int]]:
    """What each broadcast brought to this rank: types in order, and the sum of all prompt tokens."""
    assert tp_group.cpu_group is not None
    prompt = np.arange(LARGE_TOKENS, dtype=np.int64)
    rounds: list[list[SchedulerInput]] = [
        [],
        [AbortReq("x"), FlushCacheReq("y")],
        [TokenizedGenerateReqInput("large", prompt, SamplingParams()), AbortReq("large")],
        [],
    ]
    seen = []
    for recv_reqs in rounds:
        data = recv_reqs if tp_group.rank == 0 else [AbortReq("ignored")]
        received = broadcast_recv_input(data, tp_group.rank, tp_group.cpu_group, codec)
        tokens = sum(int(req.input_ids.sum()) for req in received if isinstance(req, TokenizedGenerateReqInput))
        seen.append(([type(req).__name__ for req in received], tokens))
    return seen


@pytest.mark.parametrize("codec", ["list", "buffer"])
def test_every_rank_sees_what_rank_0_received(codec: str, tmp_path: Path) -> None:
    total = LARGE_TOKENS * (LARGE_TOKENS - 1) // 2
    expected = [
        ([], 0),
        (["AbortReq", "FlushCacheReq"], 0),
        (["TokenizedGenerateReqInput", "AbortReq"], total),
        ([], 0),
    ]
    assert run_ranks(2, _exchange, tmp_path / "meet", codec) == [expected, expected]
