"""The sampler, checked against plain numpy and by statistics with fixed seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from shared.executor.forward_batch import ForwardBatch, ForwardMode, SamplingBatch, TokenCounts
from shared.executor.mix64 import mix64
from shared.kernels.torch_sampling import CANDIDATES, TorchSampling
from shared.layers.noise import exponential_noise, row_keys
from shared.layers.sampler import Sampler

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NOTHING = np.zeros(0, dtype=np.int64)


def row(**settings: Any) -> dict[str, Any]:
    """Settings of one row: those of a random row at temperature 1 without limits, but for what is given."""
    return {
        "greedy": False, "temperature": 1.0, "top_k": None, "top_p": 1.0, "min_p": 0.0, "frequency": 0.0,
        "presence": 0.0, "repetition": 1.0, "seed": 0, "counts": None, "bias": None, "blocked": None,
        "position": 10, "emits": True, "output_len": 0, "top_num": None, **settings,
    }  # fmt: skip


GREEDY = row(greedy=True)


def batch_of(rows: Sequence[dict[str, Any]], vocab_size: int) -> ForwardBatch:
    def column(name: str, dtype: Any) -> Any:
        return np.array([r[name] for r in rows], dtype=dtype)

    sampling = SamplingBatch(
        greedy=column("greedy", np.bool_),
        temperature=column("temperature", np.float32),
        top_k=np.array([r["top_k"] or vocab_size for r in rows], dtype=np.int64),
        top_p=column("top_p", np.float32),
        min_p=column("min_p", np.float32),
        frequency_penalty=column("frequency", np.float32),
        presence_penalty=column("presence", np.float32),
        repetition_penalty=column("repetition", np.float32),
        seed=column("seed", np.uint64),
        counts=[r["counts"] for r in rows],
        logit_bias=[r["bias"] for r in rows],
        blocked_until=[r["blocked"] for r in rows],
        all_greedy=all(r["greedy"] for r in rows),
        any_adjustment=any(r[name] is not None for r in rows for name in ("counts", "bias", "blocked")),
    )
    top_nums = [r["top_num"] for r in rows]
    return ForwardBatch(
        step=0,
        mode=ForwardMode.DECODE,
        rids=[f"r{i}" for i in range(len(rows))],
        input_ids=NOTHING,
        positions=NOTHING,
        req_pool_indices=NOTHING,
        seq_lens=column("position", np.int64),
        extend_lens=np.ones(len(rows), dtype=np.int64),
        out_cache_loc=NOTHING,
        req_to_token=np.zeros((1, 1), dtype=np.int32),
        emits=column("emits", np.bool_),
        output_lens=column("output_len", np.int64),
        sampling=sampling,
        top_logprobs_nums=top_nums if any(num is not None for num in top_nums) else None,
    )


def sample(logits: torch.Tensor, rows: Sequence[dict[str, Any]]) -> list[int]:
    result = Sampler(TorchSampling())(logits, batch_of(rows, logits.shape[1]))
    assert result.failed is None
    return [int(token) for token in result.next_token_ids]


def draws(logits: Any, count: int, **settings: Any) -> np.ndarray[Any, Any]:
    """`count` tokens drawn from one distribution under seeds 0, 1, 2 …"""
    values = torch.as_tensor(logits, dtype=torch.float32)
    rows = [row(**settings, seed=seed) for seed in range(count)]
    return np.array(sample(values.expand(count, -1), rows))


def random_logits(rows: int, vocab_size: int, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def chi_square(observed: Any, expected: Any) -> float:
    return float(((observed - expected) ** 2 / expected).sum())


# Greedy rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("beside", [[], [row()], [row(top_k=1, temperature=0.5)]])
def test_greedy_takes_the_lowest_id_among_the_largest_logits(dtype: torch.dtype, beside: list[dict[str, Any]]) -> None:
    logits = torch.tensor([[1.0, 1.0, 0.0], [0.0, 2.0, 2.0]] + [[0.0, 1.0, 2.0]] * len(beside), dtype=dtype)
    assert sample(logits, [GREEDY, GREEDY, *beside])[:2] == [0, 1]


def test_greedy_ignores_temperature_and_limits() -> None:
    logits = random_logits(3, 500)
    rows = [row(greedy=True, temperature=1e-12, top_p=0.9), row(greedy=True, top_k=7, min_p=0.5), row(seed=3)]
    assert sample(logits, rows)[:2] == logits[:2].argmax(-1).tolist()


# Rows that cannot be sampled


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("settings", [{"greedy": True}, {}, {"top_p": 0.9}, {"top_k": 5, "min_p": 0.1}])
def test_a_row_with_nan_or_infinity_fails_alone(bad: float, settings: dict[str, Any]) -> None:
    logits = random_logits(4, 3000)
    rows = [row(**settings, seed=i) for i in range(4)]
    unharmed = sample(logits, rows)
    logits[2, 1234] = bad
    result = Sampler(TorchSampling())(logits, batch_of(rows, 3000))
    assert result.failed is not None and result.failed.tolist() == [False, False, True, False]
    assert [result.next_token_ids[i] for i in (0, 1, 3)] == [unharmed[i] for i in (0, 1, 3)]
    assert 0 <= result.next_token_ids[2] < 3000


def test_nan_at_a_blocked_id_still_fails() -> None:
    logits = torch.tensor([[0.0, torch.nan, 1.0]])
    blocked = row(greedy=True, blocked=(5, np.array([1])))
    result = Sampler(TorchSampling())(logits, batch_of([blocked], 3))
    assert result.failed is not None and result.failed[0]


@pytest.mark.parametrize("greedy", [True, False])
def test_a_row_with_every_token_blocked_fails_and_does_not_raise(greedy: bool) -> None:
    blocked = row(greedy=greedy, top_p=0.5, blocked=(5, np.arange(3)))
    result = Sampler(TorchSampling())(torch.zeros(2, 3), batch_of([blocked, GREEDY], 3))
    assert result.failed is not None and result.failed.tolist() == [True, False]
    assert result.next_token_ids[1] == 0


# Log-probabilities


def test_logprobs_are_of_the_raw_logits_and_only_for_rows_that_ask() -> None:
    logits = random_logits(4, 200)
    bent = row(greedy=True, bias=(np.array([7]), np.array([90.0], np.float32)), top_num=3)
    rows = [bent, row(temperature=5.0, seed=1, top_num=0), row(), row(greedy=True, top_num=1)]
    result = Sampler(TorchSampling())(logits, batch_of(rows, 200))
    expected = logits.double().log_softmax(-1)
    assert result.logprobs is not None and result.logprobs[2] is None
    for i, top_num in [(0, 3), (1, 0), (3, 1)]:
        logprob = result.logprobs[i]
        assert logprob is not None
        assert logprob.logprob == pytest.approx(float(expected[i, result.next_token_ids[i]]), abs=1e-5)
        best = expected[i].sort(descending=True, stable=True)
        assert [token for token, _ in logprob.top] == best.indices[:top_num].tolist()
        assert [value for _, value in logprob.top] == pytest.approx(best.values[:top_num].tolist(), abs=1e-5)
    assert result.next_token_ids[0] == 7


def test_the_greedy_token_comes_first_among_tied_alternatives() -> None:
    logits = torch.zeros(1, 50)
    logits[0, [40, 20, 30]] = 1.0
    result = Sampler(TorchSampling())(logits, batch_of([row(greedy=True, top_num=2)], 50))
    assert result.next_token_ids[0] == 20
    assert result.logprobs is not None and result.logprobs[0] is not None
    assert [token for token, _ in result.logprobs[0].top] == [20, 30]


def test_failed_rows_and_rows_that_emit_nothing_have_no_logprobs() -> None:
    logits = torch.tensor([[torch.nan, 0.0], [1.0, 0.0], [1.0, 0.0]])
    rows = [row(greedy=True, top_num=1, emits=emits) for emits in (True, False, True)]
    logprobs = Sampler(TorchSampling())(logits, batch_of(rows, 2)).logprobs
    assert logprobs is not None and [entry is None for entry in logprobs] == [True, True, False]


# Adjustments


@pytest.mark.parametrize("beside", [[], [row()], [GREEDY, row(top_p=0.3)]])
def test_penalties_count_the_newest_token_and_apply_once(beside: list[dict[str, Any]]) -> None:
    vocab_size, prompt, generator = 20, np.array([3, 4, 4]), torch.Generator().manual_seed(1)
    bias_ids, bias = np.array([5, 9]), np.array([1.5, -2.0], np.float32)
    counts = TokenCounts(vocab_size, prompt, [])
    tokens: list[int] = []
    for step in range(64):
        logits = torch.randn(1 + len(beside), vocab_size, generator=generator)
        expected = logits[0].numpy().copy()
        expected[bias_ids] += bias
        for token in range(vocab_size):
            if token in prompt or token in tokens:
                expected[token] *= 1.3 if expected[token] < 0 else 1 / 1.3
            expected[token] -= 0.2 * tokens.count(token) + 0.5 * (token in tokens)
        if step < 5:
            expected[[0, 1]] = -np.inf
        penalised = row(
            greedy=True, frequency=0.2, presence=0.5, repetition=1.3, counts=counts, bias=(bias_ids, bias),
            blocked=(5, np.array([0, 1])), output_len=step,
        )  # fmt: skip
        tokens.append(sample(logits, [penalised, *beside])[0])
        assert tokens[-1] == expected.argmax()
    assert counts.output.tolist() == [tokens.count(token) for token in range(vocab_size)]
    assert set(np.flatnonzero(counts.seen)) == set(tokens) | {3, 4}


def test_a_thrown_away_token_is_not_counted() -> None:
    counts = TokenCounts(4, np.array([1]), [])
    sample(torch.zeros(1, 4), [row(greedy=True, presence=1.0, counts=counts, emits=False)])
    assert counts.output.sum() == 0


@pytest.mark.parametrize(("output_len", "token"), [(0, 1), (4, 1), (5, 0), (6, 0)])
def test_ids_are_blocked_until_enough_tokens_are_out(output_len: int, token: int) -> None:
    blocked = row(greedy=True, blocked=(5, np.array([0])), output_len=output_len)
    assert sample(torch.tensor([[2.0, 1.0]]), [blocked]) == [token]


def test_adjustments_move_random_rows_too() -> None:
    biased = row(bias=(np.array([3]), np.array([100.0], np.float32)))
    blocked = row(blocked=(1, np.arange(7)))
    assert sample(torch.zeros(3, 8), [row(seed=1), biased, blocked])[1:] == [3, 7]


def test_the_logits_are_left_as_they_are() -> None:
    logits = random_logits(3, 100)
    before = logits.clone()
    counts = TokenCounts(100, np.arange(50), [1, 2])
    sample(logits, [row(greedy=True, repetition=2.0, counts=counts), row(top_p=0.5), row(temperature=3.0)])
    assert torch.equal(logits, before)


# Draws


def test_a_row_draws_the_same_alone_and_beside_any_neighbours() -> None:
    kinds: list[dict[str, Any]] = [
        {}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05}, {"temperature": 0.3}, {"greedy": True}
    ]  # fmt: skip
    rows = [row(**kinds[i % 6], seed=i * 977, position=i) for i in range(40)]
    logits = random_logits(40, 3000, scale=1.0)
    together = sample(logits, rows)
    assert together == [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(40)]
    order = np.random.default_rng(0).permutation(40)
    assert sample(logits[torch.from_numpy(order)], [rows[i] for i in order]) == [together[i] for i in order]
    assert len(set(together)) > 20


def test_a_draw_survives_last_bit_differences_in_the_logits() -> None:
    logits = random_logits(64, 3000, scale=1.0)
    rows = [row(seed=i, top_p=0.95 if i % 2 else 1.0) for i in range(64)]
    assert sample(logits * (1 + 1e-7), rows) == sample(logits, rows)


@pytest.mark.parametrize("settings", [{}, {"top_k": 6, "temperature": 2.0}])
def test_frequencies_match_softmax(settings: dict[str, Any]) -> None:
    logits = random_logits(1, 10, scale=1.0)[0]
    scaled = logits.double() / settings.get("temperature", 1.0)
    scaled[logits.argsort(descending=True)[settings.get("top_k", 10) :]] = -torch.inf
    expected = scaled.softmax(-1).numpy() * 20_000
    observed = np.bincount(draws(logits, 20_000, **settings), minlength=10)
    kept = expected > 0
    assert observed[~kept].sum() == 0
    assert chi_square(observed[kept], expected[kept]) < 27.9  # 0.1 % of 9 degrees of freedom


def test_consecutive_positions_and_neighbouring_seeds_are_uncorrelated() -> None:
    count = 6400
    by_seed = draws(torch.zeros(8), count)
    positions = [row(position=position, seed=42) for position in range(count)]
    by_position = np.array(sample(torch.zeros(count, 8), positions))
    for tokens in (by_seed, by_position):
        pairs = np.bincount(tokens[:-1] * 8 + tokens[1:], minlength=64)
        assert chi_square(pairs, (count - 1) / 64) < 103.4  # 0.1 % of 63 degrees of freedom


def test_noise_is_exponential_and_the_same_for_a_token_wherever_it_is_looked_up() -> None:
    keys = torch.from_numpy(row_keys(np.arange(4, dtype=np.uint64), np.arange(4)))
    whole = exponential_noise(keys, None, 49_152)
    ids = torch.randint(49_152, (4, 100), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(exponential_noise(keys, ids, 49_152), whole.gather(1, ids))
    assert whole.min() > 0 and whole.isfinite().all()
    deciles = -np.log1p(-np.arange(1, 10) / 10)
    for noise in whole.numpy():
        counts = np.bincount(np.searchsorted(deciles, noise), minlength=10)
        assert chi_square(counts, 4915.2) < 27.9


def finalise(x: Any, first_multiplier: int, first_shift: int) -> Any:
    """The later steps of MurmurHash3's finaliser, on numpy uint32."""
    x = x * np.uint32(first_multiplier)
    x ^= x >> np.uint32(first_shift)
    x *= np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def test_noise_is_that_of_unsigned_32_bit_arithmetic() -> None:
    ids = np.arange(1000, dtype=np.uint32)
    hashed = finalise(ids ^ (ids >> np.uint32(16)), 0x85EBCA6B, 13)
    key = int(mix64(mix64(np.array([2**63 + 5], np.uint64)) + np.uint64(77))[0])
    low, high = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)
    bits = finalise(hashed ^ low, int(high) | 1, 15) & np.uint32(0x7FFFFFFF)
    expected = -np.log1p(-np.minimum((bits + 0.5) / 2**31, 1 - 2.0**-24))
    noise = exponential_noise(torch.from_numpy(row_keys(np.array([2**63 + 5], np.uint64), np.array([77]))), None, 1000)
    np.testing.assert_allclose(noise[0].numpy(), expected, rtol=1e-4)


