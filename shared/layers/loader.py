"""Reading one rank's share of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.weights.files import WeightFiles


@dataclass(frozen=True)
class WeightLoader:
    """Tensors of `files` in the dtype and on the device of the model; only the asked part is read."""

    files: WeightFiles
    dtype: torch.dtype
    device: torch.device

    def whole(self, name: str) -> Tensor:
        return self._place(self.files.get(name))

    def rows(self, name: str, part: range) -> Tensor:
        """Rows `part` of a matrix or a vector."""
        return self._place(self.files.get_slice(name)[part.start : part.stop])

    def columns(self, name: str, part: range) -> Tensor:
        """Columns `part` of a matrix."""
        return self._place(self.files.get_slice(name)[:, part.start : part.stop])

    def _place(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.dtype).contiguous()
