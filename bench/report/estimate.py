"""What several rounds say of one figure: a median and an interval, and whether two of them differ."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FEWEST_FOR_BOOTSTRAP = 5
"""Rounds from which an interval is the bootstrap's; with fewer it is the smallest and the largest round."""


@dataclass(frozen=True)
class Estimate:
    """The median over `rounds` rounds; `low` and `high` bound it.  One round tells nothing of its own spread."""

    median: float
    low: float
    high: float
    rounds: int

    @staticmethod
    def of(values: Sequence[float]) -> Estimate:
        """Of one value per round; raises ValueError without any.

        The interval is the range of the rounds, or from five rounds on the bootstrap's 95 % interval of the median
        (percentiles of 2,000 resamples, seeded).
        """
        if not values:
            raise ValueError("no round has this figure")
        low, high = min(values), max(values)
        if len(values) >= FEWEST_FOR_BOOTSTRAP:
            picks = np.random.default_rng(0).integers(0, len(values), (2000, len(values)))
            low, high = np.percentile(np.median(np.asarray(values)[picks], axis=1), (2.5, 97.5))
        return Estimate(statistics.median(values), float(low), float(high), len(values))


def differ(a: Estimate, b: Estimate) -> bool:
    """Whether the two are further apart than their rounds are: both have a spread, and the intervals are disjoint."""
    return min(a.rounds, b.rounds) > 1 and (a.high < b.low or b.high < a.low)


def verdict(a: Estimate, b: Estimate) -> str:
    """What is to be said of `b` against `a`, in words."""
    if min(a.rounds, b.rounds) < 2:
        return "one round only: no telling from noise"
    if not differ(a, b):
        return "no difference beyond the noise"
    return "more" if b.median > a.median else "less"


def number(value: float) -> str:
    """Three digits that count, and no exponent: `0.0412`, `1.25`, `35.1`, `1,490`."""
    if value == 0:
        return "0"
    digits = max(0, 2 - int(np.floor(np.log10(abs(value)))))
    return f"{value:,.{min(digits, 4)}f}"


def shown(estimate: Estimate | None) -> str:
    """`median (low-high)`; a dash where nothing was measured."""
    if estimate is None:
        return "–"
    if estimate.rounds == 1:
        return number(estimate.median)
    return f"{number(estimate.median)} ({number(estimate.low)}–{number(estimate.high)})"
