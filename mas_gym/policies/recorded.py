"""Recorded messages: free reruns, tests without a model, planners on identical samples.

A recording is a JSON Lines file: a header ``{"format": "mas-gym-recording", "schema": 1, "policy": NAME}``, then one
line per sample, keyed by a digest of everything that the sample depends on. It is only appended to, a whole line at a
time, so a killed writer leaves at most one broken line at its end, which readers skip and writers remove.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Hashable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from mas_gym.errors import ConfigError, DataError, DataNotFoundError, PolicyError
from mas_gym.policies.adapters import open_session
from mas_gym.policies.base import Policy, Sample, SamplingReply, SamplingRequest, SamplingSession, token_count

SCHEMA = 1
_FORMAT = "mas-gym-recording"

logger = logging.getLogger("mas_gym.policies")


_Answered = tuple[SamplingRequest, SamplingReply]


class _Record(NamedTuple):
    sample: Sample
    prompt_tokens: int
    dropped_tokens: int


def sample_key(request: SamplingRequest, seed: int) -> str:
    """Return the digest (32 hex digits) of a prompt, its agent, its sampling parameters and one seed."""
    parts: list[Any] = [[[m.role, m.content] for m in request.messages], request.agent]
    parts += [request.max_new_tokens, float(request.temperature), float(request.top_p), seed]
    return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


class RecordedPolicy:
    """Replays a recording.

    Attributes:
        name: ``"recorded:"`` and the name of the policy that was recorded.
        max_batch: Large, because a reply costs only a look-up.
    """

    def __init__(self, file: str | Path) -> None:
        """Read a recording.

        Raises:
            DataNotFoundError: There is no such file.
            DataError: It is no recording, or a line before its last is broken.
        """
        self.file = Path(file)
        policy, self._records, _ = _read(self.file)
        self._digest = blake2b(json.dumps(sorted(self._records.items())).encode(), digest_size=16).hexdigest()
        self.name = f"recorded:{policy}"
        self.max_batch = 4096

    def identity(self) -> dict[str, str]:
        """Return a digest of the recorded samples."""
        return {"samples": self._digest}

    def sample(self, requests: Sequence[SamplingRequest]) -> list[SamplingReply]:
        """Look every sample up; raises `PolicyError` for one that was not recorded."""
        return [self._reply(request) for request in requests]

    def _reply(self, request: SamplingRequest) -> SamplingReply:
        records = []
        for index, seed in enumerate(request.seeds):
            record = self._records.get(sample_key(request, seed))
            if record is None:
                prompt = request.messages[-1].content if request.messages else ""
                raise PolicyError(
                    f"{self.file}: no recorded message of agent {request.agent!r} for seed {seed} (sample {index + 1} "
                    f"of {len(request.seeds)}), T {request.temperature}, top-p {request.top_p}, cap "
                    f"{request.max_new_tokens}, after {prompt[-80:]!r}; replay with the run seed, MAS, problems and "
                    "sampling parameters of the recording, or record this run too with RecordingPolicy(policy, file)"
                )
            records.append(record)
        prompt_tokens, dropped = (records[0].prompt_tokens, records[0].dropped_tokens) if records else (0, 0)
        return SamplingReply(tuple(r.sample for r in records), prompt_tokens, prompt_tokens, dropped)


class RecordingPolicy:
    """Forwards requests to another policy and appends its samples to a recording, each sample once.

    Attributes:
        name: The inner policy's.
        max_batch: The inner policy's.
    """

    def __init__(self, policy: Policy, file: str | Path) -> None:
        """Open or continue a recording.

        Raises:
            ConfigError: The policy does not answer batches.
            DataError: The file is something else, or the recording of another policy.
        """
        if not isinstance(policy, Policy):
            raise ConfigError(f"expected a policy with sample(requests), got {type(policy).__name__}")
        self.policy = self.identical_to = policy
        self.name, self.max_batch = policy.name, policy.max_batch
        self.file = Path(file)
        self._known: set[str] = set()
        if self.file.exists() and self.file.stat().st_size:
            recorded, records, sound = _read(self.file)
            if recorded != policy.name:
                raise DataError(f"{file} records policy {recorded!r}, got {policy.name!r}; record into another file")
            self._known = set(records)
            with self.file.open("rb+") as stream:
                stream.truncate(sound)
        else:
            self._append([{"format": _FORMAT, "schema": SCHEMA, "policy": policy.name}])

    def sample(self, requests: Sequence[SamplingRequest]) -> list[SamplingReply]:
        """Answer every request, in order."""
        replies = list(self.policy.sample(requests))
        self._record(list(zip(requests, replies, strict=True)))
        return replies

    def open(self) -> RecordingSession:
        """Start a session that records."""
        return RecordingSession(open_session(self.policy), self._record)

    def _record(self, pairs: Sequence[_Answered]) -> None:
        lines = []
        for request, reply in pairs:
            for seed, sample in zip(request.seeds, reply.samples, strict=True):
                key = sample_key(request, seed)
                if key not in self._known:
                    self._known.add(key)
                    tokens = {"prompt_tokens": reply.prompt_tokens, "dropped_tokens": reply.dropped_tokens}
                    lines.append({"key": key, "agent": request.agent, "seed": seed, **sample._asdict(), **tokens})
        self._append(lines)

    def _append(self, lines: Sequence[dict[str, Any]]) -> None:
        if lines:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("ab") as stream:
                stream.write("".join(json.dumps(line) + "\n" for line in lines).encode())


class RecordingSession:
    """A session whose replies are recorded before they are returned."""

    def __init__(self, inner: SamplingSession, record: Callable[[Sequence[_Answered]], None]) -> None:
        """Wrap a session of the inner policy."""
        self._inner, self._record = inner, record
        self._open: dict[Hashable, SamplingRequest] = {}

    @property
    def pending(self) -> int:
        """Samples asked for whose request is not yet answered."""
        return self._inner.pending

    def submit(self, key: Hashable, request: SamplingRequest) -> None:
        """Queue a request."""
        self._inner.submit(key, request)
        self._open[key] = request

    def step(self) -> list[tuple[Hashable, SamplingReply | PolicyError]]:
        """Step the inner session, and record what it finished."""
        done = self._inner.step()
        requests = [(self._open.pop(key), reply) for key, reply in done]
        self._record([(request, reply) for request, reply in requests if not isinstance(reply, PolicyError)])
        return done

    def close(self) -> None:
        """Forget every open request."""
        self._inner.close()
        self._open.clear()


def _read(file: Path) -> tuple[str, dict[str, _Record], int]:
    """Return the recorded policy's name, the records, and the length in bytes of the sound part."""
    try:
        data = file.read_bytes()
    except (OSError, ValueError) as error:
        remedy = "write one with RecordingPolicy(policy, file)"
        raise DataNotFoundError(f"expected a recording at {str(file)!r}, got: {error}; {remedy}") from error
    sound = data.rfind(b"\n") + 1
    if sound < len(data):
        logger.warning("%s: its last line is incomplete (a writer was stopped); it is ignored", file)
    header, *lines = data[:sound].split(b"\n")[:-1] or [b""]
    policy = _header(file, header)
    records = {}
    for number, line in enumerate(lines, start=2):
        try:
            entry = json.loads(line)
            counts = token_count(entry["prompt_tokens"]), token_count(entry["dropped_tokens"])
            records[entry["key"]] = _Record(_checked(Sample(*(entry[name] for name in Sample._fields))), *counts)
        except (ValueError, KeyError, TypeError) as error:
            what = f"expected a recorded sample, got {line[:80]!r} ({error})"
            raise DataError(f"{file}, line {number}: {what}") from error
    return policy, records, sound


def _checked(sample: Sample) -> Sample:
    known = sample.logprob is None or (isinstance(sample.logprob, int | float) and math.isfinite(sample.logprob))
    if not isinstance(sample.text, str) or not known or sample.finish_reason not in ("stop", "length"):
        raise ValueError("expected a text, a finite log-probability or none, and a finish reason of stop or length")
    token_count(sample.tokens)
    return sample


def _header(file: Path, line: bytes) -> str:
    try:
        header = json.loads(line)
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise DataError(f"{file}: expected a recording, whose first line names the format {_FORMAT!r}")
    if header.get("schema") != SCHEMA:
        raise DataError(f"{file}: expected schema {SCHEMA}, got {header.get('schema')!r}; record again")
    return str(header.get("policy"))
