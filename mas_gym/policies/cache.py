"""Stored samples: recordings to replay, and a response cache, so that no sample is generated or paid for twice.

Both are tables of samples. Each sample of a request is looked up; only missing samples are requested from the inner
policy, if there is one, and then stored. `SharedSamples` only remembers replies in memory.

* A recording is a JSON Lines file: a header ``{"format": "mas-gym-recording", "schema": 1,
  "policy": NAME}``, then one line per sample, keyed by a digest of everything the sample
  depends on. Whole lines are appended, so a killed writer leaves at most one incomplete
  line at the end, which readers skip and writers remove.
* A response cache is one SQLite file (WAL). Its keys also contain the policy's identity, and any
  number of processes and runs can share it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sqlite3
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from mas_gym.errors import DataError, DataNotFoundError, IdentityError, PolicyError, is_number
from mas_gym.internal.database import Format, transaction
from mas_gym.internal.event_loop import together
from mas_gym.internal.identity import digest_of, identity_of, own_identity
from mas_gym.internal.json_types import JSONMapping, JSONObject
from mas_gym.policies.base import (
    AsyncPolicy,
    Certainty,
    Choice,
    Policy,
    Sample,
    SamplingReply,
    SamplingRequest,
    spoken,
    token_count,
)
from mas_gym.policies.batch_queue import as_policy
from mas_gym.systems.prompts import ChatMessage

SCHEMA = 1
_FORMAT = "mas-gym-recording"
_COLUMNS = "text, tokens, logprob, finish_reason, prompt_tokens, dropped_tokens, least, entropy, self_certainty"


_CACHE = Format(
    name="response cache",
    application=0x4D415343,
    schema=2,
    tables="""
CREATE TABLE samples (
    key BLOB PRIMARY KEY, policy TEXT NOT NULL, text TEXT NOT NULL, tokens INTEGER NOT NULL, logprob REAL,
    finish_reason TEXT NOT NULL, prompt_tokens INTEGER NOT NULL, dropped_tokens INTEGER NOT NULL,
    least REAL, entropy REAL, self_certainty REAL) WITHOUT ROWID;
