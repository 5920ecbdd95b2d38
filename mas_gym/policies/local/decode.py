"""Continuous batching on any attention-only transformers causal LM.

A prompt is encoded once for all of its samples. Rows leave the batch when they finish, and
waiting rows take their place. Log-probabilities are computed from the same logits as
the samples. Randomness is counter-based: a row's uniform number is computed from (seed,
step), not drawn from a stateful generator, so it does not depend on other rows or on the
time at which the row joined.

**Same request, same reply.** A float32 forward pass depends slightly on the shape of
the batch (about 1e-6 in a log-probability), so a draw within that distance of a boundary
could select a different token. With ``exact``, such draws are recomputed with a reference:
the same row alone, unpadded, in float64. The same applies to sums of log-probabilities that
are this close to a rounding boundary. A reply then depends only on its request, and not on the
other rows, their order, the concurrency or the number of threads, as long as the error is
within the tolerances below.

Without ``exact`` (bfloat16, float16, large models, or models that cannot run in
float64), replies have the same distribution, but a sample may occasionally change
with the other rows of its batch. Decoding one request at a time (``max_batch=1``,
``prefix_megabytes=0``) reproduces replies on the same machine.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from mas_gym.policies.base import MIN_TEMPERATURE, Certainty, SamplingRequest
from mas_gym.policies.local.forward import CausalModel
from mas_gym.policies.local.prefix_store import PrefixStore
from mas_gym.policies.local.slots import Slots

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_HEADS = (16, 256)
_CACHED_VALUES = 1 << 18
_STRIDE = 64


class Draws(NamedTuple):
    """One token per row.

    Attributes:
        tokens: ``[n]`` token ids.
        logprobs: ``[n]`` log-probabilities at temperature 1 and without top-p, in nats.
        doubtful: ``[n]`` whether the draw is ambiguous: an error within the tolerance could have changed the token.
        entropy: ``[n]`` entropy of the distribution at temperature 1, in nats.
        self_certainty: ``[n]`` KL divergence of the uniform distribution from this distribution, in nats.
    """

    tokens: Ints
    logprobs: Floats
    doubtful: Bools
    entropy: Floats
    self_certainty: Floats


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the output function of SplitMix64 (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: npt.NDArray[np.uint64], steps: Ints) -> Floats:
    """Return one uniform number in ``[0, 1)`` per row, a pure function of (seed, step).

    Args:
        seeds: ``[n]`` seeds.
        steps: ``[n]`` number of tokens generated so far in each row.
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
        tolerance: Absolute error of one probability, or relative difference of two, below which a draw is ambiguous.
    """
    greedy = temperature < MIN_TEMPERATURE
    divisor = np.where(greedy, 1.0, temperature)
    limits = np.where(greedy, 0.0, np.where(top_p >= 1, np.inf, top_p))
    heads = [*(head for head in _HEADS if head < logits.shape[1]), logits.shape[1]]
    total, plain, entropy, certainty = _by_block(_totals, logits, torch.from_numpy(divisor))
    picked, logprobs = np.zeros(len(limits), dtype=np.int64), np.zeros(len(limits))
    doubtful, left = np.zeros(len(limits), dtype=np.bool_), np.arange(len(limits))
    # A nucleus is nearly always small, and sorting the whole vocabulary is expensive.
    for head in heads:
        uncovered, at_once = [], _rows_at_once(logits, head)
        for start in range(0, len(left), at_once):
            rows = left[start : start + at_once]
            part = logits if len(rows) == len(limits) else logits[torch.from_numpy(rows).to(logits.device)]
            top, ids = _by_block(partial(_largest, count=head), part)
            candidates = top / divisor[rows, None], ids, total[rows]
            place, doubtful[rows], covered = _pick(*candidates, limits[rows], uniform[rows], tolerance)
            each = np.arange(len(rows)), place
            picked[rows], logprobs[rows] = ids[each], top[each] - plain[rows]
            uncovered.append(rows[~covered])
        left = np.concatenate(uncovered)
        if not len(left):
            break
    return Draws(picked, logprobs, doubtful, entropy, certainty)


def _rows_at_once(logits: torch.Tensor, values: int) -> int:
    """Return how many rows of so many values fit the cache of a processor; all rows on a GPU."""
    return max(1, _CACHED_VALUES // values) if logits.device.type == "cpu" else len(logits)


def _by_block(
    work: Callable[..., tuple[torch.Tensor, ...]], logits: torch.Tensor, *more: torch.Tensor
) -> list[npt.NDArray[Any]]:
    """Return the results of ``work`` for all rows; on a CPU, it gets rows of large vocabularies that fit the cache."""
    rows, found = _rows_at_once(logits, logits.shape[1]), []
    for start in range(0, len(logits), rows):
        block = logits[start : start + rows]
        block = block if block.dtype == torch.float64 else block.float()
        found.append([_numpy(one) for one in work(block, *(one[start : start + rows].to(block) for one in more))])
    return [np.concatenate(parts) for parts in zip(*found, strict=True)]


def _totals(logits: torch.Tensor, divisor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the logs of the normalizers, with and without temperature, the entropy and the self-certainty."""
    plain = torch.logsumexp(logits, dim=1)
    return torch.logsumexp(logits / divisor[:, None], dim=1), plain, *spread(logits, plain)


