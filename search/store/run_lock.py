"""The lock of a run in a store: one writer per run, across processes and file handles."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO

from mas_gym.errors import StoreError

# POSIX systems that emulate flock by record locks (NFS) drop the locks when any handle of the file is closed, so this
# process never opens a lock file that it has locked.
_HELD: set[str] = set()


class RunLock:
    """An exclusive writer lock on a run; the operating system releases it when the process dies.

    The lock is an exclusive `flock` on a separate file per run next to the store. It belongs to this handle: closing
    other handles, in this process or another, does not release it. On Windows, it is a lock on the file's first byte,
    with the same property, and the empty file remains.
    """

    def __init__(self, path: Path, run: str) -> None:
        """Acquire the lock.

        Raises:
            StoreError: Another writer holds the lock.
        """
        self._path = f"{os.path.realpath(path)}-lock-{run[:16]}"
        self._owner = os.getpid()
        file = None if self._path in _HELD else _locked(self._path)
        if file is None:
            raise StoreError(
                f"store {path}: another process is writing this run (the same planner, seed and settings); "
                "wait for it, or use another store"
            )
        self._file = file
        _HELD.add(self._path)

    def close(self) -> None:
        """Release the lock; safe to call twice. In a forked child, this closes only the child's handle."""
        if self._file.closed:
            return
        if os.getpid() == self._owner:
            # Delete before unlocking, so that a process waiting for this file finds it deleted and creates another.
            with suppress(OSError):
                os.unlink(self._path)
            _unlock(self._file)
            _HELD.discard(self._path)
        self._file.close()


def _locked(path: str) -> IO[bytes] | None:
    """Open and lock a file; None if another handle has the lock."""
    while True:
        try:
            file = open(path, "a+b")  # noqa: SIM115 - held until the lock is released
        except OSError as error:
            raise StoreError(f"store lock {path}: {error.strerror}; check that its folder is writable") from error
        if not _lock(file):
            file.close()
            return None
        # The last owner may have deleted the file after we opened it.
        with suppress(OSError):
            if os.path.samestat(os.stat(path), os.fstat(file.fileno())):
                return file
        file.close()


if sys.platform == "win32":
    import msvcrt

    def _lock(file: IO[bytes]) -> bool:
        file.seek(0)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

    def _unlock(file: IO[bytes]) -> None:
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _lock(file: IO[bytes]) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def _unlock(file: IO[bytes]) -> None:
        # Closing is not sufficient, because a forked child may still have the handle.
        fcntl.flock(file, fcntl.LOCK_UN)
