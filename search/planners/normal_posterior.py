"""Sampling of normal distributions from their posterior, for Thompson sampling."""

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
