"""Continuous batching on any attention-only causal LM of transformers.

A prompt is encoded once, however many samples are drawn from it; rows leave the
batch when they finish and waiting ones take their place; log-probabilities are
computed from the same logits that were sampled from.

**Same request, same reply.** A float32 forward pass depends slightly on the shape of
the batch (about 1e-6 in a log-probability), and a draw within that error of a boundary
could go either way. With ``exact``, such draws, and sums of log-probabilities that are as
close to a rounding boundary, are recomputed with a reference: the same row alone, unpadded,
in float64. A reply then depends on its request alone, and not on the other rows, their
order, the concurrency or the number of threads, as long as the error stays within the
tolerances below; ``benchmarks/local_engine.py`` measures both.

Without ``exact`` (bfloat16, float16, large models, or models that cannot run in
float64), replies have the same distribution, but a sample may occasionally change
with the other rows of its batch. Decoding one request at a time (``max_batch=1``,
``prefix_megabytes=0``) reproduces them on the same machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from mas_gym.policies.base import SamplingRequest
from mas_gym.policies.local.forward import Model
from mas_gym.policies.local.kv_cache import PrefixStore, Slots
from mas_gym.policies.local.sampling import Draws, Floats, draw, uniforms

GLOBAL_CAP = 1024
"""Cap on the tokens of every message, whatever the request's own cap (paper, released settings)."""

LOGPROB_GRID = 2.0**-6
"""With ``exact``, log-probabilities of messages are rounded to multiples of this (nats)."""

_REASONS = ("", "stop", "length", "error")
_TOLERANCE = 5e-5
_LOGPROB_TOLERANCE = 2e-6
_PREFILL_TOKENS = 8192
# Fixed cost of a forward pass of a small model, in tokens.
_PREFILL_OVERHEAD = 32


class Written(NamedTuple):
    """A sample's tokens (end token included), their summed log-probability, and why it ended.

    ``finish_reason`` is ``"error"`` if the model's logits are not finite.
    """

    tokens: list[int]
    logprob: float
    finish_reason: str


@dataclass(eq=False, slots=True)
class Job:
    """One open request: its prompt's ids, its cap, and the samples finished so far."""

    key: Hashable
    request: SamplingRequest
    prompt: list[int]
    cap: int
    dropped: int
    written: list[Written | None] = field(default_factory=list)
    missing: int = 0


@dataclass(slots=True)
class DecodeStats:
    """Counters of an engine's work, for reports and benchmarks.

    Attributes:
        prefills: Forward passes over prompts.
        prompt_tokens: Prompt tokens, counted once per prompt however many samples were drawn.
        reused_tokens: Prompt tokens reused from earlier prompts with the same prefix.
        steps: Decode steps.
        row_steps: Sum of the rows over all decode steps.
        tokens: Sampled tokens.
        rechecks: Single-row reference passes for exactness.
    """

    prefills: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    steps: int = 0
    row_steps: int = 0
    tokens: int = 0
    rechecks: int = 0


