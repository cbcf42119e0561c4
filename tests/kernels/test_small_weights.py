"""Linear layers whose weights take less memory."""

from __future__ import annotations

import pytest
import torch

from shared.kernels.small_weights import LARGEST, MOST_INT8_ROWS, Float16Weights, Int8Weights

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of sums, relative to the sum of absolute values."""


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("rows", [1, MOST_INT8_ROWS, MOST_INT8_ROWS + 1, 100])
@pytest.mark.parametrize("has_bias", [True, False])
def test_an_output_is_off_by_no_more_than_half_a_step_of_each_weight(
    rows: int, has_bias: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 96, generator=generator).to(dtype)
    weight = (torch.randn(72, 96, generator=generator) * torch.logspace(-3, 2, 72)[:, None]).to(dtype)
    bias = torch.randn(72, generator=generator).to(dtype) if has_bias else None
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    kernels = Int8Weights()
    actual = kernels.linear(x, kernels.pack_linear(weight), bias).double()
    step = weight.double().abs().amax(dim=1) / LARGEST
    magnitude = x.double().abs() @ weight.double().abs().T + (0 if bias is None else bias.double().abs())
    allowed = x.double().abs().sum(dim=1)[:, None] * step / 2 + ROUNDING[dtype] * magnitude
    assert ((actual - exact).abs() <= allowed).all()
    assert not torch.equal(actual, exact), "nothing was rounded"


def test_an_output_without_weights_is_nothing() -> None:
    kernels = Int8Weights()
    packed = kernels.pack_linear(torch.zeros(16, 32))
    for rows in (1, 50):
        assert torch.equal(kernels.linear(torch.randn(rows, 32), packed, None), torch.zeros(rows, 16))


def test_a_weight_takes_a_byte() -> None:
    packed = Int8Weights().pack_linear(torch.randn(64, 32))
    assert packed.weight.dtype == torch.int8 and packed.weight.shape == (64, 32)
    assert packed.weight.abs().amax(dim=1).tolist() == [LARGEST] * 64


@pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="FBGEMM is for x86")
@pytest.mark.parametrize("rows", [1, 7, 100])
@pytest.mark.parametrize("has_bias", [True, False])
def test_float16_weights_round_weights_and_nothing_else(rows: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 96, generator=generator), torch.randn(200, 96, generator=generator)
    bias = torch.randn(200, generator=generator) if has_bias else None
    kernels = Float16Weights()
    actual = kernels.linear(x, kernels.pack_linear(weight), bias).double()
    rounded = x.double() @ weight.half().double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(actual, rounded, rtol=0, atol=1e-4)
    assert not torch.allclose(actual, rounded + x.double() @ (weight.double() - weight.half().double()).T, atol=1e-6)
