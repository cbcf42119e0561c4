"""Tensor-parallel linear layers: columns first, rows second, one all-reduce for the pair."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.kernels.base import Kernels
from shared.layers.loader import WeightLoader
from shared.parallel.tp_group import TpGroup


class ColumnParallelLinear:
    """Linear layers over the same input, fused: this rank's output rows of each, one after the other."""

    def __init__(self, loader: WeightLoader, kernels: Kernels, rows_of: dict[str, range], has_bias: bool) -> None:
        """`rows_of` names the layers, in order, and this rank's rows of each."""
        weights = [loader.rows(f"{name}.weight", rows) for name, rows in rows_of.items()]
        biases = [loader.rows(f"{name}.bias", rows) for name, rows in rows_of.items() if has_bias]
        self._kernels = kernels
        self._packed = kernels.pack_linear(torch.cat(weights))
        self._bias = torch.cat(biases) if biases else None

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, in]` to `[T, sum of this rank's rows]`."""
        return self._kernels.linear(x, self._packed, self._bias)


class RowParallelLinear:
    """A linear layer of which each rank holds some input columns; partial results are summed over ranks."""

    def __init__(
        self,
        loader: WeightLoader,
        kernels: Kernels,
        tp_group: TpGroup,
        name: str,
        columns: range,
        has_bias: bool,
    ) -> None:
        self._kernels = kernels
        self._tp_group = tp_group
        self._packed = kernels.pack_linear(loader.columns(f"{name}.weight", columns))
        # One rank adds the bias, so that the sum holds it once.
        self._bias = loader.whole(f"{name}.bias") if has_bias and tp_group.rank == 0 else None

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, this rank's columns]` to `[T, out]`, complete on every rank."""
        return self._tp_group.all_reduce(self._kernels.linear(x, self._packed, self._bias))