""",
    error=DataError,
    origin="a CachedPolicy creates one",
)

logger = logging.getLogger("mas_gym.policies")


class _Entry(NamedTuple):
    """A stored sample, with the number of prompt tokens of the call that drew it."""

    sample: Sample
    prompt_tokens: int
    dropped_tokens: int


def _reply(found: Sequence[_Entry | None], one_by_one: bool = False, fresh_tokens: int = 0) -> SamplingReply:
    """Return a reply of stored samples; ``fresh_tokens`` of its prompt tokens have just been processed."""
    entries = [entry for entry in found if entry is not None]
    billed = entries if one_by_one else entries[:1]
    prompt, dropped = sum(entry.prompt_tokens for entry in billed), sum(entry.dropped_tokens for entry in billed)
    return SamplingReply(tuple(entry.sample for entry in entries), prompt, max(0, prompt - fresh_tokens), dropped)


def sample_key(request: SamplingRequest, seed: int) -> str:
    """Return the digest (32 hex digits) of a prompt, its agent and tag, its sampling parameters and one seed."""
    parts: list[object] = [[[m.role, m.content] for m in request.messages], request.agent]
    parts += [request.max_new_tokens, float(request.temperature), float(request.top_p), seed]
    if request.extra_body:
        parts.append(request.extra_body)
    if request.tag:
        parts.append({"tag": request.tag})
    return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


class RecordedPolicy(Policy):
    """Replays recorded replies from a file.

    Attributes:
        name: ``"recorded:"`` and the name of the recorded policy.
        max_batch: Large, because a reply costs only a lookup.
        takes_extra_body: True, because a sample is recorded with everything that it depends on.
    """

    takes_extra_body = True

    def __init__(self, file: str | Path) -> None:
        """Read a recording.

        Raises:
            DataNotFoundError: There is no such file.
            DataError: It is not a recording, or a line before the last one is malformed.
        """
        self.file = Path(file)
        policy, records, _ = _read(self.file)
        self._table = _SampleFile(self.file, records)
        self._digest = blake2b(json.dumps(sorted(records.items())).encode(), digest_size=16).hexdigest()
        self.name = f"recorded:{policy}"
        self.max_batch = 4096

    def identity(self) -> dict[str, str]:
        """Return a digest of the recorded samples."""
        return {"samples": self._digest}

    def sample(self, requests: Sequence[SamplingRequest]) -> list[SamplingReply]:
        """Return the reply to every request, in order. Raises `PolicyError` for a sample that was not recorded."""
        return [self._reply(request) for request in requests]

    def _reply(self, request: SamplingRequest) -> SamplingReply:
        found = self._table.find(request)
        if None in found and request.extra_body:
            # The recorded policy may have received speaker names as text.
            messages, extra_body = spoken(request.messages, request.extra_body)
            found = self._table.find(replace(request, messages=messages, extra_body=extra_body))
        if None in found:
            place = found.index(None)
            raise PolicyError(
                f"{self.file}: no recorded message of agent {request.agent!r} for seed {request.seeds[place]} (sample "
                f"{place + 1} of {len(request.seeds)}), temperature {request.temperature}, top-p "
                f"{request.top_p}, max_new_tokens {request.max_new_tokens}, after "
                f"{request.messages[-1].content[-80:]!r}; replay "
                "with the run seed, MAS, problems and sampling parameters of the recording, or record this run too "
                "with RecordingPolicy(policy, file)"
            )
        return _reply(found)


class _StoringPolicy(AsyncPolicy):
    """Reads samples from a table, and adds the samples that it requests from another policy of any kind.

    ``one_by_one`` means that each sample is a separate call, which processes the prompt again.

    Attributes:
        policy: The other policy.
        hits: Samples found in the table.
        misses: Samples requested from the other policy.
    """

    def __init__(self, policy: AsyncPolicy, table: _SampleFile | _ResponseCache, one_by_one: bool = False) -> None:
        self.policy = policy
        self.stand_for(policy)
        self.hits = self.misses = 0
        self._table, self._one_by_one = table, one_by_one
        self._begin()

    async def sample_async(self, request: SamplingRequest) -> SamplingReply:
        """Return the reply to one request. Raises `mas_gym.errors.PolicyError`."""
        if self._process != os.getpid():
            # A forked child has none of its parent's threads, and must not use its parent's connection.
            self._begin()
            self._table.reopen()
        on_thread = partial(asyncio.get_running_loop().run_in_executor, self._thread)
        found = await on_thread(self._table.find, request)
        seeds = tuple(seed for seed, entry in zip(request.seeds, found, strict=True) if entry is None)
        self.hits += len(found) - len(seeds)
        self.misses += len(seeds)
        if not seeds:
            return _reply(found, self._one_by_one)
        missing = replace(request, seeds=seeds)
        reply = await self.policy.sample_async(missing)
        calls = len(seeds) if self._one_by_one else 1
        tokens = reply.prompt_tokens // calls, reply.dropped_tokens // calls
        fresh = [_Entry(sample, *tokens) for sample in reply.samples]
        # It has been paid for, even if the search ends now.
        rest = iter(await asyncio.shield(on_thread(self._added, missing, fresh)))
        entries = [next(rest) if entry is None else entry for entry in found]
        return _reply(entries, self._one_by_one, reply.prompt_tokens - reply.cached_tokens)

    def _begin(self) -> None:
        self._process, self._thread = os.getpid(), ThreadPoolExecutor(1, thread_name_prefix="mas-gym-samples")

    def _added(self, request: SamplingRequest, fresh: Sequence[_Entry]) -> list[_Entry]:
        """Add samples, and return what the table now has: another run may have added its samples first."""
        self._table.add(request, fresh)
        kept = zip(self._table.find(request), fresh, strict=True)
        # Stored samples have no trace, so an equal fresh sample is returned with its trace.
        return [
            new if old is None or old.sample._replace(trace=new.sample.trace) == new.sample else old
            for old, new in kept
        ]

    def close(self) -> None:
        """Close the file; the policy cannot be used afterwards."""
        self._thread.submit(self._table.close).result()
        self._thread.shutdown()


class RecordingPolicy(_StoringPolicy):
    """Replays a recording, and appends the samples that it requests from another policy of any kind."""

    def __init__(self, policy: Policy | AsyncPolicy, file: str | Path) -> None:
        """Open or continue a recording.

        Args:
            policy: The policy that generates the missing samples.
            file: The recording; an existing file must record a policy with the same name.

        Raises:
            DataError: The file is not a recording, or records another policy.
        """
        inner, self.file = as_policy(policy), Path(file)
        records: dict[str, _Entry] = {}
        intact = 0
        if self.file.exists() and self.file.stat().st_size:
            recorded, records, intact = _read(self.file)
            if recorded != inner.name:
                raise DataError(
                    f"{file}: expected the recorded policy {recorded!r}, got {inner.name!r}; record to another file"
                )
            with self.file.open("rb+") as stream:
                stream.truncate(intact)
        table = _SampleFile(self.file, records)
        if not intact:
            table.append([{"format": _FORMAT, "schema": SCHEMA, "policy": inner.name}])
        super().__init__(inner, table)


class CachedPolicy(_StoringPolicy):
    """Reads samples from a response cache, and adds the samples that it requests from another policy of any kind.

    Two policies share samples if their identities are equal (`mas_gym.internal.identity`).

    Attributes:
        meters: The inner policy's meters; samples from the cache cost nothing.
    """

    def __init__(self, policy: Policy | AsyncPolicy, file: str | Path) -> None:
        """Open or create the cache.

        Args:
            policy: The policy that generates the missing samples.
            file: The SQLite file.

        Raises:
            IdentityError: The policy's identity cannot be determined.
            DataError: The file has a different format or version.
        """
        inner, self.file = as_policy(policy), Path(file)
        super().__init__(inner, _ResponseCache(inner, self.file), inner.independent_samples is True)


class SharedSamples(AsyncPolicy):
    """Remembers the replies of a policy, so that the rows of a comparison are paired and have equal costs.

    Each sample has a seed, but some servers ignore seeds or batch requests, which changes their samples. A repeated
    reply has the same costs as the first one. Single samples are shared if they are independent, else whole replies.
    """

    def __init__(self, policy: AsyncPolicy) -> None:
        self.stand_for(policy)
        self.independent_samples = policy.independent_samples
        self.chooses = policy.chooses
        self._inner = policy
        self._replies: dict[tuple[str, ...], SamplingReply] = {}

    async def sample_async(self, request: SamplingRequest) -> SamplingReply:
        """Return the reply to one request. Raises `mas_gym.errors.PolicyError`."""
        if self.independent_samples is not True:
            return await self._remembered(request)
        replies = await together(self._remembered(replace(request, seeds=(seed,))) for seed in request.seeds)
        samples = tuple(sample for reply in replies for sample in reply.samples)
        counts = ((reply.prompt_tokens, reply.cached_tokens, reply.dropped_tokens) for reply in replies)
        return SamplingReply(samples, *map(sum, zip(*counts, strict=True)))

    async def choose_async(self, messages: Sequence[ChatMessage], words: Sequence[str]) -> Choice:
        """Return the inner policy's choice. Raises `mas_gym.errors.PolicyError`."""
        return await self._inner.choose_async(messages, words)

    async def _remembered(self, request: SamplingRequest) -> SamplingReply:
        key = tuple(sample_key(request, seed) for seed in request.seeds)
        if key not in self._replies:
            self._replies[key] = await self._inner.sample_async(request)
        return self._replies[key]


