"""The operations a model is made of, behind one interface (`base.Kernels`) with a backend per device.

`torch_backend` is the CPU's and the reference for the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shared.kernels.base import Kernels


def get_kernels(device: str) -> Kernels:
    """The backend for `device`.  Raises ValueError where there is none."""
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r} has no kernels")
    from shared.kernels.torch_backend import TorchKernels

    return TorchKernels()
