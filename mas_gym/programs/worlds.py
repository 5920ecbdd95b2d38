"""Worlds of programs: folders or databases that tools change, copied for each execution.

To branch, a program is run again with its earlier replies (see `mas_gym.programs.replay`). Each execution starts with a
copy of the world as it was at the start of the run, and its tools repeat their changes on that copy. A
`mas_gym.recorded` tool is not repeated: the world is then restored to its content after the recorded use.

Each copy gets a new name, and names are never reused. Therefore concurrent branches, processes that a tool leaves
behind, and killed runs cannot change the copy of another execution.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, NamedTuple

from mas_gym.errors import ConfigError, DataError, DataNotFoundError, shown, whole_number
from mas_gym.internal.process_groups import guard_folder, make_writable, remove_guarded, remove_tree

WORLD_VARIABLE = "MAS_GYM_WORLD"
"""The environment variable with the name of the copy, for commands."""

_PART = 2**20
_CLONE = 0x40049409
"""FICLONE of Linux: the copy shares its blocks with the original until one of them is written."""
_TIME = 946_684_800
"""Modification time of restored files, 1 January 2000: a copy is determined only by its content."""


class World:
    """State that a program's tools change outside its process, such as a database.

    A *token* identifies stored content. A *copy* is the name of one execution's own instance
    of that state, such as a path or a URL. The methods are called from several threads at once.

    Example:
        >>> class Database(World):  # doctest: +SKIP
        ...     def snapshot(self, copy=None):
        ...         return dump(copy or "original")
        ...
        ...     def restore(self, token, copy=None):
        ...         return load(token, into=copy or f"copy_{uuid4().hex}")
    """

    def snapshot(self, copy: str | None = None) -> str:
        """Store the content of a copy, or of the original if ``copy`` is None, and return its token.

        Equal contents must have equal tokens, because the token of the original is part of a run's identity.
        """
        raise NotImplementedError

    def restore(self, token: str, copy: str | None = None) -> str:
        """Restore stored content into a copy, or into a new copy if ``copy`` is None; return the copy's name."""
        raise NotImplementedError

    def release(self, copy: str) -> None:
        """Remove an unused copy; does nothing by default."""

    @cached_property
    def start(self) -> str:
        """The token of the original, taken on first access; each execution starts from it."""
        return self.snapshot()

    def identity(self) -> object:
        """Return everything about the world that determines the results of programs."""
        return {"world": type(self), "start": self.start}


class _Entry(NamedTuple):
    """An entry of a folder.

    Attributes:
        name: Its path inside the folder.
        kind: ``file``, ``folder`` or ``link``.
        mode: Its permissions; 0 for links.
        content: The digest of a file, or the target of a link; empty for folders.
    """

    name: bytes
    kind: str
    mode: int
    content: bytes = b""


