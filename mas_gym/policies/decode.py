"""Continuous batching on any attention-only causal LM of transformers.

A prompt is encoded once however many samples are drawn from it; rows leave the
batch when they finish and waiting ones take their place; log-probabilities are
those of the very logits that were sampled from.

**Same request, same reply.** The result of a float32 forward depends a little on
the shape of the batch, and a draw that falls within that error of a boundary
could go either way. With ``exact`` such draws, and sums of log-probabilities
that fall as close to a rounding boundary, are settled by a reference: the same
row alone, unpadded, in float64. So a reply is a function of its request alone,
whatever the batch mates, the order and the concurrency.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from mas_gym.errors import PolicyError
from mas_gym.policies.base import SamplingRequest
from mas_gym.policies.sampling import Draws, Floats, draw, uniforms
from mas_gym.policies.slots import Slots

GLOBAL_CAP = 1024
"""No message is longer than this many tokens, whatever the request asks (paper, released settings)."""

LOGPROB_GRID = 2.0**-8
"""With ``exact``, log-probabilities of messages are rounded to multiples of this (nats)."""

_REASONS = ("", "stop", "length", "error")
_TOLERANCE = 2e-5
_PREFILL_TOKENS = 8192


class Written(NamedTuple):
    """The tokens of one sample (end token included), their summed log-probability, and why it ended.

    ``finish_reason`` is ``"error"`` where the model gave logits that are not finite.
    """

    tokens: list[int]
    logprob: float
    finish_reason: str


@dataclass(eq=False, slots=True)
class Job:
    """One request under way: its prompt's ids, its cap, and the samples written so far."""

    key: Hashable
    request: SamplingRequest
    prompt: list[int]
    cap: int
    dropped: int
    written: list[Written | None] = field(default_factory=list)
    missing: int = 0


@dataclass(slots=True)
class DecodeStats:
    """What an engine has done, for reports and benchmarks.

    Attributes:
        prefills: Forward passes over prompts.
        prompt_tokens: Prompt tokens encoded, padding excluded.
        padded_tokens: Prompt tokens encoded, padding included.
        steps: Decode steps.
        row_steps: Rows summed over the decode steps.
        tokens: Tokens sampled.
        rechecks: Single-row reference passes made for exactness.
    """

    prefills: int = 0
    prompt_tokens: int = 0
    padded_tokens: int = 0
    steps: int = 0
    row_steps: int = 0
    tokens: int = 0
    rechecks: int = 0


class Model:
    """A causal LM with the two calls that decoding needs, and the reference for doubtful draws."""

    def __init__(self, model: Any, *, exact: bool) -> None:
        """Wrap ``model``; ``exact`` turns the float64 reference on."""
        self.model = model
        self.device = model.device
        self.exact = exact
        self._reference: Any = None
        accepted = inspect.signature(model.forward).parameters
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._positions = "position_ids" in accepted

    def prefill(self, prompts: Sequence[list[int]]) -> tuple[torch.Tensor, DynamicCache]:
        """Encode prompts together, left-padded; return the next-token logits ``[n, V]`` and the cache."""
        width = max(len(p) for p in prompts)
        ids = np.zeros((len(prompts), width), dtype=np.int64)
        lengths = np.array([len(p) for p in prompts])
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = prompt
        pads = (width - lengths)[:, None]
        columns = np.arange(width)
        cache = DynamicCache()
        mask = torch.from_numpy((columns >= pads).astype(np.int64)).to(self.device)
        positions = torch.from_numpy(np.maximum(columns - pads, 0)).to(self.device)
        return self._forward(torch.from_numpy(ids).to(self.device), mask, positions, cache), cache

    def decode(self, tokens: np.ndarray[Any, Any], slots: Slots) -> torch.Tensor:
        """Feed each row its newest token; return the next-token logits ``[N, V]``."""
        mask, positions = slots.view(self.device)
        ids = torch.from_numpy(tokens[:, None].copy()).to(self.device)
        logits = self._forward(ids, mask, positions, slots.cache)
        slots.advance()
        return logits

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
        extra = {"position_ids": positions} if self._positions else {}
        out = self.model(
            input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **extra, **self._last
        )
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    def has_reference(self) -> bool:
        """Return whether the model can run in float64; some kernels, such as those of mixtures of experts, cannot."""
        try:
            with torch.inference_mode():
                return bool(torch.isfinite(self.reference([0, 1], 1)).all())
        except (RuntimeError, TypeError, ValueError):
            return False

    def reference(self, ids: list[int], last: int) -> torch.Tensor:
        """Return float64 logits ``[last, V]`` at the last positions of one sequence, alone and unpadded."""
        if self._reference is None:
            self._reference = deepcopy(self.model).double()
        keep = {"logits_to_keep": last} if self._last else {}
        out = self._reference(input_ids=torch.tensor([ids], device=self.device), use_cache=False, **keep)
        logits: torch.Tensor = out.logits[0, -last:]
        return logits


