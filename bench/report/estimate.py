"""What several rounds say of one figure: a median and an interval, and whether two of them differ."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

FEWEST_FOR_BOOTSTRAP = 5
"""Rounds from which an interval is the bootstrap's; with fewer it is the smallest and the largest round."""


@dataclass(frozen=True)
class Estimate:
    """The median over `rounds` rounds; `low` and `high` bound it.  One round tells nothing of its own spread.

    `noise` is how much one round of this figure moves in the whole run: a standard deviation, relative to the mean.
    """

    median: float
    low: float
    high: float
    rounds: int
    noise: float = 0.0

    @staticmethod
    def of(values: Sequence[float], noise: float = 0.0) -> Estimate:
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
        return Estimate(statistics.median(values), float(low), float(high), len(values), noise)

    @property
    def error(self) -> float:
        """What the run's noise leaves uncertain of the median, in the figure's unit."""
        return self.noise * abs(self.median) / math.sqrt(self.rounds)


def pooled_noise(cases: Iterable[Sequence[float]]) -> float:
    """The relative standard deviation of one round, over all cases of a figure: few rounds of one case tell little.

    Cases of one round, and those whose mean is not positive, have no part in it; 0.0 where none is left.
    """
    squares, freedom = 0.0, 0
    for values in cases:
        mean = statistics.fmean(values)
        if len(values) > 1 and mean > 0:
            squares += sum((value / mean - 1) ** 2 for value in values)
            freedom += len(values) - 1
    return math.sqrt(squares / freedom) if freedom else 0.0


def differ(a: Estimate, b: Estimate) -> bool:
    """Whether the two are told apart: both have several rounds, their intervals are disjoint, and they are further
    apart than twice the error that the run's noise leaves to a difference (the intervals of two rounds of the very
    same thing are disjoint in one case of three).
    """
    disjoint = a.high < b.low or b.high < a.low
    return min(a.rounds, b.rounds) > 1 and disjoint and abs(a.median - b.median) > 2 * math.hypot(a.error, b.error)


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
