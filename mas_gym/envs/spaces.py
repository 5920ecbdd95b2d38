"""Spaces for text, with the hooks that asynchronous vector environments need.

`gymnasium.spaces.Text` cannot represent the output of language models: its characters must
be listed one by one, and its shared-memory reader always returns the first value.
"""

from __future__ import annotations

import multiprocessing as mp
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from ctypes import c_uint8
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from gymnasium.spaces import Space
from gymnasium.spaces.utils import flatdim, flatten_space
from gymnasium.vector.utils import (
    create_empty_array,
    create_shared_memory,
    read_from_shared_memory,
    write_to_shared_memory,
)

from mas_gym.errors import ConfigError, DataError, whole_number
from mas_gym.internal.text import name_of

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import SynchronizedArray

T = TypeVar("T")

MAX_SHARED_BYTES = 1 << 30
_SAMPLE_CHARACTERS = 48
_SAMPLE_ROWS = 4
# Latin twice, because most text is Latin; then accents, Greek, Hebrew (right to left), Chinese, emoji, whitespace.
_BLOCKS = (
    (0x20, 0x7F),
    (0x20, 0x7F),
    (0xC0, 0x180),
    (0x391, 0x3AA),
    (0x5D0, 0x5EB),
    (0x4E00, 0x5000),
    (0x1F600, 0x1F640),
    (0x09, 0x0B),
)


