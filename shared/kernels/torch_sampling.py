"""Draws under top-k and top-p in torch: the CPU's, and the reference for the other backends."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shared.kernels.base import Limits
from shared.layers.noise import exponential_noise

CANDIDATES = 1024
"""How many of the likeliest tokens are sorted at first: enough for nearly every top-k and top-p."""
MASS_UNIT = 2.0**34
"""Probability mass is counted in whole parts of the likeliest token's, as many as a float64 adds up exactly over a
vocabulary of 2**19: so no order of adding, and no device, moves the border of top-p."""


class TorchSampling:
    """`shared.kernels.base.SamplingKernels` in torch operations."""

    def draw_limited(self, scores: Tensor, weights: Tensor, keys: Tensor, limits: Limits) -> Tensor:
        rows, vocab_size = scores.shape
        if scores.device.type != "cpu":  # where asking which rows need more would wait for the device
            best, ids, _ = _candidates(scores, weights, limits, vocab_size)
            return race(best, limits.min_p, exponential_noise(keys, ids, vocab_size), ids)
        tokens = torch.empty(rows, dtype=torch.int64)
        left = torch.arange(rows)
        for width in (min(CANDIDATES, vocab_size), vocab_size):
            if len(left):
                some = limits.at(left)
                best, ids, is_short = _candidates(scores[left], weights[left], some, width)
                noise = exponential_noise(keys[left], ids, vocab_size)
                tokens[left] = race(best, some.min_p, noise, ids)
                left = left[is_short]
        return tokens


def masses(weights: Tensor) -> Tensor:
    """`weights`, at most 1 each, as whole numbers of `1 / MASS_UNIT`, still float32."""
    return (weights * MASS_UNIT).floor_()


def race(weights: Tensor, min_p: Tensor, noise: Tensor, ids: Tensor | None = None) -> Tensor:
    """int64 `[rows]`: the winning token of each row, the lowest id of those that arrive together.

    `weights` are probabilities over the largest one, `[rows, n]`; `ids` are the tokens of their columns, None
    for the columns themselves; `min_p` is `[rows, 1]`.
    """
    speeds = weights.masked_fill(weights < min_p, 0).div_(noise)
    if ids is None:
        return speeds.argmax(dim=-1)
    is_behind = speeds < speeds.amax(dim=-1, keepdim=True)
    return ids.masked_fill(is_behind, torch.iinfo(torch.int64).max).amin(dim=-1)


def _candidates(scores: Tensor, weights: Tensor, limits: Limits, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weights (zero outside top-k and top-p) and ids of each row's `width` best, and which rows need more.

    The first two are `[rows, width]`, best first; the third is bool `[rows]`.
    """
    vocab_size = scores.shape[1]
    ids = best_first(scores, width)
    best = weights.gather(1, ids)
    best_masses = masses(best)
    reached = best_masses.cumsum(dim=-1, dtype=torch.float64)
    top_k, top_p = limits.top_k[:, None], limits.top_p[:, None]

    unlimited = top_k >= vocab_size
    whole = masses(weights).sum(dim=-1, keepdim=True, dtype=torch.float64)
    mass = torch.where(unlimited, whole, reached.gather(1, top_k.clamp(max=width) - 1))
    # A token is in while the mass before it falls short of p: the smallest set that reaches p.
    in_top_p = (reached - best_masses < mass * top_p).sum(dim=-1, keepdim=True)
    in_top_p.masked_fill_(top_p >= 1, width)
    kept = in_top_p.minimum(top_k).clamp_(min=1)
    best.masked_fill_(torch.arange(width, device=scores.device) >= kept, 0)
    short = (top_k > width) & ((in_top_p >= width) | ~unlimited)
    return best, ids, short[:, 0]


def best_first(scores: Tensor, count: int) -> Tensor:
    """int64 `[rows, count]`: columns of the largest float32 `scores`, largest first, ties by column."""
    # One int64 orders by both: the score's bits, made monotone, above the column counted backwards.
    bits = (scores + 0.0).view(torch.int32)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    keys <<= 32
    keys |= torch.arange(scores.shape[1] - 1, -1, -1, device=scores.device)
    if keys.device.type != "cpu":
        return keys.topk(count).indices
    # NumPy's vectorised sorts of plain integers take a third of the time of torch's, which carry indices.
    array = keys.numpy()
    if count < array.shape[1]:
        array.partition(array.shape[1] - count)
        array = array[:, -count:]
    array.sort()
    return torch.from_numpy(scores.shape[1] - 1 - (array[:, ::-1] & np.int64(0xFFFFFFFF)))
