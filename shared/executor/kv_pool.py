"""The tensors that hold keys and values, and how many token slots there is room for."""

from __future__ import annotations

import psutil
import torch
from torch import Tensor

from shared.server_args import ServerArgs

FEWEST_SLOTS = 8


def make_kv_pools(
    num_slots: int, num_layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """One pool per layer, `[num_slots, 2, kv_heads, head_dim]`: keys at index 0 of the second dimension."""
    shape = (num_slots, 2, kv_heads, head_dim)
    return [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]


def num_slots_that_fit(
    server_args: ServerArgs, most_useful: int, bytes_per_slot: int, local_ranks: int, device: torch.device
) -> int:
    """The token slots this rank has room for: `--max-total-tokens`, else what its share of free memory holds.

    On the CPU the `local_ranks` of a machine share its memory.  `most_useful` is what all running requests
    together could fill.  Raises ValueError where the memory holds next to nothing.
    """
    if server_args.max_total_tokens is not None:
        return server_args.max_total_tokens
    if device.type == "cuda":
        free_bytes = torch.cuda.mem_get_info(device)[0]
    else:
        free_bytes = psutil.virtual_memory().available // local_ranks
    fitting = int(free_bytes * server_args.mem_fraction_static) // bytes_per_slot
    if fitting < FEWEST_SLOTS:
        raise ValueError(
            f"{free_bytes >> 20} MiB of free memory hold {fitting} tokens of KV at --mem-fraction-static "
            f"{server_args.mem_fraction_static}; free some memory, raise it or take a smaller model"
        )
    return min(fitting, most_useful)