def utf8_length(text: str) -> int:
    """Return the size of a text in bytes of UTF-8; a lone surrogate counts as three bytes."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


class Unicode(Space[str]):
    """All texts of at most ``max_bytes`` bytes of UTF-8, in any script, including empty and multi-line ones.

    Args:
        max_bytes: Maximum size, at least 0.
        seed: Seed of the sampling generator.
    """

    def __init__(self, max_bytes: int = 65_536, seed: int | None = None) -> None:
        """Build the space; nothing is allocated."""
        self.max_bytes = whole_number("max_bytes", max_bytes, at_least=0)
        super().__init__(None, None, seed)

    @property
    def is_np_flattenable(self) -> bool:
        """False, because texts are not arrays."""
        return False

    def contains(self, x: object) -> bool:
        """Return whether x is a str within the limit."""
        return isinstance(x, str) and len(x) <= self.max_bytes and utf8_length(x) <= self.max_bytes

    def sample(self, mask: object = None, probability: object = None) -> str:
        """Return a short random text that mixes scripts; masks are not supported."""
        if mask is not None or probability is not None:
            raise ConfigError(
                "expected no mask for a Unicode space; pass None in its place, as in space.sample((None, mask))"
            )
        text, room = [], self.max_bytes
        for _ in range(int(self.np_random.integers(_SAMPLE_CHARACTERS + 1))):
            low, high = _BLOCKS[int(self.np_random.integers(len(_BLOCKS)))]
            character = chr(int(self.np_random.integers(low, high)))
            room -= utf8_length(character)
            if room < 0:
                break
            text.append(character)
        return "".join(text)

    def encode(self, value: str) -> bytes:
        """Return the shared-memory form of a text."""
        return value.encode("utf-8", "surrogatepass")

    def decode(self, raw: bytes) -> str:
        """Return the text from its shared-memory form."""
        return raw.decode("utf-8", "surrogatepass")

    def empty(self) -> str:
        """Return the smallest element."""
        return ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unicode) and self.max_bytes == other.max_bytes

    def __hash__(self) -> int:
        return hash(("Unicode", self.max_bytes))

    def __repr__(self) -> str:
        return f"Unicode({self.max_bytes})"


Record = tuple[str | int, ...]


class Records(Space[tuple[Record, ...]]):
    """Tuples of records of one NamedTuple type, with texts and bounded integers as fields.

    Args:
        record: The NamedTuple class, such as `mas_gym.Message`.
        fields: One entry per field: None for a text, ``n`` for an integer in ``range(n)``.
        max_rows: Maximum number of records.
        max_bytes: Maximum size of all texts together, in bytes of UTF-8.
        seed: Seed of the sampling generator.
    """

    def __init__(
        self,
        record: Callable[..., Record],
        fields: Sequence[int | None],
        max_rows: int,
        max_bytes: int,
        seed: int | None = None,
    ) -> None:
        """Build the space; nothing is allocated."""
        self.record = record
        self.fields = tuple(fields)
        self.max_rows = max_rows
        self.max_bytes = max_bytes
        super().__init__(None, None, seed)

    @property
    def is_np_flattenable(self) -> bool:
        """False, because texts are not arrays."""
        return False

    def contains(self, x: object) -> bool:
        """Return whether x is a tuple of records within the limits."""
        if not isinstance(x, tuple) or len(x) > self.max_rows:
            return False
        size = 0
        for row in x:
            if type(row) is not self.record or len(row) != len(self.fields):
                return False
            for value, limit in zip(row, self.fields, strict=True):
                if limit is None:
                    if not isinstance(value, str):
                        return False
                    size += utf8_length(value)
                elif not isinstance(value, int) or not 0 <= value < limit:
                    return False
        return size <= self.max_bytes

    def sample(self, mask: object = None, probability: object = None) -> tuple[Record, ...]:
        """Return up to four random records; masks are not supported."""
        if mask is not None or probability is not None:
            raise ConfigError("expected no mask for a Records space; pass None in its place")
        rows, room = [], self.max_bytes
        text = Unicode()
        text._np_random = self.np_random
        for _ in range(int(self.np_random.integers(min(self.max_rows, _SAMPLE_ROWS) + 1))):
            row = self.record(*(text.sample() if n is None else int(self.np_random.integers(n)) for n in self.fields))
            room -= sum(utf8_length(value) for value in row if isinstance(value, str))
            if room < 0:
                break
            rows.append(row)
        return tuple(rows)

    def to_jsonable(self, sample_n: Iterable[tuple[Record, ...]]) -> list[list[list[str | int]]]:
        """Return samples as nested lists."""
        return [[list(row) for row in rows] for rows in sample_n]

    def from_jsonable(self, sample_n: list[list[list[str | int]]]) -> list[tuple[Record, ...]]:
        """Return samples from nested lists."""
        return [tuple(self.record(*row) for row in rows) for rows in sample_n]

    def encode(self, value: tuple[Record, ...]) -> bytes:
        """Return the shared-memory form of a tuple: integers and text lengths, then the texts."""
        texts = [[v.encode("utf-8", "surrogatepass") if isinstance(v, str) else v for v in row] for row in value]
        header = [v if isinstance(v, int) else len(v) for row in texts for v in row]
        body = b"".join(v for row in texts for v in row if isinstance(v, bytes))
        return struct.pack(f"<{len(header) + 1}q", len(value), *header) + body

    def decode(self, raw: bytes) -> tuple[Record, ...]:
        """Return the tuple from its shared-memory form."""
        (rows,) = struct.unpack_from("<q", raw)
        width = len(self.fields)
        header = struct.unpack_from(f"<{rows * width}q", raw, 8)
        at = 8 * (1 + rows * width)
        records = []
        for i in range(rows):
            row: list[str | int] = []
            for limit, number in zip(self.fields, header[i * width : (i + 1) * width], strict=True):
                if limit is None:
                    row.append(raw[at : at + number].decode("utf-8", "surrogatepass"))
                    at += number
                else:
                    row.append(number)
            records.append(self.record(*row))
        return tuple(records)

    def empty(self) -> tuple[Record, ...]:
        """Return the smallest element."""
        return ()

    def __eq__(self, other: object) -> bool:
        """Compare the record types and limits."""
        return isinstance(other, Records) and self._key() == other._key()

    def __hash__(self) -> int:
        """Hash the record type and limits."""
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        return self.record, self.fields, self.max_rows, self.max_bytes

    def __repr__(self) -> str:
        return f"Records({name_of(self.record)}, {self.fields}, {self.max_rows}, {self.max_bytes})"


TextSpace = Unicode | Records


def _slot_bytes(space: TextSpace) -> int:
    """Return the size of one environment's slot: the length field and the largest encoding."""
    header = 8 * (1 + space.max_rows * len(space.fields)) if isinstance(space, Records) else 0
    return 8 + header + space.max_bytes


