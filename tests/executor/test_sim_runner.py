"""The simulated device: tokens that follow from the context, time that passes on the test's own clock."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from shared.executor import sim_runner
from shared.executor.forward_batch import ForwardBatch, ForwardMode, SamplingBatch
from shared.executor.sim_runner import DEFAULT_TOTAL_TOKENS, SimRunner
from shared.server_args import ServerArgs

VOCAB_SIZE, CONTEXT_LENGTH = 1000, 64
CONTEXT = [5, 6, 7, 5, 900, 6, 1, 2]


class Clock:
    """Stands in for the `time` module; only sleeping moves it."""

    def __init__(self) -> None:
        self.now_ns = 10**9
        self.slept_ns = 0

    def monotonic_ns(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        slept_ns = max(1000, round(seconds * 1e9))
        self.now_ns += slept_ns
        self.slept_ns += slept_ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(sim_runner, "time", clock)
    return clock


def runner_of(decode_ms: float = 0, prefill_us: float = 0, forbidden_ids: tuple[int, ...] = ()) -> SimRunner:
    args = ServerArgs(device="sim", sim_decode_ms=decode_ms, sim_prefill_us_per_token=prefill_us, max_total_tokens=500)
    return SimRunner(args, VOCAB_SIZE, CONTEXT_LENGTH, forbidden_ids)


def batch_of(
    mode: ForwardMode,
    requests: list[tuple[list[int], int, list[int]]],
    *,
    seeds: list[int | None] | None = None,
    top_nums: list[int | None] | None = None,
) -> ForwardBatch:
    """A batch of `(context ids, how many are new, slots of the context)`; a seed of None is greedy."""
    bs = len(requests)
    seeds = seeds or [None] * bs
    table = np.zeros((bs, CONTEXT_LENGTH), dtype=np.int32)
    for index, (_, _, slots) in enumerate(requests):
        table[index, : len(slots)] = slots

    def new(values: list[list[int]]) -> Any:
        return np.array([v for kept, (_, n, _) in zip(values, requests, strict=True) for v in kept[-n:]], np.int64)

    ones, greedy = np.ones(bs, np.float32), np.array([seed is None for seed in seeds])
    return ForwardBatch(
        step=0,
        mode=mode,
        rids=[f"r{i}" for i in range(bs)],
        input_ids=new([ids for ids, _, _ in requests]),
        positions=new([list(range(len(ids))) for ids, _, _ in requests]),
        req_pool_indices=np.arange(bs),
        seq_lens=np.array([len(ids) for ids, _, _ in requests]),
        extend_lens=np.array([n for _, n, _ in requests]),
        out_cache_loc=new([slots for _, _, slots in requests]),
        req_to_token=table,
        emits=np.ones(bs, dtype=np.bool_),
        output_lens=np.zeros(bs, dtype=np.int64),
        sampling=SamplingBatch(
            greedy, ones, np.full(bs, VOCAB_SIZE), ones, ones * 0, ones * 0, ones * 0, ones,
            np.array([seed or 0 for seed in seeds], np.uint64), [None] * bs, [None] * bs, [None] * bs,
            bool(greedy.all()), False,
        ),
        top_logprobs_nums=top_nums,
    )  # fmt: skip


def extend(runner: SimRunner, *requests: tuple[list[int], int, list[int]], **more: Any) -> list[int]:
    batch = batch_of(ForwardMode.EXTEND, list(requests), **more)
    return [int(t) for t in runner.launch(batch).wait().next_token_ids]


def decode(runner: SimRunner, *requests: tuple[list[int], list[int]], **more: Any) -> list[int]:
    batch = batch_of(ForwardMode.DECODE, [(ids, 1, slots) for ids, slots in requests], **more)
    return [int(t) for t in runner.launch(batch).wait().next_token_ids]


def slots_from(first: int, count: int = len(CONTEXT)) -> list[int]:
    return list(range(first, first + count))


def whole_prefill(context: list[int] = CONTEXT) -> int:
    return extend(runner_of(), (context, len(context), slots_from(100, len(context))))[0]


# Tokens


def test_the_token_is_the_same_however_its_context_was_computed() -> None:
    runner, slots = runner_of(), [30, 3, 77, 499, 0, 12, 13, 400]
    for new, until in [(3, 3), (1, 4), (2, 6)]:
        extend(runner, (CONTEXT[:until], new, slots[:until]))
    decode(runner, (CONTEXT[:7], slots[:7]))
    assert decode(runner, (CONTEXT, slots)) == [whole_prefill()]


def test_neighbours_in_the_batch_change_nothing() -> None:
    other = [9] * 11
    requests = [(other, 11, slots_from(200, 11)), (CONTEXT, 8, slots_from(0)), ([4], 1, [300])]
    tokens = extend(runner_of(), *requests)
    assert tokens == [whole_prefill(other), whole_prefill(), whole_prefill([4])]


def test_every_token_and_its_place_counts() -> None:
    contexts = [CONTEXT, CONTEXT[1:], [*CONTEXT, 0]]
    contexts += [[*CONTEXT[:i], CONTEXT[i] + 1, *CONTEXT[i + 1 :]] for i in range(8)]
    contexts += [[*CONTEXT[:i], CONTEXT[i + 1], CONTEXT[i], *CONTEXT[i + 2 :]] for i in range(7)]
    assert len({whole_prefill(context) for context in contexts}) == len(contexts)


def test_a_prefix_may_be_written_by_an_earlier_request_of_the_batch() -> None:
    shared = slots_from(0, 5)
    tokens = extend(runner_of(), (CONTEXT, 8, slots_from(0)), ([*CONTEXT[:5], 44], 1, [*shared, 60]))
    assert tokens == [whole_prefill(), whole_prefill([*CONTEXT[:5], 44])]


@pytest.mark.parametrize("fault", ["never written", "overwritten", "another's"])
def test_a_wrong_slot_shows_up_as_another_token(fault: str) -> None:
    runner, slots = runner_of(), slots_from(0)
    extend(runner, (CONTEXT[:7], 7, slots[:7]))
    if fault == "never written":
        slots[6] = 250
    elif fault == "overwritten":
        extend(runner, ([8, 8], 2, [9, slots[6]]))
    else:
        slots[6] = slots[5]
    assert decode(runner, (CONTEXT, slots)) != [whole_prefill()]


def test_the_seed_counts_for_random_rows_only() -> None:
    same = [(CONTEXT, 8, slots_from(8 * i)) for i in range(5)]
    tokens = extend(runner_of(), *same, seeds=[None, 1, 2, 1, None])
    assert tokens[0] == tokens[4] == whole_prefill() and tokens[1] == tokens[3]
    assert len(set(tokens)) == 3


def test_forbidden_ids_are_never_produced() -> None:
    forbidden = tuple(range(0, VOCAB_SIZE, 2))
    runner, produced = runner_of(forbidden_ids=forbidden), set()
    for first in range(VOCAB_SIZE):
        produced.update(extend(runner, ([first], 1, [0]), ([first, first], 2, [1, 2])))
    assert all(token % 2 for token in produced)
    assert len(produced) > 400 and min(produced) < 10 and max(produced) > VOCAB_SIZE - 10


def test_a_vocabulary_without_an_allowed_id_is_refused() -> None:
    with pytest.raises(ValueError, match="all 1000 ids"):
        runner_of(forbidden_ids=tuple(range(VOCAB_SIZE)))


def test_logprobs_are_those_of_certainty() -> None:
    requests = [(CONTEXT, 8, slots_from(8 * i)) for i in range(3)]
    batch = batch_of(ForwardMode.EXTEND, requests, top_nums=[None, 0, 5])
    logprobs = runner_of().launch(batch).wait().logprobs
    assert logprobs == [None, (0.0, ()), (0.0, ((whole_prefill(), 0.0),))]


# Time


def test_a_launch_returns_at_once_and_its_tokens_are_on_the_device(clock: Clock) -> None:
    runner = runner_of(prefill_us=100)
    forward = runner.launch(batch_of(ForwardMode.EXTEND, [(CONTEXT, 8, slots_from(0))]))
    assert clock.slept_ns == 0
    assert forward.device_token_ids.tolist() == forward.wait().next_token_ids.tolist() == [whole_prefill()]


def test_forwards_run_one_after_another_and_take_the_stated_time(clock: Clock) -> None:
    runner, start_ns = runner_of(decode_ms=8, prefill_us=50), clock.now_ns
    first = runner.launch(batch_of(ForwardMode.EXTEND, [(CONTEXT, 8, slots_from(0))]))
    second = runner.launch(batch_of(ForwardMode.DECODE, [([*CONTEXT, 3], 1, slots_from(0, 9))] * 4))
    first.wait()
    assert clock.now_ns - start_ns == pytest.approx(8 * 50_000, abs=2000)
    second.wait()
    assert clock.now_ns - start_ns == pytest.approx(8 * 50_000 + 8_000_000, abs=2000)


def test_waiting_for_a_forward_that_is_over_does_not_sleep(clock: Clock) -> None:
    forward = runner_of(decode_ms=8).launch(batch_of(ForwardMode.DECODE, [(CONTEXT, 1, slots_from(0))]))
    clock.now_ns += 8_000_000
    forward.wait()
    assert clock.slept_ns == 0


def test_a_device_that_takes_no_time_never_sleeps(clock: Clock) -> None:
    decode(runner_of(), (CONTEXT, slots_from(0)))
    assert clock.slept_ns == 0


@pytest.mark.parametrize(("queued", "share"), [(True, 1.0), (False, 0.8)])
def test_busy_share_is_device_time_over_the_whole(clock: Clock, queued: bool, share: float) -> None:
    runner, batch = runner_of(decode_ms=8), batch_of(ForwardMode.DECODE, [(CONTEXT, 1, slots_from(0))])
    pending = runner.launch(batch)
    for _ in range(200):
        following = runner.launch(batch) if queued else None
        pending.wait()
        clock.now_ns += 2_000_000
        pending = following or runner.launch(batch)
    assert runner.launches == 201
    assert runner.busy_share == pytest.approx(share, abs=0.005)


# Settings


def test_capacity_is_the_flag_or_the_default() -> None:
    assert runner_of().max_total_num_tokens == 500
    unset = SimRunner(ServerArgs(device="sim"), VOCAB_SIZE, CONTEXT_LENGTH)
    assert unset.max_total_num_tokens == DEFAULT_TOTAL_TOKENS


def test_the_simulated_device_needs_no_torch() -> None:
    code = "import sys, shared.executor.sim_runner; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
