"""A 64-bit mixing function: the one source of pseudo-randomness that is keyed, not stepped."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]


def mix64(x: UInt64Array) -> UInt64Array:
    """Bijection on uint64 in which every input bit moves about half of the output bits.

    Source: a step of SplitMix64, in Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators".
    """
    z: UInt64Array = x + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z
