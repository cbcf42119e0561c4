"""Norms, RoPE, the activation, the KV store and the linear layer of every backend against float64."""

from __future__ import annotations

import pytest
import torch

from shared.kernels.base import Kernels
from tests.kernels.conftest import DEVICE, LLVM, LLVM_AVX2, TRITON, kernels_of, skip_unless_computes_in

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Relative: the last bits of each type (the interpreter cuts bfloat16 off where others round)."""
EPS = 1e-5
# Widths that do and do not fill a power of two, or a vector; rows enough for several threads.
SHAPES = [(1, 64), (5, 576), (3, 4096), (2, 100), (50, 576)]


@pytest.fixture(params=["torch", LLVM, LLVM_AVX2, TRITON])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    skip_unless_computes_in(request.node.callspec.params.get("dtype", torch.float32), request.param)
    return kernels_of(request.param)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    values = x.double()
    return values / (values.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(kernels: Kernels, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = random(*shape, dtype=dtype) * 3, random(shape[1], dtype=dtype, seed=1)
    before = x.clone()
    assert_close(kernels.rms_norm(x, weight, EPS), normed(before, weight))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_dim", [24, 64])
def test_rms_norm_of_heads_inside_a_fused_projection(kernels: Kernels, head_dim: int, dtype: torch.dtype) -> None:
    heads, weight = random(4, 9, head_dim, dtype=dtype), random(head_dim, dtype=dtype, seed=1)
    assert_close(kernels.rms_norm(heads[:, 2:7], weight, EPS), normed(heads[:, 2:7], weight))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm_adds_in_place(kernels: Kernels, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    weight = random(shape[1], dtype=dtype, seed=2)
    total = x.double() + residual.double()
    out = kernels.add_rms_norm(x, residual, weight, EPS)
    assert_close(residual, total)
    assert_close(out, normed(residual, weight))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_dim", [8, 24, 64, 128])
def test_rope_turns_the_halves_of_every_head_in_place(kernels: Kernels, head_dim: int, dtype: torch.dtype) -> None:
    heads = random(6, 9, head_dim, dtype=dtype)
    before = heads.clone()
    angles = torch.rand(6, 1, head_dim // 2, generator=torch.Generator().manual_seed(1)).to(DEVICE) * 6
    cos, sin = angles.cos(), angles.sin()
    kernels.rope(heads[:, :7], torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype))
    low, high = before[:, :7].double().chunk(2, dim=-1)
    cos, sin = cos.to(dtype).double(), sin.to(dtype).double()
    turned = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
    tolerance = 2 * TOLERANCE[dtype]  # of numbers up to 3, which may cancel
    torch.testing.assert_close(heads[:, :7].double(), turned, rtol=tolerance, atol=tolerance)
    assert torch.equal(heads[:, 7:], before[:, 7:])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (5, 200), (3, 2 * 1536)])
def test_silu_and_mul(kernels: Kernels, shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = random(*shape, dtype=dtype) * 4
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = gate.sigmoid() * gate * up
    tolerance = 2 * TOLERANCE[dtype]
    torch.testing.assert_close(kernels.silu_and_mul(gate_up).double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_store_kv_writes_the_given_slots_and_no_other(kernels: Kernels, dtype: torch.dtype) -> None:
    pool, heads = random(20, 2, 3, 24, dtype=dtype), random(5, 11, 24, dtype=dtype, seed=1)
    kv = heads[:, 5:].view(5, 2, 3, 24)
    expected = pool.clone()
    slots = torch.tensor([7, 0, 19, 3, 11], device=DEVICE)
    expected[slots] = kv
    kernels.store_kv(pool, slots, kv)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("rows", [1, 7, 100])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("outputs", [1, 72, 2080])
@pytest.mark.parametrize("inputs", [1, 96, 400])
def test_linear(kernels: Kernels, rows: int, has_bias: bool, outputs: int, inputs: int) -> None:
    x, weight = random(rows, inputs, dtype=torch.float32), random(outputs, inputs, dtype=torch.float32, seed=1)
    bias = random(outputs, dtype=torch.float32, seed=2) if has_bias else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    actual = kernels.linear(x, kernels.pack_linear(weight), bias)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-4)
