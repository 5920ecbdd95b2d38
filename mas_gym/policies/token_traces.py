"""Token traces: the token ids and log-probabilities of every sample, in Parquet files, for training on exact tokens.

`traced` wraps a policy of any kind. The wrapper requests a `TokenTrace` for each sample, writes it to a folder, and
returns the policy's replies unchanged. A trace is written before its reply is returned, so every message in a run store
has its trace, even after a crash. An open policy writes an Arrow stream (``*.arrows``), which becomes a Parquet file
when the policy is closed or deleted. `Traces` reads both.

Columns, one row per sample: ``seed`` (with ``policy``, the key), ``policy`` (digest of the policy's identity, which
includes the weights), ``agent``, ``prompt_ids``, ``completion_ids``, ``logprobs`` (nats, at temperature 1 and without
top-p), ``temperature``, ``top_p``, ``max_new_tokens`` and ``finish_reason``.
"""

from __future__ import annotations

import asyncio
import json
import os
import uuid
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mas_gym.errors import DataError, DataNotFoundError, PolicyError, StoreError, need
from mas_gym.internal.identity import digest_of, identity_of
from mas_gym.internal.json_types import JSONObject
from mas_gym.internal.parquet_rows import parquet_batches
from mas_gym.internal.whole_files import whole_file
from mas_gym.policies.base import AsyncPolicy, Policy, Sample, SamplingReply, SamplingRequest, TokenTrace
from mas_gym.policies.batch_queue import as_policy

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA = 1


def traces_folder(store: str | Path) -> Path:
    """Return the folder of the token traces of a run store."""
    return Path(f"{store}.traces")


_STREAM, _TABLE = ".arrows", ".parquet"
_FILE = 2**28
"""Decoded size in bytes at which another file is begun, so that every file can be read."""


def traced(policy: Policy | AsyncPolicy, folder: str | Path) -> AsyncPolicy:
    """Return a policy with the same replies that writes their token traces to a folder.

    Args:
        policy: A policy with an engine that returns tokens: a local model, vLLM, or a server with log-probabilities.
        folder: Folder for the traces; any number of runs and processes may share it.

    Raises:
        MissingDependencyError: pyarrow is not installed.
        IdentityError: The policy's identity cannot be determined.
    """
    need("pyarrow", "token traces", "data")
    return _TracedPolicy(as_policy(policy), Path(folder))


class _Log:
    """Writes traces to a stream, which is opened for the first trace."""

    def __init__(self, policy: AsyncPolicy, folder: Path) -> None:
        self._policy, self._folder = policy, folder
        self._digest: str | None = None
        self._stem: Path | None = None
        self._size = 0
        self._stream: tuple[pa.OSFile, pa.RecordBatchStreamWriter] | None = None

    def add(self, request: SamplingRequest, reply: SamplingReply) -> None:
        """Write the traces of a reply.

        Raises:
            PolicyError: A sample has no trace.
            StoreError: The disk is full or cannot be written to.
        """
        import pyarrow as pa

        # The identity may require a server request, so it is determined at the first reply.
        self._digest = self._digest or digest_of(identity_of(self._policy))
        samples = zip(request.seeds, reply.samples, strict=True)
        rows = [self._row(request, seed, sample) for seed, sample in samples]
        try:
            if self._stream is None:
                self._stream = self._open()
            file, writer = self._stream
            batch = pa.RecordBatch.from_pylist(rows, schema=_schema())
            writer.write_batch(batch)
            file.flush()
            self._size += batch.nbytes
            if self._size > _FILE:
                self.close()
        except OSError as error:
            raise StoreError(
                f"cannot write token traces to {self._folder}: {error}; make it writable or free some space"
            ) from error

    def _row(self, request: SamplingRequest, seed: int, sample: Sample) -> JSONObject:
        if sample.trace is None:
            raise PolicyError(
                f"{self._policy.name}: expected replies with token traces, got none; trace a local model, vLLM, or a "
                "server that returns log-probabilities, and leave out cache= and policies that replay a recording"
            )
        asked = request.temperature, request.top_p, request.max_new_tokens
        values = seed, self._digest, request.agent, *sample.trace, *asked, sample.finish_reason
        return dict(zip(_schema().names, values, strict=True))

    def _open(self) -> tuple[pa.OSFile, pa.RecordBatchStreamWriter]:
        import pyarrow as pa

        self._folder.mkdir(parents=True, exist_ok=True)
        self._stem = self._folder / f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        file = pa.OSFile(f"{self._stem}{_STREAM}", "wb")
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        return file, pa.ipc.new_stream(file, _schema(), options=options)

    def close(self) -> None:
        """Turn the stream into a Parquet file; the next trace opens another stream. Raises `StoreError`."""
        if self._stream is None:
            return
        from pyarrow import parquet

        for one in reversed(self._stream):
            one.close()
        self._stream, self._size = None, 0
        stream, table = (Path(f"{self._stem}{end}") for end in (_STREAM, _TABLE))
        if not stream.exists():
            # The folder was deleted before the policy was.
            return
        try:
            with whole_file(table) as part:
                parquet.write_table(_read_stream(stream), part, compression="zstd")
        except OSError as error:
            raise StoreError(f"cannot write {table}: {error}; the traces are kept in {stream}") from error
        stream.unlink()