class Decoder:
    """A running batch: `submit` jobs, `step` until they come back."""

    def __init__(self, model: Model, rows: int, eos: frozenset[int], stats: DecodeStats) -> None:
        """Hold up to ``rows`` samples at once; a token of ``eos`` ends a sample."""
        self._model, self._rows, self._eos, self._stats = model, rows, eos, stats
        self._eos_ids = np.array(sorted(eos), dtype=np.int64)
        self._slots = Slots(rows)
        self._waiting: deque[list[tuple[Job, int]]] = deque()
        self._running: list[tuple[Job, int]] = []
        self._tokens = np.zeros((rows, GLOBAL_CAP), dtype=np.int64)
        self._count, self._caps = np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=np.int64)
        self._seeds = np.zeros(rows, dtype=np.uint64)
        self._heat, self._top_p, self._logprob = (np.zeros(rows) for _ in range(3))

    def submit(self, job: Job) -> None:
        """Queue every sample of a job."""
        job.missing = len(job.request.seeds)
        job.written = [None] * job.missing
        samples = [(job, index) for index in range(job.missing)]
        self._waiting.extend(samples[i : i + self._rows] for i in range(0, len(samples), self._rows))

    def step(self) -> list[Job]:
        """Encode waiting prompts if enough rows are free, else write one token in every row; return finished jobs."""
        with torch.inference_mode():
            groups = self._fitting()
            # A small prefill costs about as much overhead as a decode step, so a few rows are let gather.
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
        """Return the waiting groups, oldest first, for which there are free rows; a group shares one prompt."""
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
        for chunk in _chunks(groups):
            prompts = [group[0][0].prompt for group in chunk]
            logits, cache = self._model.prefill(prompts)
            self._stats.prefills += 1
            self._stats.prompt_tokens += sum(map(len, prompts))
            self._stats.padded_tokens += len(prompts) * max(map(len, prompts))
            source = [i for i, group in enumerate(chunk) for _ in group]
            first = len(self._running)
            for job, index in (row for group in chunk for row in group):
                self._enter(job, index)
            self._slots.admit(cache, source, [len(prompts[i]) for i in source])
            pick = torch.tensor(source, device=logits.device)
            done += self._write(np.arange(first, len(self._running)), logits.index_select(0, pick))
        return done

    def _enter(self, job: Job, index: int) -> None:
        row = len(self._running)
        self._running.append((job, index))
        self._seeds[row] = job.request.seeds[index]
        self._heat[row], self._top_p[row] = job.request.temperature, job.request.top_p
        self._count[row], self._caps[row], self._logprob[row] = 0, job.cap, 0.0

    def _write(self, rows: np.ndarray[Any, Any], logits: torch.Tensor) -> list[Job]:
        """Sample the next token of ``rows`` and let the finished ones go."""
        uniform = uniforms(self._seeds[rows], self._count[rows])
        drawn = draw(logits, self._heat[rows], self._top_p[rows], uniform, _TOLERANCE)
        if self._model.exact and drawn.doubtful.any():
            for place in np.flatnonzero(drawn.doubtful):
                self._settle(drawn, int(place), int(rows[place]), uniform[place : place + 1])
        self._tokens[rows, self._count[rows]] = drawn.tokens
        self._count[rows] += 1
        self._logprob[rows] += drawn.logprobs
        self._stats.tokens += len(rows)
        reason = np.where(self._count[rows] >= self._caps[rows], 2, 0)
        reason[np.isin(drawn.tokens, self._eos_ids)] = 1
        reason[~np.isfinite(drawn.logprobs)] = 3
        over = np.flatnonzero(reason)
        return self._leave([(int(rows[i]), _REASONS[reason[i]]) for i in over]) if len(over) else []

    def _settle(self, drawn: Draws, place: int, row: int, uniform: Floats) -> None:
        job, _ = self._running[row]
        written = self._tokens[row, : self._count[row]].tolist()
        logits = self._model.reference(job.prompt + written, 1)
        sure = draw(logits, self._heat[row : row + 1], self._top_p[row : row + 1], uniform, 0.0)
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
            for memory in (self._tokens, self._count, self._caps, self._seeds, self._heat, self._top_p, self._logprob):
                memory[target] = memory[source]
        del self._running[self._slots.n :]
        return done

    def _round(self, job: Job, tokens: list[int], logprob: float) -> float:
        if not self._model.exact or not np.isfinite(logprob):
            return logprob
        place = logprob / LOGPROB_GRID
        if abs(place - np.floor(place) - 0.5) * LOGPROB_GRID < _TOLERANCE:
            ids = job.prompt + tokens
            logits = self._model.reference(ids[:-1], len(tokens))
            chosen = torch.tensor(tokens, device=logits.device)
            place = float(torch.log_softmax(logits, dim=1).gather(1, chosen[:, None]).sum()) / LOGPROB_GRID
            self._stats.rechecks += 1
        return float(np.round(place) * LOGPROB_GRID)


