"""Import a user's Python file, and find the line of a user's file in a traceback."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import re
import sys
import sysconfig
import traceback
from pathlib import Path
from types import CodeType, ModuleType

from mas_gym.errors import DataNotFoundError, UserCodeError

_LIBRARY = ("mas_gym", "search", "rewardmodels")
_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class _Loader(importlib.machinery.SourceFileLoader):
    """Runs the given source and ignores bytecode, which may be stale if an edited file has the same size and mtime."""

    def __init__(self, name: str, path: Path, content: bytes) -> None:
        super().__init__(name, str(path))
        self._content = content

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self._content, self.path)


def import_file(what: str, file: Path) -> ModuleType:
    """Import a Python file, once per version of its contents, with its folder on ``sys.path``.

    Raises:
        DataNotFoundError: The file does not exist.
        UserCodeError: The file cannot be imported; the message contains the line.
    """
    try:
        content = file.read_bytes()
    except (OSError, ValueError) as error:
        raise DataNotFoundError(f"{what}: expected a Python file at {str(file)!r}, found none ({error})") from error
    path = file.resolve()
    # The name includes a digest of the contents: a changed file is imported again, an unchanged one is reused.
    stamp = hashlib.blake2b(str(path).encode("utf-8", "surrogateescape") + b"\0" + content, digest_size=8).hexdigest()
    name = f"mas_gym_user_{re.sub(r'[^0-9A-Za-z_]', '_', file.stem)}_{stamp}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path, loader=_Loader(name, path, content))
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, Exception):
            raise UserCodeError(f"{what}: {error_with_line(error, file)}") from error
        raise
    return module


def error_with_line(error: BaseException, file: Path) -> str:
    """Return an error as one line of text, with the innermost line number of ``file`` in its traceback."""
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file.resolve()
    ]
    if isinstance(error, SyntaxError) and error.filename == str(file.resolve()):
        lines.append(error.lineno)
    place = f"{file}, line {lines[-1]}" if lines else str(file)
    return f"{place}: {type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"


def place_of(error: BaseException) -> str:
    """Return the innermost line of user code in an error's traceback, ``"my.py, line 4"``; ``""`` if there is none.

    Code of this library and of installed packages is not user code.
    """
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        for frame, line in reversed(list(traceback.walk_tb(found.__traceback__))):
            file = frame.f_code.co_filename
            library = str(frame.f_globals.get("__name__")).partition(".")[0] in _LIBRARY
            if not library and not file.startswith((*_INSTALLED, "<frozen ")):
                return f"{os.path.basename(file)}, line {line}"
        found = found.__cause__ or found.__context__
    return ""