def _schema() -> pa.Schema:
    import pyarrow as pa

    kinds = {
        "seed": pa.int64(),
        "policy": pa.string(),
        "agent": pa.string(),
        "prompt_ids": pa.list_(pa.int32()),
        "completion_ids": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),
        "temperature": pa.float64(),
        "top_p": pa.float64(),
        "max_new_tokens": pa.int32(),
        "finish_reason": pa.string(),
    }
    return pa.schema(list(kinds.items()), metadata={"mas_gym": json.dumps({"token traces": SCHEMA})})


class _TracedPolicy(AsyncPolicy):
    """A policy with traces; see `traced`. `close` or exit converts the open stream to a Parquet file."""

    def __init__(self, policy: AsyncPolicy, folder: Path) -> None:
        self.stand_for(policy)
        self.policy = policy
        self._log = _Log(policy, folder)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mas-gym-traces")
        weakref.finalize(self, self._log.close)

    async def sample_async(self, request: SamplingRequest) -> SamplingReply:
        reply = await self.policy.sample_async(replace(request, traced=True))
        await asyncio.get_running_loop().run_in_executor(self._thread, self._log.add, request, reply)
        return reply._replace(samples=tuple(sample._replace(trace=None) for sample in reply.samples))

    def close(self) -> None:
        self._thread.submit(self._log.close).result()


class Traced(NamedTuple):
    """A stored trace, and the name of its agent."""

    trace: TokenTrace
    agent: str


class Traces:
    """The token traces of a folder as Arrow columns in memory, indexed by sample seed.

    Args:
        folder: The folder that `traced` wrote.
        policy: Digest of a policy's identity; only its traces are read. None reads all traces.

    Raises:
        DataNotFoundError: The folder contains no traces.
        DataError: A file is damaged, too large or of a different schema.
        MissingDependencyError: pyarrow is not installed.
    """

    def __init__(self, folder: str | Path, policy: str | None = None) -> None:
        pa = need("pyarrow", "token traces", "data")
        from pyarrow import compute

        folder = Path(folder)
        stems = {path.with_suffix("") for end in (_STREAM, _TABLE) for path in folder.glob(f"*{end}")}
        tables = []
        for stem in sorted(stems):
            file = stem.with_suffix(_TABLE)
            try:
                if file.exists():
                    batches = [*parquet_batches(file)]
                    table = pa.Table.from_batches(batches) if batches else _schema().empty_table()
                else:
                    table = _read_stream(stem.with_suffix(_STREAM))
            except OSError as error:
                raise DataError(f"{stem}: expected readable token traces, got: {error}") from error
            if (table.schema.metadata or {}).get(b"mas_gym") != _schema().metadata[b"mas_gym"]:
                raise DataError(f"{stem}: expected token traces of schema {SCHEMA}, got other metadata")
            # Parquet uses different names for the elements of lists.
            tables.append(table.cast(_schema()))
        if not tables:
            raise DataNotFoundError(f"expected token traces in {folder}, found none; record some with --token-traces")
        self.table = pa.concat_tables(tables)
        if policy is not None:
            self.table = self.table.filter(compute.equal(self.table["policy"], policy))
        # Each column is combined into one chunk, so that a row is found in constant time.
        self.table = self.table.combine_chunks()
        seeds = self.table["seed"].to_numpy()
        self._order = np.argsort(seeds, kind="stable")
        self._seeds = seeds[self._order]

    def __len__(self) -> int:
        return len(self._seeds)

    def find(self, seed: int) -> Traced | None:
        """Return the trace of the sample drawn with a seed, or None."""
        place = int(np.searchsorted(self._seeds, seed))
        return self[int(self._order[place])] if place < len(self) and self._seeds[place] == seed else None

    def __getitem__(self, row: int) -> Traced:
        if not 0 <= row < len(self):
            raise IndexError(row)
        columns = ("prompt_ids", "completion_ids", "logprobs", "agent")
        *tokens, agent = (self.table[name][row].as_py() for name in columns)
        return Traced(TokenTrace(*map(tuple, tokens)), agent)


def _read_stream(file: Path) -> pa.Table:
    """Return the complete batches of a stream; its writer may have been killed."""
    import pyarrow as pa

    batches = []
    with file.open("rb") as source:
        try:
            reader = pa.ipc.open_stream(source)
            while True:
                batches.append(reader.read_next_batch())
        except (StopIteration, pa.ArrowInvalid, OSError, EOFError):
            pass
    return pa.Table.from_batches(batches, schema=_schema())
