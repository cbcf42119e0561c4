"""What the LLVM backend adds to its interface: products of any size, sums that no neighbour changes, its threads."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.conftest import LLVM, LLVM_AVX2, kernels_of

pytest.importorskip("llvmlite")

BOTH = pytest.mark.parametrize("backend", [LLVM, LLVM_AVX2])


@BOTH
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 110),
    inputs=st.integers(1, 450),
    outputs=st.integers(1, 200),
    has_bias=st.booleans(),
    unused=st.integers(0, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_products_of_any_size(
    backend: str, rows: int, inputs: int, outputs: int, has_bias: bool, unused: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs + unused, generator=generator)[:, :inputs]
    weight, bias = torch.randn(outputs, inputs, generator=generator), torch.randn(outputs, generator=generator)
    kernels = kernels_of(backend)
    actual = kernels.linear(x, kernels.pack_linear(weight), bias if has_bias else None)
    assert actual.shape == (rows, outputs) and actual.is_contiguous()
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    magnitude = x.double().abs() @ weight.double().abs().T + 1
    assert ((actual - expected).abs() <= 1e-6 * magnitude).all()


@BOTH
def test_a_row_is_the_same_bits_alone_and_among_others(backend: str) -> None:
    kernels = kernels_of(backend)
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(100, 400, generator=generator), torch.randn(203, 400, generator=generator)
    packed = kernels.pack_linear(weight)
    together = kernels.linear(x, packed, None)
    for row in (0, 7, 8, 95, 96, 99):
        assert torch.equal(kernels.linear(x[row : row + 1], packed, None)[0], together[row])


@BOTH
def test_what_is_not_a_number_stays_in_its_row(backend: str) -> None:
    kernels = kernels_of(backend)
    x = torch.randn(9, 64)
    weight = torch.randn(130, 64)
    packed = kernels.pack_linear(weight)
    whole = kernels.linear(x, packed, None)
    for ruined in (torch.nan, torch.inf):
        x[4, 10] = ruined
        product = kernels.linear(x, packed, None)
        assert not product[4].isfinite().any()
        assert torch.equal(product[[0, 3, 5, 8]], whole[[0, 3, 5, 8]])


@BOTH
def test_activation_far_from_zero(backend: str) -> None:
    gate = torch.tensor([-1e30, -200.0, -88.0, -87.0, -20.0, 0.0, 20.0, 88.0, 200.0, 1e30, torch.nan] + [0.0] * 5)
    product = kernels_of(backend).silu_and_mul(torch.cat([gate, torch.ones(16)])[None])[0]
    expected = torch.nn.functional.silu(gate.double())
    torch.testing.assert_close(product.double(), expected, rtol=2e-6, atol=1e-7, equal_nan=True)


FEW_THREADS = """
import torch
torch.set_num_threads(4)
from bench.gpu_check.cases import make_case, reference_attention
from shared.kernels.base import AttentionShape
from shared.kernels.llvm_backend import LlvmKernels
kernels = LlvmKernels()
case = make_case([(700, 1), (30, 1), (99, 1)], AttentionShape(6, 3, 64, None), torch.float32)
attended = kernels.attention(case.q, case.pool, kernels.plan_attention(case.batch, case.shape, case.pool))
torch.testing.assert_close(attended.double(), reference_attention(case), rtol=0, atol=2e-5)
x, weight = torch.randn(100, 300), torch.randn(500, 300)
product = kernels.linear(x, kernels.pack_linear(weight), None)
torch.testing.assert_close(product.double(), x.double() @ weight.double().T, rtol=0, atol=1e-3)
"""


@pytest.mark.parametrize("limit", ["1", "3"])
@pytest.mark.parametrize("backend", [LLVM])
def test_a_team_may_be_smaller_than_asked_for(backend: str, limit: str) -> None:
    environment = {**os.environ, "OMP_THREAD_LIMIT": limit}
    subprocess.run([sys.executable, "-c", FEW_THREADS], env=environment, check=True, timeout=120)