class _SampleFile:
    """The samples of a recording, in memory; new ones are appended to its file."""

    def __init__(self, file: Path, records: dict[str, _Entry]) -> None:
        self._file, self._records = file, records

    def find(self, request: SamplingRequest) -> list[_Entry | None]:
        return [self._records.get(sample_key(request, seed)) for seed in request.seeds]

    def add(self, request: SamplingRequest, entries: Sequence[_Entry]) -> None:
        lines, records = [], dict[str, _Entry]()
        for seed, entry in zip(request.seeds, entries, strict=True):
            key = sample_key(request, seed)
            if key not in self._records and key not in records:
                records[key] = entry
                tokens = {"prompt_tokens": entry.prompt_tokens, "dropped_tokens": entry.dropped_tokens}
                said = entry.sample._asdict()
                del said["trace"]
                lines.append({"key": key, "agent": request.agent, "seed": seed, **said, **tokens})
        self.append(lines)
        self._records |= records

    def reopen(self) -> None:
        pass

    def append(self, lines: Sequence[JSONObject]) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        whole = self._file.stat().st_size if self._file.exists() else 0
        try:
            with self._file.open("ab") as stream:
                stream.write("".join(json.dumps(line) + "\n" for line in lines).encode())
        except OSError as error:
            # Otherwise the next line would follow a part of this one.
            os.truncate(self._file, whole)
            raise PolicyError(f"{self._file}: cannot record: {error}; free some space") from error

    def close(self) -> None:
        pass