def test_noise_at_the_ends_of_its_range_is_positive_and_finite() -> None:
    # Id 0 hashes to 0, so with a multiplier of 1 the first key is what is finalised; the second is the number
    # that finalises to 2**31 - 1, the largest.
    largest = 0x7FFFFFFF ^ (0x7FFFFFFF >> 16)
    largest = largest * pow(0xC2B2AE35, -1, 2**32) % 2**32
    largest ^= (largest >> 15) ^ (largest >> 30)
    assert finalise(np.array([largest], np.uint32), 1, 15)[0] == 0x7FFFFFFF
    keys = torch.from_numpy(np.array([[0, 1], [largest, 1]], np.uint32).view(np.int32))
    smallest_noise, largest_noise = exponential_noise(keys, None, 1)[:, 0].tolist()
    assert smallest_noise == pytest.approx(2.0**-32)
    assert largest_noise == pytest.approx(24 * np.log(2))


# Limits

PROBABILITIES = [0.05, 0.4, 0.05, 0.2, 0.1, 0.2]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, {0, 1, 2, 3, 4, 5}),
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 5}, {0, 1, 3, 4, 5}),
        ({"top_p": 0.3}, {1}),
        ({"top_p": 0.5}, {1, 3}),
        ({"top_p": 0.7}, {1, 3, 5}),
        ({"top_p": 0.93}, {0, 1, 3, 4, 5}),
        ({"top_p": 1e-9}, {1}),
        ({"min_p": 0.2}, {1, 3, 4, 5}),
        ({"min_p": 1.0}, {1}),
        ({"top_k": 3, "top_p": 0.7}, {1, 3}),  # 0.4 and 0.2 are 0.75 of the 0.8 that top-k leaves
        ({"top_p": 0.85, "min_p": 0.4}, {1, 3, 5}),
        ({"top_k": 2, "min_p": 0.9}, {1}),
    ],
)
def test_limits_keep_exactly_the_tokens_of_their_definition(settings: dict[str, Any], kept: set[int]) -> None:
    assert set(draws(np.log(PROBABILITIES), 400, **settings).tolist()) == kept


