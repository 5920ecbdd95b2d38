"""Held-out splits of the benchmarks (paper, App. "Dataset splits")."""

from __future__ import annotations

import numpy as np

# ------------------------------------------------------------------ splits

SHUFFLE_SEED = 42


def shuffled(size: int) -> list[int]:
    """Return the numbers below ``size`` in the fixed shuffled order."""
    order: list[int] = np.random.default_rng(SHUFFLE_SEED).permutation(size).tolist()
    return order


def hold_out_dev(pool: list[int]) -> tuple[list[int], list[int]]:
    """Hold out the first 5% (rounded down) of the shuffled training pool as dev; the rest is train.

    Returns:
        The rows of train and of dev, both in shuffled order.

    >>> [len(part) for part in hold_out_dev(list(range(7473)))]
    [7100, 373]
    """
    order = [pool[place] for place in shuffled(len(pool))]
    held_out = len(order) // 20
    return order[held_out:], order[:held_out]


def hold_out_test(size: int, held_out: int) -> tuple[list[int], list[int]]:
    """Divide one shuffled dataset into ``held_out`` rows for evaluation and the training pool.

    Returns:
        The evaluation rows and the pool, both in shuffled order.
    """
    order = shuffled(size)
    return order[:held_out], order[held_out:]
