"""The scheduler against a plain loop: whatever it does with slots, each request gets its own tokens."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.mem_cache.radix_cache import RadixCache
from shared.messages import SamplingParams
from shared.scheduling.policy import WINDOW
from tests.scheduling.fake_model import EOS, Driver, reference

OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["in_turn", "overlap"])
CACHE = pytest.mark.parametrize("use_radix_cache", [True, False], ids=["cache", "no_cache"])


def expect(driver: Driver, rid: str, prompt: list[int], **params: object) -> None:
    tokens, finish = reference(prompt, SamplingParams(**params))  # type: ignore[arg-type]
    assert driver.tokens[rid] == tokens
    assert driver.finish[rid].type == finish


@OVERLAP
@CACHE
@pytest.mark.parametrize("max_new_tokens", [1, 2, 5, 64])
def test_pool_is_whole_after_every_request_and_the_tokens_are_right(
    overlap: bool, use_radix_cache: bool, max_new_tokens: int
) -> None:
    driver = Driver(overlap=overlap, use_radix_cache=use_radix_cache, prefill_tokens=4)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    solo, _ = reference(prompt, SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True))
    cases: list[dict[str, object]] = [
        {"ignore_eos": True},
        {"ignore_eos": False},
        {"ignore_eos": True, "stop_token_ids": (solo[-1],)},
        {"ignore_eos": True, "stop": (f"{solo[-1]}",)},
        {"ignore_eos": True, "stop_token_ids": (solo[0],), "min_new_tokens": 1},
    ]
    for i, params in enumerate(cases):
        driver.send(f"r{i}", prompt, max_new_tokens=max_new_tokens, **params)
        driver.run()
        expect(driver, f"r{i}", prompt, max_new_tokens=max_new_tokens, **params)
        driver.assert_whole()


@OVERLAP
def test_requests_of_one_batch_share_their_common_prefix(overlap: bool) -> None:
    driver = Driver(overlap=overlap)
    common = list(range(10, 30))
    for i in range(4):
        driver.send(f"r{i}", [*common, i], max_new_tokens=3, ignore_eos=True)
    driver.turn()
    assert driver.core.forwards == 1
    driver.run()
    for i in range(4):
        expect(driver, f"r{i}", [*common, i], max_new_tokens=3, ignore_eos=True)
        assert driver.cached[f"r{i}"] == (0 if i == 0 else 20)
    driver.assert_whole()


def test_an_unfinished_prefill_is_shared() -> None:
    driver = Driver(prefill_tokens=8)
    long = list(range(40))
    driver.send("long", long, max_new_tokens=1)
    driver.turn()
    driver.turn()
    assert driver.core.batcher.chunked is not None
    assert driver.core.memory.tree is not None
    assert driver.core.memory.tree.match_length(np.array(long, dtype=np.int64)) == 16
    driver.run()
    driver.assert_whole()


def test_a_wholly_cached_prompt_still_computes_one_token() -> None:
    driver = Driver()
    prompt = list(range(12))
    driver.send("a", prompt, max_new_tokens=4, ignore_eos=True)
    driver.run()
    for rid, again in (("b", prompt), ("c", prompt + driver.tokens["a"])):
        driver.send(rid, again, max_new_tokens=2, ignore_eos=True)
        driver.run()
        expect(driver, rid, again, max_new_tokens=2, ignore_eos=True)
        assert driver.cached[rid] == (len(prompt) - 1 if rid == "b" else len(again) - 1)
        driver.assert_whole()


@OVERLAP
@CACHE
def test_retraction_loses_and_changes_nothing(overlap: bool, use_radix_cache: bool) -> None:
    driver = Driver(overlap=overlap, use_radix_cache=use_radix_cache, max_total_num_tokens=90, conservativeness=0.1)
    prompts = {f"r{i}": [i, i + 1, i + 2] for i in range(8)}
    for rid, prompt in prompts.items():
        driver.send(rid, prompt, max_new_tokens=40, ignore_eos=True)
    driver.run()
    assert driver.core.batcher.retractions > 0
    for rid, prompt in prompts.items():
        expect(driver, rid, prompt, max_new_tokens=40, ignore_eos=True)
    driver.assert_whole()


@OVERLAP
def test_an_abort_ends_the_request_once_wherever_it_is(overlap: bool) -> None:
    for when in range(12):
        driver = Driver(overlap=overlap, prefill_tokens=6, max_running_requests=3)
        prompts = {f"r{i}": [i] * 5 + list(range(15)) for i in range(5)}
        for rid, prompt in prompts.items():
            driver.send(rid, prompt, max_new_tokens=10, ignore_eos=True)
        for _ in range(when):
            driver.turn()
        victim = f"r{when % 5}"
        driver.abort(victim)
        driver.abort("nobody")
        driver.run()
        driver.assert_whole()
        for rid, prompt in prompts.items():
            if rid != victim:
                expect(driver, rid, prompt, max_new_tokens=10, ignore_eos=True)
        assert driver.finish[victim].type in ("abort", "length")


@OVERLAP
def test_abort_of_all_leaves_the_pool_whole(overlap: bool) -> None:
    driver = Driver(overlap=overlap, prefill_tokens=16, max_running_requests=4)
    for i in range(10):
        driver.send(f"r{i}", [i] * 12, max_new_tokens=50, ignore_eos=True)
    for _ in range(5):
        driver.turn()
    driver.abort(None)
    driver.run()
    assert {reason.type for reason in driver.finish.values()} == {"abort"}
    assert len(driver.finish) == 10
    driver.assert_whole()


@OVERLAP
def test_a_request_with_nan_ends_alone_and_is_not_cached(overlap: bool) -> None:
    driver = Driver(overlap=overlap, prefill_tokens=8)
    driver.runner.fail_rids = {"bad"}
    common = [1, 2, 3, 4]
    driver.send("good", [*common, 5], max_new_tokens=6, ignore_eos=True)
    driver.send("bad", [*common, 6, 8, 9], max_new_tokens=6, ignore_eos=True)
    driver.run()
    expect(driver, "good", [*common, 5], max_new_tokens=6, ignore_eos=True)
    assert (driver.finish["bad"].type, driver.finish["bad"].status) == ("abort", 500)
    driver.assert_whole()
    assert driver.core.memory.tree is not None
    assert driver.core.memory.tree.match_length(np.array([*common, 6, 8, 9])) == 4


def test_a_running_request_decodes_between_the_chunks_of_a_long_prompt() -> None:
    driver = Driver(prefill_tokens=5)
    driver.send("first", [1, 2], max_new_tokens=30, ignore_eos=True)
    driver.turn()
    driver.send("long", list(range(40)), max_new_tokens=2, ignore_eos=True)
    before = len(driver.tokens["first"])
    for _ in range(8):
        driver.turn()
    assert driver.core.batcher.chunked is not None
    assert len(driver.tokens["first"]) >= before + 4
    driver.run()
    driver.assert_whole()


def test_a_prompt_that_leaves_no_room_is_refused_and_others_are_served() -> None:
    driver = Driver(max_total_num_tokens=50)
    driver.send("big", [1] * 50, max_new_tokens=4)
    driver.send("ok", [1, 2, 3], max_new_tokens=4, ignore_eos=True)
    driver.run()
    assert (driver.finish["big"].type, driver.finish["big"].status) == ("abort", 400)
    expect(driver, "ok", [1, 2, 3], max_new_tokens=4, ignore_eos=True)


def test_output_is_clipped_to_what_the_pool_holds() -> None:
    driver = Driver(max_total_num_tokens=30)
    driver.send("r", [1, 2, 3], max_new_tokens=90, ignore_eos=True)
    driver.run()
    expect(driver, "r", [1, 2, 3], max_new_tokens=27, ignore_eos=True)
    driver.assert_whole()


def test_two_ranks_with_the_same_input_make_the_same_batches() -> None:
    logs = []
    for _ in range(2):
        driver = Driver(max_total_num_tokens=80, prefill_tokens=7, policy="random", conservativeness=0.1)
        rng = random.Random(1)
        for i in range(20):
            driver.send(f"r{i}", [rng.randrange(3) for _ in range(rng.randrange(1, 20))], max_new_tokens=15)
            driver.turn()
        driver.run()
        logs.append(driver.log)
    assert logs[0] == logs[1]


def test_no_request_is_overtaken_for_ever() -> None:
    driver = Driver(max_running_requests=1, max_total_num_tokens=2000)
    shared_prefix = list(range(20))
    driver.send("warm", shared_prefix, max_new_tokens=1)
    driver.run()
    driver.send("lonely", [40, 41, 42], max_new_tokens=1)
    for i in range(200):
        driver.send(f"r{i}", [*shared_prefix, i % 40], max_new_tokens=1)
        driver.send(f"s{i}", [*shared_prefix, i % 40, 1], max_new_tokens=1)
        driver.turn()
    assert "lonely" in driver.finish


def counting(monkeypatch: pytest.MonkeyPatch, name: str) -> list[None]:
    """A list that grows by one with every call of the radix cache's method `name`."""
    calls: list[None] = []
    method = getattr(RadixCache, name)

    def call(*args: object) -> object:
        calls.append(None)
        return method(*args)

    monkeypatch.setattr(RadixCache, name, call)
    return calls


