"""Planners, critics and policies from a user's Python file: ``FILE.py:NAME`` or ``FILE.py:NAME:SETTINGS``.

``NAME`` is a class or function at the top level of the file. It is called with the settings, which are separated by
commas and given by position or as ``key=value``; whole numbers, decimals, ``true``, ``false`` and ``none`` are read as
such, anything else is text. It returns the planner, critic or policy. A file is imported once per version of its
contents, with its folder on ``sys.path``, so that it can import other files there.

The code runs with the user's rights, as any script does: name only files that you trust.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType
from typing import Any

import yaml

from mas_gym.errors import ConfigError, DataNotFoundError, MASGymError, UnknownNameError, shown, unknown_name

_SPEC = re.compile(r"(?P<file>.+\.py):(?P<name>[^:]*)(?::(?P<settings>.*))?", re.DOTALL)
_WORDS = {"true": True, "false": False, "none": None}


class UserCodeError(ConfigError):
    """User code raised an error, or its file cannot be imported; the cause has the whole traceback."""


def is_user_code(spec: str) -> bool:
    """Whether a string names something in a Python file.

    >>> is_user_code("ideas/my.py:Lookahead:2,3"), is_user_code("mcts:10,3")
    (True, False)
    """
    return _SPEC.fullmatch(spec) is not None


def load_user_code(what: str, spec: str) -> Any:
    """Import a file, find a class or function in it and call it.

    Args:
        what: The kind of part, for messages: ``"planner"``, ``"critic"`` or ``"policy"``.
        spec: ``FILE.py:NAME`` or ``FILE.py:NAME:SETTINGS``.

    Raises:
        DataNotFoundError: There is no such file.
        UnknownNameError: The file defines no such name.
        ConfigError: The settings do not fit.
        UserCodeError: The user's code raised; the message names its file and line.
    """
    make, args, kwargs = find_user_code(what, spec)
    try:
        inspect.signature(make).bind(*args, **kwargs)
    except TypeError as error:
        expected = f"{getattr(make, '__name__', '')}{inspect.signature(make)}"
        raise ConfigError(f"{what} {spec!r}: {error}; expected {expected}") from None
    try:
        return make(*args, **kwargs)
    except MASGymError:
        raise
    except Exception as error:
        raise UserCodeError(f"{what} {spec!r}: {blame(error, user_file(spec))}") from error


def user_file(spec: str) -> Path:
    """Return the file of ``FILE.py:NAME``."""
    return Path(spec.rpartition(".py:")[0] + ".py").expanduser()


def find_user_code(
    what: str, spec: str, fits: Callable[[Any], bool] = callable
) -> tuple[Any, list[Any], dict[str, Any]]:
    """Import a file and find a class or function in it, or something else that fits, without calling it.

    Returns:
        The class or function, and its settings by position and by name.

    Raises:
        MASGymError: As `load_user_code`, whose arguments these are.
    """
    found = _SPEC.fullmatch(spec)
    if found is None:
        raise ConfigError(f"{what} {spec!r}: expected FILE.py:NAME or FILE.py:NAME:SETTINGS")
    file, name = Path(found["file"]).expanduser(), found["name"]
    module = _import(what, file)
    make = vars(module).get(name)
    if not fits(make):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        raise unknown_name(f"class or function in {file}", name, [key for key in own if not key.startswith("_")])
    args, kwargs = read_settings(f"{what} {spec!r}", found["settings"] or "")
    return make, args, kwargs


def read_settings(
    place: str, settings: str, full: Callable[[str], str] = lambda key: key
) -> tuple[list[Any], dict[str, Any]]:
    """Read ``"10,3,leaf=bootstrap"`` as positional and named arguments.

    Args:
        place: Their origin, for messages.
        settings: The text.
        full: Maps an abbreviated name to the full one.

    Raises:
        ConfigError: A positional setting follows a named one, or a name occurs twice.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in settings.split(","))):
        key, equals, value = item.partition("=")
        if equals:
            key = full(key.strip())
            if key in kwargs:
                raise ConfigError(f"{place}: {key!r} is set twice")
            kwargs[key] = _value(value.strip())
        elif kwargs:
            raise ConfigError(f"{place}: {item!r} comes after a named setting; put it first or name it")
        else:
            args.append(_value(item))
    return args, kwargs


def unknown(what: str, name: object, known: Iterable[str], group: str) -> UnknownNameError:
    """Return the error for an unknown name, with a hint on how to add one.

    Args:
        what: The kind of thing, such as ``"planner"``.
        name: The name that was given.
        known: The names that exist.
        group: The entry-point group of packages that add names.
    """
    hint = f"to add your own, write FILE.py:NAME or register an entry point in the group {group}"
    return UnknownNameError(f"{unknown_name(what, name, known)}; {hint}")


def blame(error: BaseException, file: Path) -> str:
    """Return an error in one line, with the last line of the file in its traceback."""
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file.resolve()
    ]
    if isinstance(error, SyntaxError) and error.filename == str(file.resolve()):
        lines.append(error.lineno)
    place = f"{file}, line {lines[-1]}" if lines else str(file)
    return f"{place}: {type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"


_LIBRARY = ("mas_gym", "search", "rewardmodels")
_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def place_of(error: BaseException) -> str:
    """Return the innermost line of a user's own code in an error's traceback, ``"my.py, line 4"``; ``""`` if none.

    Code of this library and of installed packages is not the user's own.
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


def build(policy: str, make: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
    """Call ``make``; raise a `ConfigError` that lists the valid options if it does not accept one."""
    signature = inspect.signature(make)
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        takes = [name for name, p in signature.parameters.items() if p.kind is p.KEYWORD_ONLY]
        raise ConfigError(f"policy {policy!r}: {error}; it takes {', '.join(takes) or 'no options'}") from error
    return make(*arguments, **options)


def written_options(argument: str) -> tuple[str, dict[str, Any]]:
    """Split ``"ARGUMENT#option=value&option=value"``; values are YAML.

    Raises:
        ConfigError: An option has no ``=``, or its value is not valid YAML.
    """
    head, _, fragment = argument.partition("#")
    options: dict[str, Any] = {}
    for piece in filter(None, fragment.split("&")):
        key, equals, value = piece.partition("=")
        if not equals:
            raise ConfigError(f"expected option=value after '#', got {piece!r} in {argument!r}")
        options[key] = written_value(value, f"option {key}: expected a plain value")
    return head, options


def written_value(text: str, expected: str) -> Any:
    """Parse a YAML value of a policy string. Raises `ConfigError` with the text ``expected``."""
    try:
        return yaml.safe_load(text)
    except Exception as error:
        # The parser raises not only its own errors, but KeyError, ValueError, AttributeError and RecursionError too.
        raise ConfigError(f"{expected}, got {shown(text)}") from error


class _Loader(importlib.machinery.SourceFileLoader):
    """Runs given contents: the bytecode beside a file is that of an older version if both have one size and second."""

    def __init__(self, name: str, path: Path, content: bytes) -> None:
        super().__init__(name, str(path))
        self._content = content

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self._content, self.path)


def _import(what: str, file: Path) -> Any:
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
            raise UserCodeError(f"{what}: {blame(error, file)}") from error
        raise
    return module


def _value(text: str) -> Any:
    if text.casefold() in _WORDS:
        return _WORDS[text.casefold()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
