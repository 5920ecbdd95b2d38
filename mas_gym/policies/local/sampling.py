"""Sample tokens from batches of logits; each row's draw is independent of the batch.

Randomness is counter-based: each row's uniform number is computed from (seed, step)
and not drawn from a stateful generator, so it does not depend on the other rows or
on when they joined.

Floating-point results depend slightly on the shape of the batch (about 1e-6 in
float32). `draw` therefore also reports the ambiguous rows, whose token could have
been changed by an error of that size; the caller recomputes them with a reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mas_gym.policies.base import MIN_TEMPERATURE

if TYPE_CHECKING:
    import torch

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_HEADS = (16, 256)


class Draws(NamedTuple):
    """One token per row.

    Attributes:
        tokens: ``[n]`` token ids.
        logprobs: ``[n]`` log-probabilities at temperature 1 and without top-p, in nats.
        doubtful: ``[n]`` whether the draw is ambiguous: an error within the tolerance could have changed the token.
    """

    tokens: Ints
    logprobs: Floats
    doubtful: Bools


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the output function of SplitMix64 (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: npt.NDArray[np.uint64], steps: Ints) -> Floats:
    """Return one uniform number in ``[0, 1)`` per row, a pure function of (seed, step).

    Args:
        seeds: ``[n]`` seeds.
        steps: ``[n]`` tokens generated so far in each row.
    """
    bits = _mix(_mix(seeds + _GOLDEN) + (steps.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw(logits: torch.Tensor, temperature: Floats, top_p: Floats, uniform: Floats, tolerance: float) -> Draws:
    """Sample one token per row by inverse CDF over the nucleus, ordered by token id.

    Args:
        logits: ``[n, V]`` finite floats on any device.
        temperature: ``[n]`` softmax temperatures; below `MIN_TEMPERATURE` the most likely token is taken.
        top_p: ``[n]`` nucleus masses in ``(0, 1]``: the smallest set of most likely tokens with at least this mass.
        uniform: ``[n]`` numbers in ``[0, 1)``.
        tolerance: Absolute error of a probability, and relative error between two, within which a draw is ambiguous.
    """
    import torch

    if logits.dtype != torch.float64:
        logits = logits.float()
    greedy = temperature < MIN_TEMPERATURE
    divisor = torch.from_numpy(np.where(greedy, 1.0, temperature)).to(logits)
    scaled = logits / divisor[:, None]
    total, plain = torch.logsumexp(scaled, dim=1), torch.logsumexp(logits, dim=1)
    limits = np.where(greedy, 0.0, np.where(top_p >= 1, np.inf, top_p))
    picked, doubtful = np.zeros(len(limits), dtype=np.int64), np.zeros(len(limits), dtype=np.bool_)
    rows = np.arange(len(limits))
    # A nucleus is nearly always small, and sorting the whole vocabulary is expensive.
    for head in (*(h for h in _HEADS if h < logits.shape[1]), logits.shape[1]):
        part = slice(None) if len(rows) == len(limits) else torch.from_numpy(rows).to(scaled.device)
        top, ids = torch.topk(scaled[part], head, dim=1)
        found = _pick(_numpy(top), _numpy(ids), _numpy(total)[rows], limits[rows], uniform[rows], tolerance)
        picked[rows], doubtful[rows] = found.ids, found.doubtful
        rows = rows[~found.covered]
        if not len(rows):
            break
    chosen = torch.from_numpy(picked).to(logits.device)
    logprobs = _numpy(logits.gather(1, chosen[:, None])[:, 0]) - _numpy(plain)
    return Draws(picked, logprobs, doubtful)


def _numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = tensor.cpu().numpy()
    return array.astype(np.float64) if array.dtype == np.float32 else array


class _Picked(NamedTuple):
    ids: Ints
    doubtful: Bools
    covered: Bools


def _pick(scaled: Floats, ids: Ints, total: Floats, top_p: Floats, uniform: Floats, tolerance: float) -> _Picked:
    """Return the chosen ids, the ambiguous rows, and the rows whose nucleus these candidates certainly contain.

    ``scaled`` and ``ids`` are ``[n, k]``, the most likely first; ``total`` is the log of the normaliser;
    ``top_p`` is 0 for the most likely token alone and infinite for every token.
    """
    p = np.exp(scaled - total[:, None])
    before = np.cumsum(p, axis=1) - p
    # Ordered by id, candidates of nearly equal probability, whose ranking is unstable, do not swap places on the line.
    order = np.argsort(ids, axis=1)
    nth = np.arange(p.shape[1])
    size = np.maximum((before < top_p[:, None]).sum(axis=1), 1)
    place, doubtful = _place(p, order, nth < size[:, None], uniform, tolerance)
    edge = np.abs(before - top_p[:, None])[:, 1:].min(axis=1, initial=np.inf) < tolerance
    rows = np.arange(len(p))
    following = np.minimum(size, p.shape[1] - 1)
    last = p[rows, size - 1]
    tie = (following == size) & (last - p[rows, following] < tolerance * last)
    # If three or more tie at the edge, any of them may be inside, so checking a single swap is not enough.
    doubtful |= tie & ((np.abs(p - last[:, None]) < tolerance * last[:, None]).sum(axis=1) > 2)
    for row in np.flatnonzero((edge | tie) & ~doubtful):
        one = slice(row, row + 1)
        swapped = (nth <= size[row]) & (nth != size[row] - 1)
        narrow, wide = (before[row] < top_p[row] + shift for shift in (-tolerance, tolerance))
        for kept in (swapped,) if tie[row] else (narrow, wide):
            other, close = _place(p[one], order[one], kept[None], uniform[one], tolerance)
            doubtful[row] |= close[0] or other[0] != place[row]
    # The last candidate must lie outside, or a missing one might belong to the nucleus or tie with its last member.
    return _Picked(ids[rows, place], doubtful, before[:, -1] - tolerance > top_p)


def _place(p: Floats, order: Ints, kept: Bools, uniform: Floats, tolerance: float) -> tuple[Ints, Bools]:
    """Return the column of the kept candidate that each number selects, and whether it is close to an edge."""
    rows = np.arange(len(p))
    mass = np.where(kept, p, 0.0)[rows[:, None], order]
    line = np.cumsum(mass, axis=1)
    whole = line[:, -1]
    target = uniform * whole
    # Rounding may put the target on the line's very end, beyond the last candidate with any mass.
    spot = np.minimum((line <= target[:, None]).sum(axis=1), (line < whole[:, None]).sum(axis=1))
    upper = line[rows, spot]
    lower = upper - mass[rows, spot]
    near_lower = (target - lower < tolerance) & (lower > tolerance)
    near_upper = (upper - target < tolerance) & (whole - upper > tolerance)
    return order[rows, spot], near_lower | near_upper
