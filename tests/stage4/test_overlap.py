"""With overlap or without, every request is sent the same, once, and nothing of the extra step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from shared.messages import AbortReq, SchedulerInput
from shared.weights.prepare import prepare_model
from tests.stage4.scripted import Answer, Answers, ScriptedScheduler, request, run

pytestmark = pytest.mark.stages(4)

SIM = {"device": "sim", "sim_decode_ms": 0.0, "sim_prefill_us_per_token": 0.0}
CPU = {"device": "cpu", "max_total_tokens": 2000}
PROMPT = [1, 70, 80, 90, 100, 110, 120, 130, 140]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def seen(answers: Answers) -> dict[str, tuple[Any, ...]]:
    return {
        rid: (answer.ids, answer.finish, answer.prompt_tokens, answer.completion_tokens)
        for rid, answer in answers.items()
    }


def mixed_requests(count: int) -> dict[int, list[SchedulerInput]]:
    """Shared prefixes, greedy and seeded, streaming or not, arriving over time."""
    rng = np.random.default_rng(7)
    prefix = rng.integers(3, 290, 12).tolist()
    script: dict[int, list[SchedulerInput]] = {}
    for i in range(count):
        prompt = prefix[: int(rng.integers(1, 13))] + rng.integers(3, 290, int(rng.integers(1, 20))).tolist()
        one = request(
            f"r{i}",
            prompt,
            stream=bool(i % 3),
            max_new_tokens=int(rng.integers(1, 30)),
            temperature=float(i % 2),
            seed=i,
            stop_token_ids=tuple(rng.integers(3, 290, i % 4 * 5).tolist()),
        )
        script.setdefault(int(rng.integers(0, 40)), []).append(one)
    return script


@pytest.mark.parametrize(
    "flags",
    [
        {**SIM, "chunked_prefill_size": 8},
        {**SIM, "max_total_tokens": 120, "max_running_requests": 8, "schedule_conservativeness": 0.1},
        {**SIM, "disable_radix_cache": True, "stream_interval": 3},
        {**CPU, "chunked_prefill_size": 8},
    ],
    ids=["chunked", "small pool", "no cache", "model"],
)
def test_overlap_changes_nothing_that_a_user_can_see(flags: dict[str, Any]) -> None:
    count = 15 if flags["device"] == "cpu" else 60
    answers = {overlap: run(mixed_requests(count), overlap=overlap, **flags) for overlap in (True, False)}
    assert len(answers[True]) == count
    assert seen(answers[True]) == seen(answers[False])


def test_a_small_pool_forces_retraction_under_overlap() -> None:
    flags = {**SIM, "max_total_tokens": 120, "max_running_requests": 8, "schedule_conservativeness": 0.1}
    scheduler = ScriptedScheduler(mixed_requests(60), **flags)
    scheduler.run()
    assert scheduler.core.batcher.retractions > 0


@pytest.mark.parametrize("overlap", [True, False])
def test_the_next_batch_is_launched_before_a_result_is_processed(overlap: bool) -> None:
    script: dict[int, list[SchedulerInput]] = {0: [request("r", PROMPT, max_new_tokens=50, ignore_eos=True)]}
    scheduler = ScriptedScheduler(script, **SIM, disable_overlap_schedule=not overlap)
    scheduler.run()
    expected = [2] * 50 + [1] if overlap else [1] * 50
    assert scheduler.in_flight == expected


@pytest.mark.parametrize("overlap", [True, False])
def test_continuous_decode_steps_receive_only_between_groups_of_decodes(overlap: bool) -> None:
    class Counting(ScriptedScheduler):
        received = 0

        def recv_requests(self) -> list[SchedulerInput]:
            if self._decode_step == 0:
                self.received += 1
            return super().recv_requests()

    counts = []
    for steps in (1, 10):
        script: dict[int, list[SchedulerInput]] = {0: [request("r", PROMPT, max_new_tokens=61, ignore_eos=True)]}
        scheduler = Counting(script, **SIM, disable_overlap_schedule=not overlap, num_continuous_decode_steps=steps)
        scheduler.run()
        counts.append(scheduler.received)
    assert counts[0] >= 61 and counts[1] <= 10


def test_a_request_that_waits_to_decode_keeps_its_token_while_others_come_and_go() -> None:
    """The cells of the future-token map are used again long before this request gets to decode."""
    script: dict[int, list[SchedulerInput]] = {0: [request("long", PROMPT, max_new_tokens=5, ignore_eos=True)]}
    for turn in range(1, 40):
        script[turn] = [request(f"r{turn}", [5, 6, turn + 10], max_new_tokens=1)]
    flags = {**SIM, "max_running_requests": 3}
    assert seen(run(script, overlap=True, **flags)) == seen(run(script, overlap=False, **flags))


PENALTIES: dict[str, dict[str, Any]] = {
    "frequency": {"frequency_penalty": 2.0},
    "presence": {"presence_penalty": 2.0},
    "repetition": {"repetition_penalty": 1.3},
    "bias": {"logit_bias": ((70, 3.0), (71, -100.0), (72, 2.5))},
    "all": {"frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.1},
}


def plain_loop(model: Any, prompt: list[int], count: int, params: dict[str, Any]) -> list[int]:
    """Greedy generation that adjusts the logits anew after every token; whole context each time."""
    ids = list(prompt)
    for _ in range(count):
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1].double().numpy()
        for token, value in params.get("logit_bias", ()):
            logits[token] += value
        for token in set(ids):
            penalty = params.get("repetition_penalty", 1.0)
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        output = ids[len(prompt) :]
        for token in set(output):
            logits[token] -= params.get("frequency_penalty", 0.0) * output.count(token)
            logits[token] -= params.get("presence_penalty", 0.0)
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


def test_penalties_count_the_newest_token_once() -> None:
    """Case C46."""
    model = AutoModelForCausalLM.from_pretrained(prepare_model("tiny-random", show_progress=False), dtype=torch.float32)
    requests = [request(rid, PROMPT, max_new_tokens=64, ignore_eos=True, **params) for rid, params in PENALTIES.items()]
    expected = {rid: plain_loop(model, PROMPT, 64, params) for rid, params in PENALTIES.items()}
    for overlap in (True, False):
        answers = run({0: [*requests]}, overlap=overlap, **CPU)
        assert {rid: answer.ids for rid, answer in answers.items()} == expected


def solo_ids(count: int) -> list[int]:
    answers = run({0: [request("r", PROMPT, max_new_tokens=count, ignore_eos=True)]}, overlap=False, **CPU)
    return answers["r"].ids


@pytest.mark.parametrize("overlap", [True, False])
def test_min_tokens_holds_stop_tokens_back(overlap: bool) -> None:
    """Case C46: until five tokens are out, the first greedy token may not come; then it may."""
    first = solo_ids(1)[0]
    params: dict[str, Any] = {"min_new_tokens": 5, "stop_token_ids": (first,), "logit_bias": ((first, 100.0),)}
    answer = run({0: [request("r", PROMPT, max_new_tokens=20, **params)]}, overlap=overlap, **CPU)["r"]
    assert first not in answer.ids[:5]
    assert answer.ids[5:] == [first]
    assert answer.finish is not None and answer.finish.matched == first


def ending(answer: Answer) -> tuple[list[int], str, int | str | None]:
    assert answer.finish is not None
    return answer.ids, answer.finish.type, answer.finish.matched


@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_ends_at_its_token_and_nothing_follows(overlap: bool) -> None:
    """Case C47: by a stop token and by its limit at each of the first five tokens."""
    ids = solo_ids(5)
    script: dict[int, list[SchedulerInput]] = {
        0: [
            *(request(f"stop {k}", PROMPT, max_new_tokens=20, stop_token_ids=(ids[k],)) for k in range(5)),
            *(request(f"length {k}", PROMPT, max_new_tokens=k + 1) for k in range(5)),
        ]
    }
    answers = run(script, overlap=overlap, **CPU)
    for k, token in enumerate(ids):
        if token not in ids[:k]:
            assert ending(answers[f"stop {k}"]) == (ids[: k + 1], "stop", token)
        assert ending(answers[f"length {k}"]) == (ids[: k + 1], "length", None)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("turn", range(6))
def test_an_abort_in_a_chunked_prefill_is_answered_once(overlap: bool, turn: int) -> None:
    """Case C47: three requests share a prefill in chunks, and the third is cancelled midway."""
    prompts = {rid: [1, 50 + i, *range(60, 76)] for i, rid in enumerate("abc")}
    requests = [request(rid, prompt, max_new_tokens=6, ignore_eos=True) for rid, prompt in prompts.items()]
    flags = {**SIM, "chunked_prefill_size": 8}
    undisturbed = run({0: [*requests]}, overlap=overlap, **flags)
    answers = run({0: [*requests], turn + 1: [AbortReq("c")]}, overlap=overlap, **flags)
    finish = answers["c"].finish
    assert finish is not None and finish.type == "abort"
    for rid in "ab":
        assert answers[rid].ids == undisturbed[rid].ids


@pytest.mark.parametrize("overlap", [True, False])
def test_aborting_all_leaves_nothing_running(overlap: bool) -> None:
    script = mixed_requests(40)
    script[41] = [AbortReq(None)]
    answers = run(script, overlap=overlap, **{**SIM, "max_running_requests": 4})
    assert len(answers) == 40


def test_what_the_forward_thread_raises_ends_the_loop() -> None:
    class Broken(Exception):
        pass

    script: dict[int, list[SchedulerInput]] = {0: [request("r", PROMPT, max_new_tokens=50, ignore_eos=True)]}
    scheduler = ScriptedScheduler(script, **SIM)
    runner = scheduler.tp_worker.rank.runner
    launch = runner.launch

    def fail_in_time(batch: Any) -> Any:
        if batch.step == 7:
            raise Broken
        return launch(batch)

    runner.launch = fail_in_time  # type: ignore[method-assign]
    with pytest.raises(Broken):
        scheduler.run()


def busy_share(overlap: bool) -> float:
    """Of the time between the first and the last of some hundred decodes of 64 requests."""
    requests = [request(f"r{i}", [*PROMPT, i + 3], max_new_tokens=100, ignore_eos=True) for i in range(64)]
    scheduler = ScriptedScheduler(
        {0: [*requests]}, device="sim", sim_decode_ms=8.0, disable_overlap_schedule=not overlap
    )
    scheduler.run()
    share: float = scheduler.tp_worker.rank.runner.busy_share  # type: ignore[attr-defined]
    return share


def test_overlap_keeps_the_device_busy() -> None:
    """The best of some runs, since the machine may be busy with something else."""
    best = 0.0
    for _ in range(4):
        best = max(best, busy_share(overlap=True))
        if best >= 0.98:
            break
    assert best >= 0.98
    assert busy_share(overlap=False) < best
