"""Normal distributions for Thompson sampling: draws from a posterior, and expected excess over a level."""

from __future__ import annotations

import math
import random
from typing import NamedTuple


class NormalDraw(NamedTuple):
    """Mean and standard deviation of a normal distribution, sampled from their posterior."""

    mean: float
    deviation: float


def draw_normal(rng: random.Random, prior: float, spread: float, n: int, total: float, squares: float) -> NormalDraw:
    """Sample a normal distribution from the posterior under a normal-inverse-gamma prior worth one observation.

    Args:
        rng: The generator.
        prior: Prior mean.
        spread: Prior standard deviation.
        n: Number of observations.
        total: Their sum.
        squares: The sum of their squares.
    """
    mean = (prior + total) / (1 + n)
    deviation = squares - 2 * mean * total + n * mean * mean + (mean - prior) ** 2
    shape = (1 + n) / 2
    scale = (spread**2 + max(deviation, 0.0)) / 2
    variance = scale / max(rng.gammavariate(shape, 1.0), 1e-12)
    return NormalDraw(rng.gauss(mean, math.sqrt(variance / (1 + n))), math.sqrt(variance))


def expected_excess(mean: float, deviation: float, level: float) -> float:
    """Return E[max(X - level, 0)] for a normal X.

    >>> round(expected_excess(0.0, 1.0, 0.0), 4)
    0.3989
    """
    if deviation <= 0:
        return max(mean - level, 0.0)
    z = (mean - level) / deviation
    density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return deviation * (density + z * (1 + math.erf(z / math.sqrt(2))) / 2)