def _chunks(groups: list[list[tuple[Job, int]]]) -> Iterator[list[list[tuple[Job, int]]]]:
    """Put prompts of like length together, so that little is wasted on padding."""
    chunk: list[list[tuple[Job, int]]] = []
    tokens = 0
    for group in sorted(groups, key=lambda g: len(g[0][0].prompt)):
        length = len(group[0][0].prompt)
        padded = length * (len(chunk) + 1)
        if chunk and (padded > 1.1 * (tokens + length) or padded > _PREFILL_TOKENS):
            yield chunk
            chunk, tokens = [], 0
        chunk.append(group)
        tokens += length
    if chunk:
        yield chunk


def check(model: Model, vocabulary: int) -> None:
    """Make sure that batched decoding with padding computes what the model computes alone.

    Raises:
        PolicyError: It does not, as for architectures that keep a state other than keys and values.
    """
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, vocabulary, size).tolist() for size in (5, 11, 3)]
    following = generator.integers(0, vocabulary, 3)
    try:
        with torch.inference_mode():
            logits, cache = model.prefill(prompts)
            slots = Slots(3)
            slots.admit(cache, [0, 1, 2], [len(p) for p in prompts])
            batched = torch.stack([logits, model.decode(following, slots)])
            alone = [
                torch.stack([model.prefill([p])[0][0], model.prefill([[*p, int(t)]])[0][0]])
                for p, t in zip(prompts, following, strict=True)
            ]
    except (TypeError, AttributeError, ValueError, IndexError, RuntimeError) as error:
        raise PolicyError(_unsupported(f"its forward pass failed: {error}")) from error
    gap = (torch.softmax(batched.float(), -1) - torch.softmax(torch.stack(alone, 1).float(), -1)).abs().max().item()
    if not gap < (1e-3 if logits.dtype in (torch.float32, torch.float64) else 0.1):
        raise PolicyError(_unsupported(f"probabilities differ by {gap:.3g}"))


def _unsupported(reason: str) -> str:
    return (
        "expected a causal LM whose only state is attention keys and values, so that rows can be batched with padding; "
        f"this one is not: {reason}; serve it with vLLM or another server and use 'openai:MODEL@URL'"
    )