def _largest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest logits of each row and their token ids, the largest first.

    The ``count`` largest logits are in the ``count`` spans of `_STRIDE` tokens with the largest maxima. For few of many
    logits on a CPU, it is several times faster to sort these spans than to call `torch.topk` on all logits.
    """
    spans = logits.shape[1] // _STRIDE
    if spans <= 2 * count:
        return tuple(torch.topk(logits, count, dim=1))
    within = torch.arange(_STRIDE, device=logits.device)
    leading = torch.topk(logits[:, : spans * _STRIDE].unflatten(1, (spans, _STRIDE)).amax(2), count, dim=1).indices
    rest = torch.arange(spans * _STRIDE, logits.shape[1], device=logits.device).expand(len(logits), -1)
    ids = torch.cat(((leading[:, :, None] * _STRIDE + within).flatten(1), rest), dim=1)
    top, places = torch.topk(logits.gather(1, ids), count, dim=1)
    return top, ids.gather(1, places)


def spread(logits: torch.Tensor, total: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the entropy and the self-certainty of the distributions of ``[n, V]`` logits, in nats, each ``[n]``.

    Self-certainty is ``-mean_j log(V p_j)``, the KL divergence of the uniform distribution from ``p``.

    Args:
        logits: Finite floats.
        total: Their ``logsumexp``, if it is known.
    """
    total = torch.logsumexp(logits, dim=1) if total is None else total
    share = (logits - total[:, None]).exp_()
    entropy = total - torch.linalg.vecdot(share, logits)
    if entropy.isnan().any():
        # Excluded tokens have logits of minus infinity, which times their probability of 0 is not a number.
        entropy = total - torch.linalg.vecdot(share, logits.clamp(min=torch.finfo(logits.dtype).min))
    return entropy.clamp(min=0), (total - logits.mean(dim=1) - math.log(logits.shape[1])).clamp(min=0)


def _numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = tensor.cpu().numpy()
    return array.astype(np.float64) if array.dtype == np.float32 else array


def _pick(
    scaled: Floats, ids: Ints, total: Floats, top_p: Floats, uniform: Floats, tolerance: float
) -> tuple[Ints, Bools, Bools]:
    """Return the chosen columns, which draws are ambiguous, and which rows have their whole nucleus here.

    ``scaled`` and ``ids`` are ``[n, k]`` with the most likely token first; ``total`` is the log of the normalizer.
    If ``top_p`` is 0, only the most likely token is kept; if it is infinite, every token is kept.
    """
    p = np.exp(scaled - total[:, None])
    before = np.cumsum(p, axis=1) - p
    # The order by id is stable, unlike the ranking of candidates with nearly equal probabilities.
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
    return place, doubtful, before[:, -1] - tolerance > top_p