class _ResponseCache:
    """The samples of one policy in a response cache."""

    def __init__(self, policy: Policy | AsyncPolicy, file: Path) -> None:
        self._policy, self._file = policy, file
        # A custom identity() may query a server, so it is called at the first request.
        self._address = None if own_identity(policy) is not None else self._addressed()
        # If one call returns all samples of a prompt, they belong together.
        self._whole = policy.independent_samples is False
        self._databases = [_CACHE.connect(file, create=True)]
        self._warned = False

    def _addressed(self) -> str:
        try:
            return digest_of(identity_of(self._policy))
        except IdentityError as error:
            raise IdentityError(f"a response cache requires the identity of {self._policy.name}: {error}") from error

    def find(self, request: SamplingRequest) -> list[_Entry | None]:
        if self._address is None:
            self._address = self._addressed()
        found = [self._stored(key) for key in self._keys(self._address, request)]
        return [None] * len(found) if self._whole and None in found else found

    def _keys(self, address: str, request: SamplingRequest) -> list[bytes]:
        group = f"{request.seeds}|" if self._whole else ""
        parts = (f"{address}|{group}{sample_key(request, seed)}" for seed in request.seeds)
        return [blake2b(part.encode("utf-8", "surrogatepass"), digest_size=16).digest() for part in parts]

    def _stored(self, key: bytes) -> _Entry | None:
        row = self._database.execute(f"SELECT {_COLUMNS} FROM samples WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        certainty = Certainty(*row[6:]) if any(value is not None for value in row[6:]) else None
        return _Entry(Sample(row[0], row[1], row[2], row[3], certainty), row[4], row[5])

    def add(self, request: SamplingRequest, entries: Sequence[_Entry]) -> None:
        assert self._address is not None
        keyed = zip(self._keys(self._address, request), entries, strict=True)
        rows = [
            (key, self._policy.name, *sample[:4], prompt, dropped, *(sample.certainty or Certainty()))
            for key, (sample, prompt, dropped) in keyed
        ]
        insert = f"INSERT OR IGNORE INTO samples VALUES ({', '.join('?' * 11)})"
        try:
            with transaction(self._database):
                self._database.executemany(insert, rows)
        except (sqlite3.OperationalError, UnicodeEncodeError) as error:
            # The reply is valid even if it cannot be stored: a full disk must not fail the search.
            if not self._warned:
                self._warned = True
                logger.warning("%s: replies are not cached: %s", self._file, error)

    @property
    def _database(self) -> sqlite3.Connection:
        return self._databases[-1]

    def reopen(self) -> None:
        # The connection of the parent process is kept, because closing it would release the parent's locks.
        self._databases.append(_CACHE.connect(self._file, create=True))

    def close(self) -> None:
        self._database.close()


def _read(file: Path) -> tuple[str, dict[str, _Entry], int]:
    """Return the recorded policy's name, the records, and the length in bytes of the complete lines."""
    try:
        data = file.read_bytes()
    except (OSError, ValueError) as error:
        remedy = "write one with RecordingPolicy(policy, file)"
        raise DataNotFoundError(f"expected a recording at {str(file)!r}, got: {error}; {remedy}") from error
    intact = data.rfind(b"\n") + 1
    if intact < len(data):
        logger.warning("%s: ignoring its incomplete last line (a writer was stopped)", file)
    header, *lines = data[:intact].split(b"\n")[:-1] or [b""]
    policy = _header(file, header)
    records = {}
    for number, line in enumerate(lines, start=2):
        try:
            entry = json.loads(line)
            counts = token_count(entry["prompt_tokens"]), token_count(entry["dropped_tokens"])
            records[entry["key"]] = _Entry(_sample(entry), *counts)
        except (ValueError, KeyError, TypeError) as error:
            what = f"expected a recorded sample, got {line[:80]!r} ({error})"
            raise DataError(f"{file}, line {number}: {what}") from error
    return policy, records, intact


def _sample(entry: JSONMapping) -> Sample:
    text, tokens, logprob, reason = (entry[name] for name in Sample._fields[:4])
    certainty = entry["certainty"]
    known = all(value is None or is_number(value) for value in (logprob, *(certainty or ())))
    if not isinstance(text, str) or not known or reason not in ("stop", "length"):
        raise ValueError("expected text, finite log-probabilities or null, and a finish reason of stop or length")
    return Sample(text, token_count(tokens), logprob, reason, Certainty(*certainty) if certainty else None)


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
