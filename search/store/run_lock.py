"""The lock of a run in a store: one writer per run, across processes and file handles."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from mas_gym.errors import StoreError
from mas_gym.internal.whole_files import locked


@contextmanager
def run_lock(path: Path, run: str) -> Iterator[None]:
    """Hold the exclusive writer lock of a run; the operating system releases it when the process dies.

    The lock is an exclusive `flock` on a separate file per run next to the store. Windows has none.

    Raises:
        StoreError: Another writer holds the lock.
    """
    file, owner = Path(f"{os.path.realpath(path)}-lock-{run[:16]}"), os.getpid()
    # The last owner may delete the file between the two steps.
    for _ in range(3):
        with ExitStack() as entered:
            try:
                file.touch()
                held = entered.enter_context(locked(file, wait=False))
            except OSError as error:
                raise StoreError(f"store lock {file}: {error.strerror}; check that its folder is writable") from error
            if held or os.name == "nt":
                try:
                    yield
                finally:
                    # Delete before unlocking; a forked child deletes nothing.
                    if os.getpid() == owner:
                        with suppress(OSError):
                            file.unlink()
                return
    raise StoreError(
        f"store {path}: another process is writing this run (the same planner, seed and settings); "
        "wait for it, or use another store"
    )
