"""Counter-based noise: what a row draws depends on its seed, its position and the token id, on nothing else.

A generator that is stepped would give a row other numbers with every change of its neighbours, of the stage
or of the number of ranks.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import torch

from shared.executor.mix64 import UInt64Array, mix64
from shared.messages import IntArray

# Multipliers of MurmurHash3's 32-bit finaliser, as int32: torch lacks uint32 arithmetic, int32 wraps alike.
_MULTIPLIER_1 = 0x85EBCA6B - 2**32
_MULTIPLIER_2 = 0xC2B2AE35 - 2**32


def row_keys(seed: UInt64Array, position: IntArray) -> npt.NDArray[np.int32]:
    """int32 `[rows, 2]` for rows that draw the token at `position` under `seed` (both `[rows]`)."""
    keys = mix64(mix64(seed) + position.astype(np.uint64))
    return keys.view(np.int32).reshape(-1, 2)


def exponential_noise(keys: torch.Tensor, ids: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """Independent Exp(1) draws, float32 above zero, one per row and token.

    `keys` is `[rows, 2]` on the wanted device; `ids` is int64 `[rows, n]`, or None for the whole vocabulary.
    A token's draw is the same in both.
    """
    hashed_ids = _hashed_ids(vocab_size, keys.device)
    bits = (hashed_ids if ids is None else hashed_ids[ids]) ^ keys[:, :1]
    bits *= keys[:, 1:] | 1
    _xor_shift_right(bits, 15)
    bits *= _MULTIPLIER_2
    _xor_shift_right(bits, 16)
    # The 31 bits left become a uniform in (0, 1) that is finest near zero, where a race is won.
    bits &= 0x7FFFFFFF
    uniform = bits.float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()


@functools.lru_cache(maxsize=4)
def _hashed_ids(vocab_size: int, device: torch.device) -> torch.Tensor:
    """int32 `[vocab]`: every id spread over 32 bits, so that a key need only be mixed in once."""
    bits = torch.arange(vocab_size, dtype=torch.int32, device=device)
    _xor_shift_right(bits, 16)
    bits *= _MULTIPLIER_1
    _xor_shift_right(bits, 13)
    bits *= _MULTIPLIER_2
    _xor_shift_right(bits, 16)
    return bits


def _xor_shift_right(bits: torch.Tensor, count: int) -> None:
    """`bits ^= bits >> count` in place, with the shift of an unsigned number."""
    bits ^= (bits >> count).bitwise_and_((1 << (32 - count)) - 1)