def _place(p: Floats, order: Ints, kept: Bools, uniform: Floats, tolerance: float) -> tuple[Ints, Bools]:
    """Return the column of the kept candidate that each number selects, and whether the number is close to an edge."""
    rows = np.arange(len(p))
    mass = np.where(kept, p, 0.0)[rows[:, None], order]
    line = np.cumsum(mass, axis=1)
    whole = line[:, -1]
    target = uniform * whole
    # Rounding may put the target at the end of the line, beyond the last candidate with any mass.
    spot = np.minimum((line <= target[:, None]).sum(axis=1), (line < whole[:, None]).sum(axis=1))
    upper = line[rows, spot]
    lower = upper - mass[rows, spot]
    near_lower = (target - lower < tolerance) & (lower > tolerance)
    near_upper = (upper - target < tolerance) & (whole - upper > tolerance)
    return order[rows, spot], near_lower | near_upper


GLOBAL_CAP = 1024
"""Token limit of every message; higher limits in requests are lowered to it (paper, released settings)."""

LOGPROB_GRID = 2.0**-6
"""With ``exact``, log-probabilities of messages are rounded to multiples of this (nats)."""

TOKEN_GRID = 2.0**-8
"""With ``exact``, log-probabilities of single tokens in traces are rounded to multiples of this (nats)."""

# Grids for the sums of log-probability, entropy and self-certainty, and for the least log-probability.
_GRIDS = np.array([LOGPROB_GRID, 4 * LOGPROB_GRID, 4 * LOGPROB_GRID, LOGPROB_GRID])
_REASONS = ("", "stop", "length", "error")
_TOLERANCE = 5e-5
_LOGPROB_TOLERANCE = 2e-6


class DecodedSample(NamedTuple):
    """A sample's tokens (end token included), their summed log-probability, its finish reason and its certainty.

    ``finish_reason`` is ``"error"`` if the model's logits are not finite. ``each`` has the log-probability of each
    token if the request is traced.
    """

    tokens: list[int]
    logprob: float
    finish_reason: str
    certainty: Certainty
    each: tuple[float, ...] = ()


@dataclass(eq=False, slots=True)
class DecodingJob:
    """One open request: its prompt's ids, its token limit, and the samples finished so far."""

    key: Hashable
    request: SamplingRequest
    prompt: list[int]
    cap: int
    dropped: int
    written: list[DecodedSample | None] = field(default_factory=list)
    missing: int = 0