class Folder(World):
    """A folder as a program's world; copies are folders in the system's temporary directory.

    Files with equal content are stored once. Copies share disk blocks with the stored files if the file system
    supports it (Btrfs, XFS).
    Contents, permissions, empty folders and symbolic links are kept; ownership and timestamps are not.

    Attributes:
        path: The original folder, which is never changed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        ignore: Sequence[str] = ("__pycache__",),
        max_bytes: int = 2**30,
    ) -> None:
        """Configure the folder; `start` takes the snapshot.

        Args:
            path: The folder.
            ignore: Patterns of file and folder names, such as ``".venv"`` or ``"*.log"``, to leave out of the world.
            max_bytes: Maximum total size of the files; limited because each running or waiting execution has a copy.

        Raises:
            ConfigError: An argument is invalid.
            DataNotFoundError: There is no such folder.
        """
        self.path = Path(path).absolute()
        if not self.path.is_dir():
            raise DataNotFoundError(f"world: expected a folder at {str(path)!r}, found none")
        if isinstance(ignore, str) or not all(isinstance(pattern, str) for pattern in ignore):
            raise ConfigError(f"ignore: expected a list of patterns such as ['.venv'], got {shown(ignore)}")
        self.ignore, self.max_bytes = tuple(ignore), whole_number("max_bytes", max_bytes, at_least=0)
        self._kept: dict[str, tuple[_Entry, ...]] = {}

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the path and the token, if known; the folder must have the same token where it is unpickled."""
        return _again, (str(self.path), self.ignore, self.max_bytes, self.__dict__.get("start"))

    def identity(self) -> object:
        """Return the token of the content."""
        return {"folder": self.start}

    def snapshot(self, copy: str | None = None) -> str:
        """See `World`.

        Raises:
            DataError: The folder exceeds ``max_bytes``, or has a special file or a symbolic link that is absolute
                or leads outside.
        """
        root = os.fsencode(copy or self.path)
        entries = tuple(self._read(root, os.path.realpath(root)))
        token = blake2b(repr([tuple(entry) for entry in entries]).encode(), digest_size=16).hexdigest()
        self._kept[token] = entries
        return token

    def restore(self, token: str, copy: str | None = None) -> str:
        """See `World`; a given copy is emptied first, including ignored files."""
        if copy is None:
            copy = tempfile.mkdtemp(prefix="copy-", dir=self._store)
        else:
            _empty(copy)
        root = os.fsencode(copy)
        folders = []
        for entry in self._kept[token]:
            path = os.path.join(root, entry.name)
            if entry.kind == "link":
                os.symlink(entry.content, path)
            elif entry.kind == "folder":
                os.mkdir(path, 0o700)
                folders.append((path, entry.mode))
            else:
                with open(self._blob(entry.content), "rb") as source, open(path, "xb") as target:
                    _copy(source, target)
                os.chmod(path, entry.mode)
                os.utime(path, (_TIME, _TIME))
        # Innermost folders first, because nothing can be created in a read-only folder.
        for path, mode in reversed(folders):
            os.chmod(path, mode)
        return copy

    def release(self, copy: str) -> None:
        """Remove the copy; remaining files are removed with the store when the process ends."""
        remove_tree(copy)

    @cached_property
    def _store(self) -> str:
        """The folder with the stored files and the copies, removed when the process ends."""
        path = tempfile.mkdtemp(prefix="mas-gym-world-")
        guard_folder(path)
        weakref.finalize(self, remove_guarded, path).atexit = False
        return path

    def _blob(self, digest: bytes) -> str:
        return os.path.join(self._store, digest.decode())

    def _read(self, root: bytes, real: bytes) -> Iterator[_Entry]:
        """Store the files of a folder and yield its entries, each folder before its contents."""
        left = self.max_bytes
        waiting = [root]
        while waiting:
            folder = waiting.pop()
            try:
                found = sorted(os.scandir(folder), key=lambda item: item.name)
            except FileNotFoundError:
                # A leftover process removed it meanwhile, or the folder itself is gone.
                if folder == root:
                    raise
                continue
            for item in found:
                if any(fnmatchcase(os.fsdecode(item.name), pattern) for pattern in self.ignore):
                    continue
                name = os.path.relpath(item.path, root)
                with suppress(FileNotFoundError):
                    status = item.stat(follow_symlinks=False)
                    mode = stat.S_IMODE(status.st_mode)
                    if item.is_symlink():
                        yield _Entry(name, "link", 0, _target(item.path, name, real))
                    elif item.is_dir(follow_symlinks=False):
                        waiting.append(item.path)
                        yield _Entry(name, "folder", mode)
                    elif stat.S_ISREG(status.st_mode):
                        # Checked before the file is read.
                        digest, size = self._keep(item.path, left) if status.st_size <= left else (b"", left + 1)
                        if size > left:
                            raise DataError(
                                f"world: expected at most {self.max_bytes:,} bytes of files in {str(self.path)!r}, got "
                                f"more at {os.fsdecode(name)!r}; raise max_bytes, or add large files to ignore"
                            )
                        left -= size
                        yield _Entry(name, "file", mode, digest)
                    else:
                        raise DataError(
                            f"world: expected files, folders and symbolic links, got a special file at "
                            f"{os.fsdecode(name)!r}; remove it or add it to ignore"
                        )

    def _keep(self, path: bytes, most: int) -> tuple[bytes, int]:
        """Store a file unless it has more than ``most`` bytes; return its digest and the number of bytes read."""
        digest, size = blake2b(digest_size=20), 0
        number, name = tempfile.mkstemp(prefix="new-", dir=self._store)
        try:
            with os.fdopen(number, "wb") as target, open(path, "rb", opener=_unfollowed) as source:
                while size <= most and (part := source.read(_PART)):
                    size += len(part)
                    digest.update(part)
                    target.write(part)
            found = digest.hexdigest().encode()
            if size <= most:
                # The stored bytes are the hashed bytes, even if the file changes meanwhile.
                os.replace(name, self._blob(found))
        finally:
            with suppress(FileNotFoundError):
                os.unlink(name)
        return found, size


def _again(path: str, ignore: Sequence[str], max_bytes: int, token: str | None) -> Folder:
    folder = Folder(path, ignore=ignore, max_bytes=max_bytes)
    if token is not None and folder.start != token:
        raise DataError(
            f"world: expected {path!r} to be unchanged since the run began, got other content; keep it unchanged "
            "during the run and identical on all machines"
        )
    return folder


def _unfollowed(path: Any, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)


def _target(path: bytes, name: bytes, real: bytes) -> bytes:
    """Return the target of a symbolic link. Raises `DataError` if it is absolute or leads outside of ``real``."""
    target = os.readlink(path)
    end = os.path.realpath(path)
    if os.path.isabs(target) or not (end == real or end.startswith(real + b"/")):
        raise DataError(
            f"world: expected symbolic links to relative paths inside the folder, got {os.fsdecode(name)!r} -> "
            f"{os.fsdecode(target)!r}, through which tools could change shared files; replace it with a copy, "
            "or add it to ignore"
        )
    return target


def _copy(source: IO[bytes], target: IO[bytes]) -> None:
    """Copy a file, sharing its blocks if the file system supports it."""
    # Imported here, because Windows does not have fcntl and programs without a world do not need it.
    import fcntl

    with suppress(OSError):
        fcntl.ioctl(target.fileno(), _CLONE, source.fileno())
        return
    shutil.copyfileobj(source, target, _PART)


def _empty(folder: str) -> None:
    make_writable(folder)
    for item in os.scandir(folder):
        if item.is_dir(follow_symlinks=False):
            shutil.rmtree(item.path)
        else:
            os.unlink(item.path)