def test_top_p_stops_at_the_token_that_reaches_it() -> None:
    logits = np.log([0.5, 0.25, 0.25]) - np.log(0.5)
    assert set(draws(logits, 200, top_p=0.5).tolist()) == {0}


@pytest.mark.parametrize("settings", [{"top_p": 0.5}, {"top_k": 1500}, {"top_k": 2000, "top_p": 0.75}])
def test_limits_reach_beyond_the_first_candidates(settings: dict[str, Any]) -> None:
    vocab_size = 3000
    tokens = draws(torch.zeros(vocab_size), 1000, **settings)
    assert tokens.max() < 1500
    assert tokens.max() > CANDIDATES and (tokens > CANDIDATES).mean() == pytest.approx(1 / 3, abs=0.05)


def test_a_row_without_limits_is_not_touched_by_its_neighbours() -> None:
    logits = torch.zeros(200, 50)
    limited = [row(top_k=1), row(top_p=0.01), row(min_p=1.0), row(top_k=3, top_p=0.5)]
    rows = [limited[i // 2 % 4] if i % 2 else row(seed=i) for i in range(200)]
    assert sample(logits, rows)[::2] == sample(logits[::2], rows[::2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("settings", [{"temperature": 1e-3}, {"top_p": 1e-9}, {"top_p": 1e-4}, {"top_k": 1}])
def test_extreme_settings_give_the_greedy_token(dtype: torch.dtype, settings: dict[str, Any]) -> None:
    logits = random_logits(8, 300, scale=20.0).to(dtype)
    logits[:, 17] = 60000.0
    logits[3, 200] = -torch.inf
    assert sample(logits, [row(**settings, seed=i) for i in range(8)]) == [17] * 8


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_high_temperature_stays_finite(dtype: torch.dtype) -> None:
    logits = random_logits(64, 300, scale=100.0).to(dtype)
    assert len(set(sample(logits, [row(temperature=100.0, seed=i) for i in range(64)]))) > 30
