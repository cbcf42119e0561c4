"""What bench.front, bench.ranks and bench.trace_cost measure, without waiting for figures worth reading."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from bench import front, trace_cost
from shared import trace
from shared.weights.prepare import prepare_model
from tests.server.process import Server


def test_tokens_go_through_the_detokenizer_and_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "BATCHES", 5)
    with front.detokenizer(prepare_model("tiny-random")) as port_args:
        rates = front.detokenized_per_second(port_args, rows=3, vocab_size=200, rounds=2)
    assert len(rates) == 2 and min(rates) > 0


def test_all_streamed_or_none_every_answer_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    with Server(4, "--device", "sim", "--sim-decode-ms", "1") as server:
        for streamed in (False, True):
            assert front.tokens_per_second(server.url, [[10, 20], [30, 40]], streamed=streamed) > 0
        with pytest.raises(httpx.HTTPStatusError):
            front.tokens_per_second(server.url, [[10, -1]], streamed=True)
        monkeypatch.setattr(front, "is_whole", lambda end: not end.endswith(b"[DONE]\n\n"))
        with pytest.raises(RuntimeError, match="not whole"):
            front.tokens_per_second(server.url, [[10, 20]], streamed=True)


def test_the_traced_turns_are_traced_and_no_others(tmp_path: Path) -> None:
    without, traced = trace_cost.measure(2, 1, tmp_path)
    assert len(without) == len(traced) == 1 and min(without + traced) > 0
    folders = sorted(tmp_path.iterdir())
    forwards = [sum(step.forwards for step in trace.read(folder).steps) for folder in folders]
    assert forwards == [1 + trace_cost.CALLS * trace_cost.ERA_DECODE_STEPS] * 2
    assert trace.current_folder() is None
