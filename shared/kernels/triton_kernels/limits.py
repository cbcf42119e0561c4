"""Top-k and top-p without sorting: the border of what is kept is found bit by bit."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _orders(scores, row, column, vocab_size):
    """int64 that order as the float32 scores do, 0 to 2**32 - 1; -1 beyond the vocabulary."""
    inside = column < vocab_size
    values = tl.load(scores + row * vocab_size + column, mask=inside, other=0.0) + 0.0
    bits = values.to(tl.int32, bitcast=True)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648
    return tl.where(inside, order, -1)


@triton.jit
def _reached(scores, masses, row, vocab_size, border, BLOCK: tl.constexpr):
    """How many tokens stand at `border` or above, and their mass (in a float64 that holds whole numbers)."""
    count = tl.zeros([], tl.int64)
    mass = tl.zeros([], tl.float64)
    for first in range(0, vocab_size, BLOCK):
        column = first + tl.arange(0, BLOCK)
        above = _orders(scores, row, column, vocab_size) >= border
        count += tl.sum(above.to(tl.int64), axis=0)
        mass += tl.sum(tl.load(masses + row * vocab_size + column, mask=above, other=0.0).to(tl.float64), axis=0)
    return count, mass


@triton.jit
def limit(scores, masses, weights, top_k, top_p, vocab_size, BLOCK: tl.constexpr):
    """Program (row): zeroes in `weights` what top-k and then top-p leave out, ties cut by column.

    `masses` are whole numbers in float32 whose sums stay below 2**53, so that no order of adding changes them.
    `border` ends as the smallest order kept, `ties` as how many of those that have it; a border of 0, which no
    number has, is one that was not looked for.
    """
    row = tl.program_id(0).to(tl.int64)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)

    border = tl.zeros([], tl.int64)
    for bit in range(tl.where(k < vocab_size, 32, 0)):
        raised = border | (tl.full([], 2147483648, tl.int64) >> bit)
        count, _ = _reached(scores, masses, row, vocab_size, raised, BLOCK)
        border = tl.where(count >= k, raised, border)
    above, mass_above = _reached(scores, masses, row, vocab_size, border + 1, BLOCK)
    count, mass = _reached(scores, masses, row, vocab_size, border, BLOCK)
    ties = k - above
    mass_of_one = (mass - mass_above) / tl.maximum(count - above, 1).to(tl.float64)
    target = (mass_above + ties.to(tl.float64) * mass_of_one) * p

    top_p_border = tl.zeros([], tl.int64)
    for bit in range(tl.where(p < 1.0, 32, 0)):
        raised = top_p_border | (tl.full([], 2147483648, tl.int64) >> bit)
        _, mass = _reached(scores, masses, row, vocab_size, raised, BLOCK)
        top_p_border = tl.where(mass >= target, raised, top_p_border)
    above, mass_above = _reached(scores, masses, row, vocab_size, top_p_border + 1, BLOCK)
    count, mass = _reached(scores, masses, row, vocab_size, top_p_border, BLOCK)
    # No mass only where p is no limit, and top-k's border the higher one.
    mass_of_one = tl.maximum(mass - mass_above, 1.0) / tl.maximum(count - above, 1).to(tl.float64)
    # The smallest whole number of ties that reaches the target; only the division can be off, by one.
    needed = tl.ceil((target - mass_above) / mass_of_one)
    needed = tl.where(mass_above + (needed - 1) * mass_of_one >= target, needed - 1, needed)
    needed = tl.where(mass_above + needed * mass_of_one < target, needed + 1, needed).to(tl.int64)
    ties = tl.where(top_p_border > border, needed, tl.where(top_p_border == border, tl.minimum(ties, needed), ties))
    border = tl.maximum(border, top_p_border)

    tied_before = tl.zeros([], tl.int64)
    for first in range(0, vocab_size, BLOCK):
        column = first + tl.arange(0, BLOCK)
        order = _orders(scores, row, column, vocab_size)
        is_tie = (order == border).to(tl.int64)
        is_kept = (order > border) | ((order == border) & (tied_before + tl.cumsum(is_tie, axis=0) <= ties))
        tl.store(weights + row * vocab_size + column, 0.0, mask=(order >= 0) & ~is_kept)
        tied_before += tl.sum(is_tie, axis=0)
