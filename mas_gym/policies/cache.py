"""A response cache: no sample is generated or paid for twice.

One SQLite file (WAL), addressed by the policy's identity, the prompt, the sampling
parameters and the seed, and shared by any number of processes and runs. Files of earlier
versions stay readable: samples of servers are found under their former addresses as well.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path

from mas_gym.database import Format, transaction
from mas_gym.errors import DataError, IdentityError
from mas_gym.identity import digest_of, identity_of
from mas_gym.policies.adapters import as_async
from mas_gym.policies.base import AsyncPolicy, Policy, Sample, SamplingReply, SamplingRequest
from mas_gym.policies.meter import Meter, meters_of
from mas_gym.policies.recorded import sample_key

_COLUMNS = "text, tokens, logprob, finish_reason, prompt_tokens, dropped_tokens"
_FORMAT = Format(
    name="response cache",
    application=0x4D415343,
    schema=1,
    tables="""
CREATE TABLE samples (
    key BLOB PRIMARY KEY, policy TEXT NOT NULL, text TEXT NOT NULL, tokens INTEGER NOT NULL, logprob REAL,
    finish_reason TEXT NOT NULL, prompt_tokens INTEGER NOT NULL, dropped_tokens INTEGER NOT NULL) WITHOUT ROWID;
""",
    error=DataError,
    origin="a CachedPolicy creates one",
)

logger = logging.getLogger("mas_gym.policies")

_Found = tuple[Sample, int, int]


class CachedPolicy:
    """An `AsyncPolicy` with the replies of another policy, each sample looked up before it is requested.

    Two policies share samples if their identities are equal (`mas_gym.identity`).

    Attributes:
        name: The inner policy's.
        max_concurrency: The inner policy's.
        identical_to: The inner policy.
        hits: Samples found.
        misses: Samples requested from the inner policy.
    """

    def __init__(self, policy: Policy | AsyncPolicy, file: str | Path) -> None:
        """Open or create the cache.

        Args:
            policy: The policy to ask for samples that are not in the file.
            file: The SQLite file.

        Raises:
            IdentityError: The policy cannot state what its samples depend on.
            DataError: The file is something else, or from another version.
        """
        self.file = Path(file)
        self.hits = self.misses = 0
        self.identical_to = policy
        self._inner = as_async(policy)
        self.name, self.max_concurrency = policy.name, self._inner.max_concurrency
        # A policy with an identity() of its own may have to ask its server; the first request does that.
        self._address = None if callable(getattr(policy, "identity", None)) else self._addressed()
        # If one call returns all samples of a prompt, they belong together.
        self._whole = not getattr(policy, "independent_samples", True)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mas-gym-cache")
        self._database = self._thread.submit(partial(_FORMAT.connect, self.file, create=True)).result()
        self._warned = False

    def _addressed(self) -> str:
        try:
            return digest_of(identity_of(self.identical_to))
        except IdentityError as error:
            raise IdentityError(
                f"a response cache needs to know what the samples of {self.name} depend on: {error}"
            ) from error

    @property
    def meters(self) -> Mapping[str, Meter]:
        """The inner policy's meters; samples from the cache cost nothing."""
        return meters_of(self._inner)

    async def sample_async(self, request: SamplingRequest) -> SamplingReply:
        """Answer one request. Raises `mas_gym.errors.PolicyError`."""
        loop = asyncio.get_running_loop()
        keys, found = await loop.run_in_executor(self._thread, self._look_up, request)
        if self._whole and None in found:
            found = [None] * len(keys)
        missing = [i for i, entry in enumerate(found) if entry is None]
        self.hits += len(keys) - len(missing)
        self.misses += len(missing)
        cached = 0
        if missing:
            wanted = replace(request, seeds=tuple(request.seeds[i] for i in missing))
            reply = await self._inner.sample_async(wanted)
            cached = reply.cached_tokens
            fresh = [(sample, reply.prompt_tokens, reply.dropped_tokens) for sample in reply.samples]
            for i, entry in zip(missing, fresh, strict=True):
                found[i] = entry
            await loop.run_in_executor(self._thread, self._write, [keys[i] for i in missing], fresh)
        entries = [entry for entry in found if entry is not None]
        prompt, dropped = (entries[0][1], entries[0][2]) if entries else (0, 0)
        return SamplingReply(tuple(entry[0] for entry in entries), prompt, cached if missing else prompt, dropped)

    def _look_up(self, request: SamplingRequest) -> tuple[list[bytes], list[_Found | None]]:
        """Return each sample's key and what is stored under it."""
        if self._address is None:
            self._address = self._addressed()
        keys = self._keys(self._address, request)
        found = [self._stored(key) for key in keys]
        former = getattr(self.identical_to, "former_address", None)
        if former is not None and None in found:
            old = (self._stored(key) for key in self._keys(former, request))
            found = [new or before for new, before in zip(found, old, strict=True)]
        return keys, found

    def _keys(self, address: str, request: SamplingRequest) -> list[bytes]:
        group = f"{request.seeds}|" if self._whole else ""
        parts = (f"{address}|{group}{sample_key(request, seed)}" for seed in request.seeds)
        return [blake2b(part.encode("utf-8", "surrogatepass"), digest_size=16).digest() for part in parts]

    def _stored(self, key: bytes) -> _Found | None:
        row = self._database.execute(f"SELECT {_COLUMNS} FROM samples WHERE key = ?", (key,)).fetchone()
        return None if row is None else (Sample(*row[:4]), row[4], row[5])

    def _write(self, keys: Sequence[bytes], entries: Sequence[_Found]) -> None:
        rows = [
            (k, self.name, *sample, prompt, dropped) for k, (sample, prompt, dropped) in zip(keys, entries, strict=True)
        ]
        try:
            with transaction(self._database):
                self._database.executemany("INSERT OR IGNORE INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
        except (sqlite3.OperationalError, UnicodeEncodeError) as error:
            # The reply is good even if it cannot be stored: a full disk must not fail the search.
            if not self._warned:
                self._warned = True
                logger.warning("%s: replies are not being cached: %s", self.file, error)

    def close(self) -> None:
        """Close the file; the policy cannot be used again."""
        self._thread.submit(self._database.close).result()
        self._thread.shutdown()
