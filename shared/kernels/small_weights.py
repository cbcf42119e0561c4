"""Linear layers whose weights take less memory, for the CPU's backends: `--quantization`.

Activations stay in `--dtype`, so a request's tokens do not depend on what else is in its batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LARGEST = 127
MOST_INT8_ROWS = 4


class Float16Weights:
    """float16 weights, products and sums in float32 (FBGEMM): half the bytes to read for a relative error of 2^-11.

    Weights beyond the range of float16 are cut to it.
    """

    def pack_linear(self, weight: Tensor) -> Any:
        return torch.ops.quantized.linear_prepack_fp16(weight.float(), None)

    def linear(self, x: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
        product: Tensor = torch.ops.quantized.linear_dynamic_fp16(x.float(), packed).to(x.dtype)
        return product if bias is None else product.add_(bias)


@dataclass(frozen=True)
class _Int8Linear:
    weight: Tensor
    """int8 [out, in]"""
    scale: Tensor
    """[out]"""


class Int8Weights:
    """8-bit weights with a scale for each output, so that its largest weight is 127: a quarter of the memory.

    A rank of several scales the columns that it holds, so tokens may differ from one tensor-parallel size to another.
    """

    def pack_linear(self, weight: Tensor) -> Any:
        scale = (weight.float().abs().amax(dim=1) / LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
        rounded = (weight.float() / scale[:, None]).round_().to(torch.int8)
        return _Int8Linear(rounded, scale.to(weight.dtype))

    def linear(self, x: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
        # torch's own product with 8-bit weights is quick for a few rows of bfloat16 and for nothing else.
        if x.dtype == torch.bfloat16 and x.shape[0] <= MOST_INT8_ROWS:
            product = torch._weight_int8pack_mm(x.contiguous(), packed.weight, packed.scale)
        else:
            product = torch.mm(x, packed.weight.to(x.dtype).t()).mul_(packed.scale)
        return product if bias is None else product.add_(bias)
