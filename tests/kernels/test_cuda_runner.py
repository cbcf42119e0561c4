"""Graphs and asynchronous results without a GPU: the logic of both, on a device that is always done at once.

The Triton backend computes, through its interpreter; a "graph" runs its function again over the same tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shared.executor import cuda_runner
from shared.executor.cuda_graphs import graph_sizes
from shared.executor.cuda_runner import CudaForward, CudaModelRunner
from shared.executor.forward_batch import ForwardBatch, ForwardMode, TokenCounts
from shared.layers.sampler import Sampled
from shared.parallel.tp_group import TpGroup
from shared.server_args import ServerArgs
from shared.weights.model_config import ModelConfig
from stage4_peer_schedulers.tp_worker_overlap_thread import FutureTokenMap
from tests.kernels import fake_cuda
from tests.kernels.conftest import DEVICE, HAS_TRITON
from tests.layers import test_sampler
from tests.models.tiny_models import CONTEXT_LENGTH, HandScheduler, make_runner, save_tiny_model
from tests.stage4.scripted import request, run

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed"),
    pytest.mark.skipif(DEVICE == "cuda", reason="with a GPU Triton compiles, and then cannot interpret as well"),
]

SLOTS = 400
PROMPTS = {0: [5, 9, 77, 120, 3], 1: [101, 7, 99], 2: [8]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_tiny_model("llama", folder)
    return folder


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[fake_cuda.FakeCapture]:
    """The captures that runners make."""
    made: list[fake_cuda.FakeCapture] = []

    def make() -> fake_cuda.FakeCapture:
        made.append(fake_cuda.FakeCapture())
        return made[-1]

    fake_cuda.install(monkeypatch)
    monkeypatch.setattr(cuda_runner, "GpuCapture", make)
    return made


def make_cuda_runner(folder: Path, **settings: Any) -> CudaModelRunner:
    args = ServerArgs(
        model_path=str(folder),
        **{"max_total_tokens": SLOTS, "attention_backend": "triton", "cuda_graph_max_bs": 4, **settings},
    )
    return CudaModelRunner(
        args, ModelConfig.from_folder(folder), TpGroup(0, 1), context_length=CONTEXT_LENGTH, max_running_requests=16
    )


def test_graph_sizes_are_close_where_padding_costs_and_end_at_the_most() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(3) == [1, 2, 3]
    assert graph_sizes(16) == [1, 2, 4, 8, 16]
    assert graph_sizes(70) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 70]


def test_a_padded_decode_gives_the_logits_of_an_eager_one(folder: Path, captures: list[fake_cuda.FakeCapture]) -> None:
    runner, reference = make_cuda_runner(folder), make_runner(folder)
    assert captures[0].captured == 3  # 1, 2 and 4
    runner.forward(HandScheduler(3).extend(PROMPTS))
    reference.forward(HandScheduler(3).extend(PROMPTS))
    scheduler = HandScheduler(3)
    scheduler.extend(PROMPTS)
    tokens = {0: [4], 1: [5], 2: [6]}
    for rows in ([0, 1, 2], [2, 0], [1]):
        batch = scheduler.extend({row: tokens[row] for row in rows}, ForwardMode.DECODE)
        graphs = runner._graphs
        assert graphs is not None
        logits = graphs.run(batch)
        assert logits is not None
        torch.testing.assert_close(logits, reference.forward(batch), rtol=0, atol=1e-4)
    assert captures[0].replayed == 3


def test_padding_touches_no_slot_of_a_request(folder: Path, captures: list[fake_cuda.FakeCapture]) -> None:
    runner = make_cuda_runner(folder)
    with torch.inference_mode():
        for pool in runner._pools:
            pool.fill_(7.0)
    scheduler = HandScheduler(3)
    runner.forward(scheduler.extend(PROMPTS))
    before = [pool.clone() for pool in runner._pools]
    batch = scheduler.extend({0: [4], 1: [5], 2: [6]}, ForwardMode.DECODE)
    runner.launch(batch)
    for pool, old in zip(runner._pools, before, strict=True):
        assert len(pool) == SLOTS + 1
        changed = {slot for slot in range(SLOTS) if not torch.equal(pool[slot], old[slot])}
        assert changed == set(batch.out_cache_loc.tolist())


def test_a_batch_that_no_graph_holds_and_a_prefill_run_eagerly(
    folder: Path, captures: list[fake_cuda.FakeCapture]
) -> None:
    runner = make_cuda_runner(folder, cuda_graph_max_bs=2)
    scheduler = HandScheduler(3)
    runner.launch(scheduler.extend(PROMPTS)).wait()
    runner.launch(scheduler.extend({0: [4], 1: [5], 2: [6]}, ForwardMode.DECODE)).wait()
    assert captures[0].replayed == 0
    runner.launch(scheduler.extend({0: [4], 1: [5]}, ForwardMode.DECODE)).wait()
    assert captures[0].replayed == 1


@pytest.mark.parametrize("settings", [{"disable_cuda_graph": True}, {"attention_backend": "torch"}])
def test_no_graphs_without_the_wish_or_a_backend_for_them(
    settings: dict[str, Any], folder: Path, captures: list[fake_cuda.FakeCapture]
) -> None:
    runner = make_cuda_runner(folder, **settings)
    assert not captures
    assert runner.launch(HandScheduler(1).extend({0: [5, 6]})).wait().next_token_ids.shape == (1,)


def test_tokens_of_a_launch_feed_the_next_before_anyone_has_seen_them(
    folder: Path, captures: list[fake_cuda.FakeCapture]
) -> None:
    runner, reference = make_cuda_runner(folder, disable_cuda_graph=True), make_runner(folder)
    future_tokens = FutureTokenMap(8, runner)
    scheduler, own = HandScheduler(2), HandScheduler(2)
    prompts = {0: [5, 9, 77], 1: [101, 7]}
    first = runner.launch(scheduler.extend(prompts))
    future_tokens.store(3, first.device_token_ids)
    batch = scheduler.extend({0: [-3], 1: [-4]}, ForwardMode.DECODE)
    batch.input_ids = future_tokens.resolve(batch.input_ids)
    assert isinstance(batch.input_ids, torch.Tensor)
    second = runner.launch(batch)

    expected = reference.launch(own.extend(prompts)).wait().next_token_ids.tolist()
    tokens = {row: [token] for row, token in enumerate(expected)}
    expected_next = reference.launch(own.extend(tokens, ForwardMode.DECODE)).wait().next_token_ids.tolist()
    assert not first.is_over
    assert second.wait().next_token_ids.tolist() == expected_next
    assert first.wait().next_token_ids.tolist() == expected


def test_ids_that_promise_nothing_stay_on_the_cpu(folder: Path, captures: list[fake_cuda.FakeCapture]) -> None:
    ids = np.array([4, 0, 9])
    assert FutureTokenMap(8, make_cuda_runner(folder, disable_cuda_graph=True)).resolve(ids) is ids


def counted(batch: ForwardBatch, counts: list[TokenCounts | None]) -> ForwardBatch:
    batch.sampling.counts = counts
    batch.sampling.any_adjustment = True
    return batch


def test_a_launch_with_penalties_waits_for_the_tokens_before_it(
    folder: Path, captures: list[fake_cuda.FakeCapture]
) -> None:
    runner = make_cuda_runner(folder, disable_cuda_graph=True)
    scheduler = HandScheduler(2)
    counts: list[TokenCounts | None] = [TokenCounts(130, np.array([5]), []), None]
    first = runner.launch(counted(scheduler.extend({0: [5], 1: [9]}), counts))
    assert counts[0] is not None and counts[0].output.sum() == 0
    plain = runner.launch(scheduler.extend({1: [3]}, ForwardMode.DECODE))
    assert not first.is_over
    runner.launch(counted(scheduler.extend({0: [4], 1: [3]}, ForwardMode.DECODE), counts))
    assert first.is_over and plain.is_over
    assert counts[0].output.sum() == 1


def test_a_result_is_waited_for_and_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda.install(monkeypatch)
    counts = TokenCounts(10, np.array([1]), [])
    batch = test_sampler.batch_of([test_sampler.row(counts=counts)], 10)
    pending = CudaForward(Sampled(torch.tensor([7]), torch.tensor([False]), None), batch)
    assert not pending.is_over and counts.output.sum() == 0
    assert pending.wait() is pending.wait()
    assert counts.output[7] == 1
    event: Any = pending._is_copied
    assert (event.recorded, event.waits) == (1, 1)


def test_triton_generates_the_tokens_of_torch() -> None:
    prompts = [[1, 40, 41, 42, 43], [1, 40, 41, 42, 77, 78]]
    answers = []
    for backend in ("torch", "triton"):
        requests = [request(f"r{i}", prompt, max_new_tokens=3, ignore_eos=True) for i, prompt in enumerate(prompts)]
        requests.append(request("drawn", prompts[0], max_new_tokens=3, ignore_eos=True, temperature=0.9, top_p=0.9))
        flags = {"attention_backend": backend, "sampling_backend": backend, "context_length": 64}
        answers.append(run({0: [*requests]}, overlap=True, max_total_tokens=200, **flags))
    expected, answered = ({rid: answer.ids for rid, answer in one.items()} for one in answers)
    assert answered == expected
    assert all(len(ids) == 3 for ids in answered.values())
