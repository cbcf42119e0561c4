"""The FlashInfer backend: on any machine against a model of the documented contract, on a GPU the real thing."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from bench.gpu_check.cases import TOLERANCE, make_batch, make_case, reference_attention
from shared.executor.forward_batch import ForwardMode
from shared.kernels.base import AttentionShape, GraphKernels
from shared.kernels.paged import paged_kv
from shared.layers.sampler import Sampler
from tests.kernels import fake_cuda, fake_flashinfer
from tests.kernels.conftest import DEVICE, HAS_TRITON
from tests.layers.test_sampler import batch_of, row

CPU = torch.device("cpu")
HALF = [torch.float16, torch.bfloat16]
REQUESTS = [[(0, 5), (30, 1), (7, 40)], [(99, 1), (0, 1), (70, 1)]]
SHAPES = [AttentionShape(4, 2, 64, None), AttentionShape(8, 1, 128, 11)]

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
on_gpu = pytest.mark.skipif(
    DEVICE == "cpu" or importlib.util.find_spec("flashinfer") is None, reason="needs a GPU and flashinfer"
)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the backend, standing on the fake FlashInfer."""
    fake_cuda.install(monkeypatch)
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer.as_module())
    sys.modules.pop("shared.kernels.flashinfer_backend", None)
    yield importlib.import_module("shared.kernels.flashinfer_backend")
    del sys.modules["shared.kernels.flashinfer_backend"]


def test_the_page_table_lists_every_request_s_slots_at_a_page_size_of_one() -> None:
    batch = make_batch([(0, 5), (30, 1), (7, 40)], 200, 0, ForwardMode.EXTEND)
    paged = paged_kv(batch)
    assert paged.qo_indptr.tolist() == [0, 5, 6, 46]
    assert paged.kv_indptr.tolist() == [0, 5, 36, 83]
    assert paged.last_page_len.tolist() == [1, 1, 1]
    for i, row_index in enumerate(batch.req_pool_indices):
        slots = paged.kv_indices[paged.kv_indptr[i] : paged.kv_indptr[i + 1]]
        assert np.array_equal(slots, batch.req_to_token[row_index, : batch.seq_lens[i]])
    for array in (paged.qo_indptr, paged.kv_indptr, paged.kv_indices, paged.last_page_len):
        assert array.dtype == np.int32


def test_padding_adds_requests_of_one_token_in_the_given_slot() -> None:
    paged = paged_kv(make_batch([(3, 1), (1, 1)], 50, 0, ForwardMode.DECODE))
    padded = paged.padded(4, 49)
    assert padded.kv_indptr.tolist() == [0, 4, 6, 7, 8]
    assert padded.qo_indptr.tolist() == [0, 1, 2, 3, 4]
    assert padded.kv_indices.tolist() == [*paged.kv_indices, 49, 49]
    assert paged.padded(2, 49).kv_indices.tolist() == paged.kv_indices.tolist()


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("requests", REQUESTS, ids=["extend", "decode"])
def test_plans_and_runs_keep_to_the_contract(
    backend: Any, requests: list[tuple[int, int]], shape: AttentionShape, dtype: torch.dtype
) -> None:
    case = make_case(requests, shape, dtype)
    kernels = backend.FlashInferKernels(CPU)
    out = kernels.attention(case.q, case.pool, kernels.plan_attention(case.batch, shape, case.pool))
    torch.testing.assert_close(out.double(), reference_attention(case), rtol=0, atol=TOLERANCE[dtype])


def test_a_plan_for_a_graph_is_refilled_in_place(backend: Any) -> None:
    shape = SHAPES[0]
    kernels = backend.FlashInferKernels(CPU)
    assert isinstance(kernels, GraphKernels)
    case = make_case([(20, 1), (0, 1), (3, 1)], shape, torch.float16)
    spare = len(case.pool) - 1
    case.pool[spare] = 0
    kv_indices = torch.full((4 * 60,), spare, dtype=torch.int32)
    plan = kernels.plan_for_graph(4, kv_indices, 60, shape, case.pool)
    paged = paged_kv(case.batch).padded(4, spare)
    kernels.refill(plan, paged)
    assert kv_indices[: len(paged.kv_indices)].tolist() == paged.kv_indices.tolist()
    out = kernels.attention(torch.cat([case.q, case.q[:1]]), case.pool, plan)
    torch.testing.assert_close(out[:3].double(), reference_attention(case), rtol=0, atol=TOLERANCE[torch.float16])


def test_a_plan_waits_for_the_copy_of_the_one_before(backend: Any) -> None:
    kernels = backend.FlashInferKernels(CPU)
    case = make_case([(5, 1)], SHAPES[0], torch.float16)
    for turn in range(1, 4):
        kernels.plan_attention(case.batch, case.shape, case.pool)
        assert (kernels._plan_is_copied.waits, kernels._plan_is_copied.recorded) == (turn, turn)


def test_draws_are_those_of_the_torch_backend_where_nothing_is_tied(backend: Any) -> None:
    logits = torch.randn(24, 700, generator=torch.Generator().manual_seed(2)) * 2
    kinds: list[dict[str, Any]] = [{"top_k": 9}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.8, "min_p": 0.02}, {}]
    batch = batch_of([row(**kinds[i % 4], seed=i) for i in range(24)], 700)
    expected = Sampler(importlib.import_module("shared.kernels.torch_sampling").TorchSampling())(logits, batch)
    drawn = Sampler(backend.FlashInferSampling())(logits, batch)
    assert drawn.next_token_ids.tolist() == expected.next_token_ids.tolist()


def test_norms_and_activation_are_called_as_documented(backend: Any) -> None:
    kernels = backend.FlashInferKernels(CPU)
    heads, weight = torch.randn(4, 9, 24), torch.randn(24)
    torch.testing.assert_close(
        kernels.rms_norm(heads[:, 2:7], weight, 1e-5), torch.nn.functional.rms_norm(heads[:, 2:7], (24,), weight, 1e-5)
    )
    x, residual = torch.randn(3, 24), torch.randn(3, 24)
    total = x + residual
    normed = kernels.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(total, (24,), weight, 1e-5))


@on_gpu
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("requests", REQUESTS, ids=["extend", "decode"])
def test_flashinfer_attends_as_in_float64(
    requests: list[tuple[int, int]], shape: AttentionShape, dtype: torch.dtype
) -> None:
    from shared.kernels.flashinfer_backend import FlashInferKernels

    case = make_case(requests, shape, dtype, device=DEVICE)
    kernels = FlashInferKernels(torch.device(DEVICE))
    out = kernels.attention(case.q, case.pool, kernels.plan_attention(case.batch, shape, case.pool))
    torch.testing.assert_close(out.double().cpu(), reference_attention(case), rtol=0, atol=TOLERANCE[dtype])
