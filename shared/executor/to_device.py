"""Arrays of the scheduler, brought to the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """`array` as a tensor on `device`; on the CPU it is the same memory.

    To a GPU it goes through pinned memory and this returns at once: torch gives a pinned block to the next
    taker only when the copies from it are done.
    """
    return pinned(array, device).to(device, non_blocking=True)


def pinned(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """`array` as a tensor in memory from which copies to `device` do not wait; on the CPU the same memory."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory()
