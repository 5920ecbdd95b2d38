"""Files and folders that are written completely or not at all.

Writers write beside the target, synchronize and rename, so a crash at any time leaves the old or the new version. Of
several processes that write one path, the last one wins. What a killed writer left is dropped by the next writer.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex

_WRITTEN = ".saved"
"""The folder with the complete files of a model that are not yet moved to their places."""

_OLD = ".old"
"""The file in `_WRITTEN` with the names of the old version's weights that the new version does not replace."""

_WEIGHTS = re.compile(r"[^/\\:\n]+\.safetensors(\.index\.json)?")


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Provide a temporary path with the same suffix; rename it to ``path`` if the block ends without an error.

    A device or a pipe, such as ``/dev/stdout``, is written directly.

    Raises:
        OSError: The file cannot be written.
    """
    path = Path(path)
    if path.is_relative_to("/dev") or (path.exists() and not path.is_file()):
        yield path
        return
    # A symbolic link is kept; the file that it names is replaced.
    path = Path(os.path.realpath(path))
    with _temporary(path.parent, f".{path.name}.", path.suffix, Path.touch) as part:
        yield part
        if path.exists():
            shutil.copymode(path, part)
        _sync(part)
        os.replace(part, path)
    _sync(path.parent)


def write_file(path: str | os.PathLike[str], text: str) -> None:
    """Write a UTF-8 text with `whole_file`. Raises `OSError`."""
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8")


def replace_files(folder: Path, write: Callable[[Path], None], mark: str) -> None:
    """Write several files of a folder as one version; other files in the folder are kept, apart from old weights.

    Args:
        folder: The folder; created if missing.
        write: Writes all files into an empty folder, including ``mark``.
        mark: The file that marks a complete version; it is moved last.

    Raises:
        OSError: A file cannot be written. Errors of ``write`` are also raised. The old version is kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    finish_replacing(folder, mark)
    with _temporary(folder, ".saving-", "", Path.mkdir) as fresh:
        write(fresh)
        # Libraries would load weights of another layout in place of the new ones, or in addition to them.
        old = {path.name for path in folder.iterdir()} - {path.name for path in fresh.iterdir()}
        (fresh / _OLD).write_text("\n".join(sorted(filter(_WEIGHTS.fullmatch, old))), encoding="utf-8")
        for path in [*fresh.rglob("*"), fresh]:
            _sync(path)
        while True:
            try:
                os.rename(fresh, folder / _WRITTEN)
                break
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                # Another process has just written a version.
                finish_replacing(folder, mark)
    _sync(folder)
    finish_replacing(folder, mark)


def finish_replacing(folder: Path, mark: str) -> None:
    """Move the files of a complete version that a killed process left beside the old one; readers call this first.

    Raises:
        OSError: A file cannot be moved.
    """
    written = folder / _WRITTEN
    # Another person's folder must not make us move files from elsewhere.
    if written.is_symlink() or not written.is_dir():
        return
    # Another process may be moving the same files; then it has moved them when this one has the lock.
    with locked(written) as held:
        if not held:
            return
        if (old := written / _OLD).is_file():
            for name in filter(_WEIGHTS.fullmatch, old.read_text(encoding="utf-8", errors="replace").splitlines()):
                (folder / name).unlink(missing_ok=True)
            old.unlink()
        for name in sorted(os.listdir(written), key=lambda name: name == mark):
            if (folder / name).is_dir() and not (folder / name).is_symlink():
                shutil.rmtree(folder / name)
            os.replace(written / name, folder / name)
        # Another process may have put the next version in the place of the empty folder.
        with suppress(OSError):
            written.rmdir()
    _sync(folder)


@contextmanager
def _temporary(folder: Path, prefix: str, suffix: str, create: Callable[[Path], None]) -> Iterator[Path]:
    """Create a file or folder with a random name and lock it while it is in use; delete it after an error."""
    name = re.compile(re.escape(prefix) + "[0-9a-f]{16}" + re.escape(suffix))
    with suppress(OSError):
        for old in [path for path in folder.iterdir() if name.fullmatch(path.name) and not path.is_symlink()]:
            with locked(old, wait=False) as abandoned:
                if abandoned:
                    _remove(old)
    while True:
        path = folder / f"{prefix}{token_hex(8)}{suffix}"
        create(path)
        with locked(path) as held:
            if not held:
                continue
            try:
                yield path
            except BaseException:
                _remove(path)
                raise
            return


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Lock a file or folder; the result is False if it is gone or, without ``wait``, if a process has locked it."""
    if os.name == "nt":
        # Windows cannot rename a file that is open.
        yield wait
        return
    import fcntl

    try:
        # Some network file systems lock only files that are open for writing.
        number = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    except FileNotFoundError:
        yield False
        return
    held = True
    try:
        fcntl.flock(number, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        # Some network file systems have no locks.
        held = wait
    same = False
    with suppress(FileNotFoundError):
        same = os.path.samestat(os.fstat(number), os.stat(path))
    try:
        yield held and same
    finally:
        os.close(number)


def _sync(path: Path) -> None:
    """Write a file's data, or a folder's list of names, to the disk."""
    # Windows cannot synchronize folders, and some file systems refuse to.
    with suppress(*([OSError] if path.is_dir() else [])):
        number = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
        try:
            os.fsync(number)
        finally:
            os.close(number)
