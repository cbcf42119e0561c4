"""Writing float32 tensors to a safetensors file one at a time.

The safetensors library wants all tensors in memory at once and copies each; converting a model needs one at a
time.  The format is eight bytes of header length, a JSON header, and the data in the header's order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    produce: Callable[[str], NDArray[np.float32]],
) -> None:
    """Writes the tensors of `shapes`, in its order; `produce(name)` is called once for each.

    Raises ValueError when a produced tensor is not of the announced shape.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # keeps the data aligned
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for name, shape in shapes.items():
            tensor = produce(name)
            if tensor.shape != shape:
                raise ValueError(f"{name} has shape {tensor.shape}, not {shape}")
            file.write(np.ascontiguousarray(tensor, dtype="<f4").data)
