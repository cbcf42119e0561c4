"""Attention of every backend that runs here against float64: ragged batches, slots in any order, GQA, windows.

Without a GPU Triton's kernels run through its interpreter, slowly: few cases are long.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.gpu_check.cases import TOLERANCE, Case, make_case, reference_attention
from shared.executor.forward_batch import ForwardMode
from shared.kernels.base import AttentionShape
from tests.kernels.conftest import DEVICE, LLVM, LLVM_AVX2, TRITON, kernels_of, skip_unless_computes_in

BACKENDS = ["torch", LLVM, LLVM_AVX2, TRITON]
MIXED = [(0, 5), (30, 1), (7, 40), (0, 1), (129, 2)]
DECODES = [(99, 1), (0, 1), (700, 1), (63, 1), (64, 1)]


def attend(backend: str, case: Case) -> torch.Tensor:
    kernels = kernels_of(backend)
    plan = kernels.plan_attention(case.batch, case.shape, case.pool)
    return kernels.attention(case.q, case.pool, plan).double().cpu()


def check(backend: str, case: Case) -> None:
    attended = attend(backend, case)
    torch.testing.assert_close(attended, reference_attention(case), rtol=0, atol=TOLERANCE[case.q.dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("requests", [MIXED, DECODES], ids=["extend", "decode"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_is_that_of_float64(
    backend: str, requests: list[tuple[int, int]], head_dim: int, dtype: torch.dtype
) -> None:
    skip_unless_computes_in(dtype, backend)
    check(backend, make_case(requests, AttentionShape(4, 2, head_dim, None), dtype, device=DEVICE))


@pytest.mark.parametrize("heads", [(1, 1), (6, 1), (6, 3), (4, 4), (18, 1)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_query_heads_find_their_kv_head(backend: str, heads: tuple[int, int]) -> None:
    for requests in ([(3, 1), (40, 1)], [(3, 4), (0, 2)]):
        check(backend, make_case(requests, AttentionShape(*heads, 64, None), torch.float32, device=DEVICE))


@pytest.mark.parametrize("window", [1, 11, 64, 65, 1000])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sliding_window_hides_what_lies_before_it(backend: str, window: int) -> None:
    for requests in (MIXED[1:4], DECODES[1:4]):
        check(backend, make_case(requests, AttentionShape(2, 1, 64, window), torch.float32, device=DEVICE))


@pytest.mark.parametrize("head_dim", [8, 24, 80, 256])
@pytest.mark.parametrize("backend", BACKENDS)
def test_heads_of_any_size(backend: str, head_dim: int) -> None:
    for requests in (MIXED[:2], DECODES[:2]):
        check(backend, make_case(requests, AttentionShape(4, 2, head_dim, None), torch.float32, device=DEVICE))


@pytest.mark.parametrize(
    ("requests", "window"),
    [([(3999, 1), (512, 1), (0, 1)], None), ([(3800, 200)], None), ([(2000, 2000)], 100)],
    ids=["decode", "extend", "window"],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_contexts_of_four_thousand_tokens(backend: str, requests: list[tuple[int, int]], window: int | None) -> None:
    check(backend, make_case(requests, AttentionShape(1, 1, 64, window), torch.float32, device=DEVICE))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_single_token_in_an_extend_gets_what_a_decode_gives_it(backend: str) -> None:
    shape = AttentionShape(4, 2, 64, None)
    decode = make_case(DECODES, shape, torch.float32, device=DEVICE)
    extend = make_case(DECODES, shape, torch.float32, device=DEVICE, mode=ForwardMode.EXTEND)
    torch.testing.assert_close(attend(backend, extend), attend(backend, decode), rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_one_layer_could_not_compute_is_not_carried_to_the_next(backend: str) -> None:
    case = make_case(DECODES, AttentionShape(4, 2, 64, None), torch.float32, device=DEVICE)
    kernels = kernels_of(backend)
    plan = kernels.plan_attention(case.batch, case.shape, case.pool)
    for ruined in (torch.nan, torch.inf):
        kernels.attention(torch.full_like(case.q, ruined), case.pool, plan)
        attended = kernels.attention(case.q, case.pool, plan).double().cpu()
        torch.testing.assert_close(attended, reference_attention(case), rtol=0, atol=TOLERANCE[torch.float32])


@pytest.mark.parametrize("backend", [LLVM, LLVM_AVX2, TRITON])
def test_a_decode_is_the_same_bits_alone_and_in_a_batch(backend: str) -> None:
    case = make_case(DECODES, AttentionShape(4, 2, 64, None), torch.float32, device=DEVICE)
    together = attend(backend, case)
    for row in range(len(DECODES)):
        batch = case.batch
        alone = Case(
            case.shape,
            type(batch)(
                **{
                    **{name: getattr(batch, name) for name in batch.__slots__},
                    "input_ids": batch.input_ids[row : row + 1],
                    "req_pool_indices": batch.req_pool_indices[row : row + 1],
                    "seq_lens": batch.seq_lens[row : row + 1],
                    "extend_lens": batch.extend_lens[row : row + 1],
                }
            ),
            case.q[row : row + 1],
            case.pool,
        )
        assert torch.equal(attend(backend, alone)[0], together[row])


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    requests=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 70)), min_size=1, max_size=4),
    decode=st.booleans(),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 3, 4]),
    head_dim=st.sampled_from([64, 128]),
    window=st.none() | st.integers(1, 100),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_batch_is_attended_as_in_float64(
    backend: str,
    requests: list[tuple[int, int]],
    decode: bool,
    kv_heads: int,
    group: int,
    head_dim: int,
    window: int | None,
    dtype: torch.dtype,
    seed: int,
) -> None:
    if backend.startswith("llvm"):
        dtype = torch.float32
    if decode:
        requests = [(before, 1) for before, _ in requests]
    shape = AttentionShape(kv_heads * group, kv_heads, head_dim, window)
    check(backend, make_case(requests, shape, dtype, seed, DEVICE))