class Decoder:
    """A running batch: `submit` jobs, then `step` until they are returned."""

    def __init__(
        self,
        model: CausalModel,
        rows: int,
        ends: frozenset[int],
        prefixes: PrefixStore | None = None,
    ) -> None:
        """Allow up to ``rows`` samples; a token in ``ends`` ends a sample; ``prefixes`` holds encoded prompts."""
        self._model, self._rows = model, rows
        self._ends = np.array(sorted(ends), dtype=np.int64)
        self._slots = Slots(rows, model.sizes.growth)
        self._prefixes = prefixes
        self._waiting: deque[list[tuple[DecodingJob, int]]] = deque()
        self._running: list[tuple[DecodingJob, int]] = []
        self._tokens = np.zeros((rows, GLOBAL_CAP), dtype=np.int64)
        self._count, self._caps = np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=np.int64)
        self._seeds = np.zeros(rows, dtype=np.uint64)
        self._temperature, self._top_p = np.zeros(rows), np.zeros(rows)
        # Per row, sums over its tokens of log-probability, entropy and self-certainty, and the least log-probability.
        self._sums, self._least = np.zeros((rows, 3)), np.zeros(rows)
        self._each = np.zeros((rows, GLOBAL_CAP))

    def submit(self, job: DecodingJob) -> None:
        """Queue every sample of a job."""
        job.missing = len(job.request.seeds)
        job.written = [None] * job.missing
        samples = [(job, index) for index in range(job.missing)]
        self._waiting.extend(samples[i : i + self._rows] for i in range(0, len(samples), self._rows))

    def step(self) -> list[DecodingJob]:
        """Encode waiting prompts if enough rows are free, else decode one token per row; return finished jobs."""
        with torch.inference_mode():
            groups = self._fitting()
            # A small prefill costs about as much overhead as a decode step, so waiting prompts are collected first.
            if groups and sum(map(len, groups)) >= len(self._running) // 8:
                for _ in groups:
                    self._waiting.popleft()
                return self._admit(groups)
            if not self._running:
                return []
            n = len(self._running)
            newest = self._tokens[np.arange(n), self._count[:n] - 1]
            logits = self._model.decode(newest, self._slots)
            return self._write(np.arange(n), logits)

    def _fitting(self) -> list[list[tuple[DecodingJob, int]]]:
        """Return the oldest waiting groups that fit into the free rows; a group shares one prompt."""
        groups: list[list[tuple[DecodingJob, int]]] = []
        free = self._rows - len(self._running)
        for group in self._waiting:
            free -= len(group)
            if free < 0:
                break
            groups.append(group)
        return groups

    def _admit(self, groups: list[list[tuple[DecodingJob, int]]]) -> list[DecodingJob]:
        done: list[DecodingJob] = []
        for chunk in self._chunks(groups):
            prompts = [group[0][0].prompt for group in chunk]
            logits, prefilled = self._model.prefill(prompts, self._prefixes)
            source = [i for i, group in enumerate(chunk) for _ in group]
            first = len(self._running)
            for job, index in (row for group in chunk for row in group):
                self._enter(job, index)
            self._slots.admit(prefilled, source)
            pick = torch.tensor(source, device=logits.device)
            done += self._write(np.arange(first, len(self._running)), logits.index_select(0, pick))
        return done

    def _chunks(self, groups: list[list[tuple[DecodingJob, int]]]) -> Iterator[list[list[tuple[DecodingJob, int]]]]:
        """Group prompts with similar numbers of tokens left to encode, to reduce padding."""
        store, sizes = self._prefixes, self._model.sizes
        sized = []
        for group in groups:
            prompt = group[0][0].prompt
            sized.append((len(prompt) - (store.longest(prompt)[1] if store is not None else 0), len(prompt), group))
        sized.sort(key=lambda item: item[:2])
        chunk: list[list[tuple[DecodingJob, int]]] = []
        tokens = longest = 0
        for rest, whole, group in sized:
            padded = rest * (len(chunk) + 1)
            waste = padded - tokens - rest
            # The keys and values of whole prompts are in memory, those of reused tokens twice.
            held = max(longest, whole) * (len(chunk) + 1)
            if chunk and (waste > max(sizes.overhead, padded // 8) or held > sizes.prefill):
                yield chunk
                chunk, tokens, longest = [], 0, 0
            chunk.append(group)
            tokens, longest = tokens + rest, max(longest, whole)
        yield chunk

    def _enter(self, job: DecodingJob, index: int) -> None:
        row = len(self._running)
        self._running.append((job, index))
        self._seeds[row] = job.request.seeds[index]
        self._temperature[row], self._top_p[row] = job.request.temperature, job.request.top_p
        self._count[row], self._caps[row], self._sums[row], self._least[row] = 0, job.cap, 0.0, 0.0

    def _write(self, rows: npt.NDArray[np.int64], logits: torch.Tensor) -> list[DecodingJob]:
        """Sample the next token of ``rows`` and remove the finished ones."""
        uniform = uniforms(self._seeds[rows], self._count[rows])
        tolerance = _TOLERANCE if self._model.exact else 0.0
        drawn = draw(logits, self._temperature[rows], self._top_p[rows], uniform, tolerance)
        if self._model.exact and drawn.doubtful.any():
            for place in np.flatnonzero(drawn.doubtful):
                self._settle(drawn, int(place), int(rows[place]), uniform[place : place + 1])
        self._tokens[rows, self._count[rows]] = drawn.tokens
        self._each[rows, self._count[rows]] = drawn.logprobs
        self._count[rows] += 1
        self._sums[rows] += np.stack([drawn.logprobs, drawn.entropy, drawn.self_certainty], axis=1)
        self._least[rows] = np.minimum(self._least[rows], drawn.logprobs)
        reason = np.where(self._count[rows] >= self._caps[rows], 2, 0)
        reason[np.isin(drawn.tokens, self._ends)] = 1
        reason[~np.isfinite(drawn.logprobs)] = 3
        over = np.flatnonzero(reason)
        return self._leave([(int(rows[i]), _REASONS[reason[i]]) for i in over]) if len(over) else []

    def _settle(self, drawn: Draws, place: int, row: int, uniform: Floats) -> None:
        job, _ = self._running[row]
        written = self._tokens[row, : self._count[row]].tolist()
        logits = self._model.reference(job.prompt + written, 1)
        sure = draw(logits, self._temperature[row : row + 1], self._top_p[row : row + 1], uniform, 0.0)
        for column, one in zip(drawn, sure, strict=True):
            column[place] = one[0]

    def _leave(self, finished: list[tuple[int, str]]) -> list[DecodingJob]:
        done = []
        for row, reason in finished:
            job, index = self._running[row]
            tokens = self._tokens[row, : self._count[row]].tolist()
            logprob, entropy, certainty, least = self._round(job, tokens, (*self._sums[row], self._least[row]))
            means = (value / len(tokens) if np.isfinite(value) else None for value in (entropy, certainty))
            known = Certainty(least, *means)
            each = self._round_each(job, tokens, self._each[row, : len(tokens)]) if job.request.traced else ()
            job.written[index] = DecodedSample(tokens, logprob, reason, known, each)
            job.missing -= 1
            if job.missing == 0:
                done.append(job)
        if broken := [row for row, reason in finished if reason == "error"]:
            # A mask does not hide values that are not finite from the next sequence in the row.
            for layer in self._slots.layers:
                layer.keys[broken] = layer.values[broken] = 0
        moves = self._slots.drop([row for row, _ in finished])
        for source, target in moves:
            self._running[target] = self._running[source]
            for memory in (
                self._tokens,
                self._count,
                self._caps,
                self._seeds,
                self._temperature,
                self._top_p,
                self._sums,
                self._least,
                self._each,
            ):
                memory[target] = memory[source]
        del self._running[self._slots.n :]
        return done

    def _round(self, job: DecodingJob, tokens: list[int], sums: tuple[float, ...]) -> tuple[float, ...]:
        """Round sums over a message's tokens to the grid; recompute them if an error could change the rounding."""
        if not self._model.exact or not np.isfinite(sums[0]):
            return tuple(map(float, sums))
        places = np.array(sums) / _GRIDS
        # The error of a sum grows with its terms; the measured error is less than half of this.
        tolerance = _LOGPROB_TOLERANCE * (np.array([len(tokens)] * 3 + [1]) + np.abs(sums))
        if (np.abs(np.mod(places, 1.0) - 0.5) * _GRIDS < tolerance)[np.isfinite(places)].any():
            logits, logprobs = self._reference(job, tokens)
            exact = [logprobs.sum(), *(one.sum() for one in spread(logits)), logprobs.min()]
            places = np.array([float(one) for one in exact]) / _GRIDS
        return tuple(float(value) + 0.0 for value in np.round(places) * _GRIDS)

    def _round_each(self, job: DecodingJob, tokens: list[int], each: Floats) -> tuple[float, ...]:
        """Round the tokens' log-probabilities to a grid; recompute them if an error could change the rounding."""
        if not self._model.exact or not np.isfinite(each).all():
            return tuple(each.tolist())
        places = each / TOKEN_GRID
        tolerance = _LOGPROB_TOLERANCE * (1 + np.abs(each))
        if (np.abs(np.mod(places, 1.0) - 0.5) * TOKEN_GRID < tolerance).any():
            places = _numpy(self._reference(job, tokens)[1]) / TOKEN_GRID
        return tuple((np.round(places) * TOKEN_GRID + 0.0).tolist())

    def _reference(self, job: DecodingJob, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the reference's logits ``[n, V]`` and log-probabilities ``[n]`` of a message's tokens."""
        logits = self._model.reference((job.prompt + tokens)[:-1], len(tokens))
        chosen = torch.tensor(tokens, device=logits.device)
        return logits, torch.log_softmax(logits, dim=1).gather(1, chosen[:, None])[:, 0]