class SharedBatch(Sequence[str | tuple[Record, ...]]):
    """Observations of an asynchronous vector environment: decoded on access; a deep copy is a plain tuple."""

    def __init__(self, space: TextSpace, memory: SynchronizedArray[c_uint8], n: int) -> None:
        """Wrap ``n`` slots of shared memory."""
        self._space = space
        self._memory = memory
        self._n = n

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: Any) -> Any:
        """Decode one slot, or a slice of them."""
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(self._n)))
        if not -self._n <= index < self._n:
            raise IndexError(f"expected an environment index from 0 to {self._n - 1}, got {index}")
        size = _slot_bytes(self._space)
        view = memoryview(self._memory.get_obj()).cast("B")
        start = (index % self._n) * size
        (length,) = struct.unpack_from("<q", view, start)
        return self._space.decode(bytes(view[start + 8 : start + 8 + length])) if length else self._space.empty()

    def __iter__(self) -> Iterator[str | tuple[Record, ...]]:
        return (self[i] for i in range(self._n))

    def __deepcopy__(self, memo: dict[int, object]) -> tuple[str | tuple[Record, ...], ...]:
        """Return the current values, because vector environments return deep copies of their observations."""
        return tuple(self)


@flatdim.register(Unicode)
@flatdim.register(Records)
@flatten_space.register(Unicode)
@flatten_space.register(Records)
def _refuse_to_flatten(space: TextSpace) -> NoReturn:
    raise ConfigError(
        f"expected a space of numbers to flatten, got {space!r}; for numeric observations, use "
        "mas_gym.CandidateFeatures(mas_gym.CandidateChoice(env, policy, n))"
    )


@create_shared_memory.register(Unicode)
@create_shared_memory.register(Records)
def _create_shared(space: TextSpace, n: int = 1, ctx: ModuleType = mp) -> SynchronizedArray[c_uint8]:
    size = n * _slot_bytes(space)
    if size > MAX_SHARED_BYTES:
        raise ConfigError(
            f"expected at most {MAX_SHARED_BYTES / 2**20:.0f} MiB of shared memory for {space!r}, got "
            f"{size / 2**20:.0f} MiB for {n} environments; use a smaller max_bytes, or shared_memory=False in "
            "vector_kwargs"
        )
    memory: SynchronizedArray[c_uint8] = ctx.Array(c_uint8, size)
    return memory


@read_from_shared_memory.register(Unicode)
@read_from_shared_memory.register(Records)
def _read_shared(space: TextSpace, shared_memory: SynchronizedArray[c_uint8], n: int = 1) -> SharedBatch:
    return SharedBatch(space, shared_memory, n)


@write_to_shared_memory.register(Unicode)
@write_to_shared_memory.register(Records)
def _write_shared(space: TextSpace, index: int, value: Any, shared_memory: SynchronizedArray[c_uint8]) -> None:
    raw = space.encode(value)
    size = _slot_bytes(space)
    if len(raw) + 8 > size:
        raise DataError(f"expected a value that fits {space!r}, got {len(raw)} bytes; use a larger max_bytes")
    view = memoryview(shared_memory.get_obj()).cast("B")
    start = index * size
    struct.pack_into("<q", view, start, len(raw))
    view[start + 8 : start + 8 + len(raw)] = raw


@create_empty_array.register(Unicode)
@create_empty_array.register(Records)
def _create_empty(
    space: TextSpace, n: int = 1, fn: Callable[..., object] | None = None
) -> tuple[str | tuple[Record, ...], ...]:
    return tuple(space.empty() for _ in range(n))