def test_a_step_looks_at_no_more_of_a_long_queue_than_of_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case C57, counted in look-ups of prompts instead of time."""
    lookups: list[int] = []
    for waiting in (2 * WINDOW, 5000):
        driver = Driver(max_running_requests=2, max_total_num_tokens=2000)
        driver.send("first", [1, 2, 3], max_new_tokens=1)
        driver.send("second", [1, 2, 4], max_new_tokens=50, ignore_eos=True)
        for i in range(waiting):
            driver.send(f"r{i}", [i % 40, i // 40 % 40, i // 1600], max_new_tokens=1)
        counted = [counting(monkeypatch, name) for name in ("match_length", "match_prefix")]
        for _ in range(3):
            driver.turn()
        monkeypatch.undo()
        lookups.append(sum(map(len, counted)))
    assert lookups[0] == lookups[1] > WINDOW


REQUEST = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(0, 2), min_size=1, max_size=30),
        "max_new_tokens": st.integers(1, 30),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.sampled_from([(), (11,), (EOS, 20)]),
        "stop": st.sampled_from([(), ("4",), ("9,13", "21")]),
        "min_new_tokens": st.integers(0, 3),
        "stream": st.booleans(),
        "turns": st.integers(0, 4),
        "abort": st.booleans(),
    }
)


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=14),
    capacity=st.integers(61, 200),
    running=st.integers(1, 6),
    chunk=st.sampled_from([None, 1, 4, 16]),
    policy=st.sampled_from(["lpm", "fcfs", "dfs-weight", "random"]),
    overlap=st.booleans(),
    cache=st.booleans(),
    conservativeness=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_any_mix_of_requests_gets_the_tokens_of_a_plain_loop(
    requests: list[dict[str, object]],
    capacity: int,
    running: int,
    chunk: int | None,
    policy: str,
    overlap: bool,
    cache: bool,
    conservativeness: float,
) -> None:
    driver = Driver(
        max_total_num_tokens=capacity,
        max_running_requests=running,
        prefill_tokens=chunk,
        policy=policy,
        overlap=overlap,
        use_radix_cache=cache,
        conservativeness=conservativeness,
    )
    for i, request in enumerate(requests):
        params = {k: v for k, v in request.items() if k not in ("prompt", "turns", "abort", "stream")}
        driver.send(f"r{i}", request["prompt"], bool(request["stream"]), **params)  # type: ignore[arg-type]
        for _ in range(int(request["turns"])):  # type: ignore[call-overload]
            driver.turn()
        if request["abort"]:
            driver.abort(f"r{i // 2}")
    driver.run()
    driver.assert_whole()
    assert len(driver.finish) == len(requests)
    for i, request in enumerate(requests):
        params = {k: v for k, v in request.items() if k not in ("prompt", "turns", "abort", "stream")}
        tokens, finish = reference(request["prompt"], SamplingParams(**params))  # type: ignore[arg-type]
        if driver.finish[f"r{i}"].type == "abort":
            assert driver.tokens[f"r{i}"] == tokens[: len(driver.tokens[f"r{i}"])]
        else:
            assert driver.tokens[f"r{i}"] == tokens
            assert driver.finish[f"r{i}"].type == finish