class Decoder:
    """A running batch: `submit` jobs, then `step` until they are returned."""

    def __init__(
        self, model: Model, rows: int, ends: frozenset[int], stats: DecodeStats, prefix_bytes: int = 0
    ) -> None:
        """Hold up to ``rows`` samples; a token in ``ends`` ends a sample; keep encoded prompts in ``prefix_bytes``."""
        self._model, self._rows, self._stats = model, rows, stats
        self._ends = np.array(sorted(ends), dtype=np.int64)
        self._slots = Slots(rows)
        self._prefixes = PrefixStore(prefix_bytes) if prefix_bytes and model.shares else None
        self._waiting: deque[list[tuple[Job, int]]] = deque()
        self._running: list[tuple[Job, int]] = []
        self._tokens = np.zeros((rows, GLOBAL_CAP), dtype=np.int64)
        self._count, self._caps = np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=np.int64)
        self._seeds = np.zeros(rows, dtype=np.uint64)
        self._temperature, self._top_p, self._logprob = (np.zeros(rows) for _ in range(3))

    def submit(self, job: Job) -> None:
        """Queue every sample of a job."""
        job.missing = len(job.request.seeds)
        job.written = [None] * job.missing
        samples = [(job, index) for index in range(job.missing)]
        self._waiting.extend(samples[i : i + self._rows] for i in range(0, len(samples), self._rows))

    def step(self) -> list[Job]:
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
            self._stats.steps += 1
            self._stats.row_steps += n
            return self._write(np.arange(n), logits)

    def _fitting(self) -> list[list[tuple[Job, int]]]:
        """Return the oldest waiting groups that fit into the free rows; a group shares one prompt."""
        groups: list[list[tuple[Job, int]]] = []
        free = self._rows - len(self._running)
        for group in self._waiting:
            free -= len(group)
            if free < 0:
                break
            groups.append(group)
        return groups

    def _admit(self, groups: list[list[tuple[Job, int]]]) -> list[Job]:
        done: list[Job] = []
        for chunk in self._chunks(groups):
            prompts = [group[0][0].prompt for group in chunk]
            logits, prefilled = self._model.prefill(prompts, self._prefixes)
            self._stats.prefills += 1
            self._stats.prompt_tokens += int(prefilled.lengths.sum())
            self._stats.reused_tokens += prefilled.reused
            source = [i for i, group in enumerate(chunk) for _ in group]
            first = len(self._running)
            for job, index in (row for group in chunk for row in group):
                self._enter(job, index)
            self._slots.admit(prefilled, source)
            pick = torch.tensor(source, device=logits.device)
            done += self._write(np.arange(first, len(self._running)), logits.index_select(0, pick))
        return done

    def _chunks(self, groups: list[list[tuple[Job, int]]]) -> Iterator[list[list[tuple[Job, int]]]]:
        """Group prompts with similar numbers of tokens left to encode, to reduce padding."""
        store = self._prefixes
        sized = []
        for group in groups:
            prompt = group[0][0].prompt
            sized.append((len(prompt) - (store.longest(prompt)[1] if store is not None else 0), len(prompt), group))
        sized.sort(key=lambda item: item[:2])
        chunk: list[list[tuple[Job, int]]] = []
        tokens = 0
        for rest, _, group in sized:
            padded = rest * (len(chunk) + 1)
            waste = padded - tokens - rest
            if chunk and (waste > max(_PREFILL_OVERHEAD, padded // 8) or padded > _PREFILL_TOKENS):
                yield chunk
                chunk, tokens = [], 0
            chunk.append(group)
            tokens += rest
        yield chunk

    def _enter(self, job: Job, index: int) -> None:
        row = len(self._running)
        self._running.append((job, index))
        self._seeds[row] = job.request.seeds[index]
        self._temperature[row], self._top_p[row] = job.request.temperature, job.request.top_p
        self._count[row], self._caps[row], self._logprob[row] = 0, job.cap, 0.0

    def _write(self, rows: np.ndarray[Any, Any], logits: torch.Tensor) -> list[Job]:
        """Sample the next token of ``rows`` and remove the finished ones."""
        uniform = uniforms(self._seeds[rows], self._count[rows])
        drawn = draw(logits, self._temperature[rows], self._top_p[rows], uniform, _TOLERANCE)
        if self._model.exact and drawn.doubtful.any():
            for place in np.flatnonzero(drawn.doubtful):
                self._settle(drawn, int(place), int(rows[place]), uniform[place : place + 1])
        self._tokens[rows, self._count[rows]] = drawn.tokens
        self._count[rows] += 1
        self._logprob[rows] += drawn.logprobs
        self._stats.tokens += len(rows)
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
        drawn.tokens[place], drawn.logprobs[place] = sure.tokens[0], sure.logprobs[0]
        self._stats.rechecks += 1

    def _leave(self, finished: list[tuple[int, str]]) -> list[Job]:
        done = []
        for row, reason in finished:
            job, index = self._running[row]
            tokens = self._tokens[row, : self._count[row]].tolist()
            logprob = self._round(job, tokens, float(self._logprob[row]))
            job.written[index] = Written(tokens, logprob, reason)
            job.missing -= 1
            if job.missing == 0:
                done.append(job)
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
                self._logprob,
            ):
                memory[target] = memory[source]
        del self._running[self._slots.n :]
        return done

    def _round(self, job: Job, tokens: list[int], logprob: float) -> float:
        if not self._model.exact or not np.isfinite(logprob):
            return logprob
        place = logprob / LOGPROB_GRID
        # The error of a sum grows with its terms; the measured error is less than half of this.
        tolerance = _LOGPROB_TOLERANCE * (len(tokens) - logprob)
        if abs(place - np.floor(place) - 0.5) * LOGPROB_GRID < tolerance:
            ids = job.prompt + tokens
            logits = self._model.reference(ids[:-1], len(tokens))
            chosen = torch.tensor(tokens, device=logits.device)
            place = float(torch.log_softmax(logits, dim=1).gather(1, chosen[:, None]).sum()) / LOGPROB_GRID
            self._stats.rechecks += 1
        return float(np.round(place) * LOGPROB_GRID) + 0.0
