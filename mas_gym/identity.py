"""Identity: what determines a part's results, as JSON-able values.

A run store hands back a stored search only if planner, MAS, policy, critic, grader, seed and
sampling are the same as when it was made. Each part states what determines its results::

    class Judge:
        def __init__(self, client, prompt):
            self.client, self.prompt = client, prompt

        def identity(self):
            return {"model": self.client.model, "prompt": self.prompt}

Most parts need no such method, because `identity_of` states them by itself: dataclasses by
their fields, other objects by their attributes, functions and classes of users by their
source and by what that source refers to. It refuses what it cannot state, such as an open
connection, with the path to it; define ``identity`` then, or run without a store.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import os
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from enum import Enum
from hashlib import blake2b
from pathlib import PurePath
from typing import Any, Protocol, runtime_checkable

from mas_gym.errors import IdentityError

_SHIPPED = ("mas_gym", "search", "rewardmodels")
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@runtime_checkable
class Identified(Protocol):
    """A part that states its own identity."""

    def identity(self) -> Any:
        """Return what determines this part's results.

        The value may hold whatever `identity_of` can state, other parts included. Two instances
        that can give different results for the same input must state different values; what
        cannot change a result (a server's address, a batch size) is left out, or stored runs
        would be orphaned when it changes.
        """
        ...


def identity_of(part: object) -> Any:
    """Return what determines a part's results: JSON-able, equal in every process for equal parts.

    Args:
        part: A planner, policy, critic, task or grader, or a value inside of one.

    Raises:
        IdentityError: Something in it cannot be stated.

    >>> identity_of(functools.partial(round, ndigits=2))
    {'class': 'partial', 'function': 'builtins.round', 'args': [], 'keywords': {'ndigits': 2}}
    """
    return _state(part, type(part).__name__, ())


def digest_of(identity: Any) -> str:
    """Return 32 hexadecimal digits that stand for an identity."""
    return blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=16).hexdigest()


def _state(value: object, path: str, inside: tuple[int, ...]) -> Any:
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if id(value) in inside:
        raise IdentityError(f"{path} refers back to itself; define identity() on it, or run without a store")
    inside = (*inside, id(value))
    if isinstance(value, Enum):
        return {"class": type(value).__qualname__, "name": value.name}
    if isinstance(value, bytes | bytearray):
        return {"bytes": blake2b(value, digest_size=16).hexdigest()}
    if isinstance(value, PurePath):
        return {"path": os.fspath(value)}
    if isinstance(value, Mapping):
        return _mapping(value, path, inside)
    if isinstance(value, set | frozenset):
        return {"set": sorted((_state(item, f"{path}{{}}", inside) for item in value), key=_text)}
    if isinstance(value, tuple | list) and type(value) in (tuple, list):
        return [_state(item, f"{path}[{i}]", inside) for i, item in enumerate(value)]
    return _object(value, path, inside)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _mapping(value: Mapping[Any, Any], path: str, inside: tuple[int, ...]) -> Any:
    if all(isinstance(key, str) for key in value):
        return {key: _state(item, f"{path}[{key!r}]", inside) for key, item in value.items()}
    pairs = [
        [_state(key, f"{path} key", inside), _state(item, f"{path}[{key!r}]", inside)] for key, item in value.items()
    ]
    return {"mapping": sorted(pairs, key=_text)}


def _object(value: Any, path: str, inside: tuple[int, ...]) -> Any:
    if isinstance(value, functools.partial):
        parts = {"function": value.func, "args": value.args, "keywords": value.keywords}
        return {"class": "partial"} | {name: _state(part, f"{path}.{name}", inside) for name, part in parts.items()}
    if isinstance(value, types.MethodType):
        owner = _state(value.__self__, f"{path}.__self__", inside)
        return _code_of(value.__func__) | {"of": owner}
    if isinstance(value, types.FunctionType):
        return _function(value, path, inside)
    if isinstance(value, types.BuiltinFunctionType):
        owner = value.__self__
        if owner is None or isinstance(owner, types.ModuleType):
            return f"{value.__module__}.{value.__qualname__}"
        return {"method": value.__name__, "of": _state(owner, f"{path}.__self__", inside)}
    if isinstance(value, type):
        return _code_of(value)
    stated = getattr(value, "identity", None)
    if callable(stated):
        return _code_of(type(value)) | {"identity": _state(stated(), f"{path}.identity()", inside)}
    return _code_of(type(value)) | {"fields": _fields(value, path, inside)}


def _fields(value: Any, path: str, inside: tuple[int, ...]) -> Any:
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: _state(getattr(value, name), f"{path}.{name}", inside) for name in names}
    try:
        # What copy and pickle go by; it refuses what keeps its state out of Python's sight, as locks and sockets do.
        reduced = value.__reduce_ex__(2)
    except Exception as error:
        raise IdentityError(
            f"{path}: a {type(value).__module__}.{type(value).__qualname__} cannot state what determines its results "
            f"({error}); define identity() on the part that holds it, or run without a store"
        ) from error
    if isinstance(reduced, str):
        return reduced
    _, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    if arguments[:1] == (type(value),):
        arguments = arguments[1:]
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
        # The attributes of a class with __slots__ are a pair: its __dict__, if any, and its slots.
        state = (state[0] or {}) | state[1]
    attributes = state if isinstance(state, dict) else {"state": state} if state is not None else {}
    rest = {"()": arguments, "[]": list(items or ()), "{}": dict(pairs or {})}
    stated = {name: _state(part, f"{path}.{name}", inside) for name, part in attributes.items()}
    return stated | {name: _state(part, path + name, inside) for name, part in rest.items() if part}


def _function(value: types.FunctionType, path: str, inside: tuple[int, ...]) -> Any:
    stated = _code_of(value)
    bound = {"defaults": value.__defaults__, "keywords": value.__kwdefaults__}
    contents = (cell.cell_contents for cell in value.__closure__ or ())
    cells = dict(zip(value.__code__.co_freevars, contents, strict=True))
    for name, part in (bound | {"closure": cells or None}).items():
        if part:
            stated[name] = _state(part, f"{path}.{name}", inside)
    return stated


# ------------------------------------------------------------------ source of users' code


def _code_of(part: Any) -> dict[str, Any]:
    """Name a class or function; for code of users with a digest of its source and of what that refers to."""
    name = {"class" if isinstance(part, type) else "function": part.__qualname__}
    if _is_users(part):
        digest = blake2b(digest_size=16)
        for text in _sources(part, set()):
            digest.update(text.encode("utf-8", "backslashreplace") + b"\0")
        name["source"] = digest.hexdigest()
    elif part.__module__.partition(".")[0] not in _SHIPPED:
        name["module"] = part.__module__
    return name


def _is_users(part: Any) -> bool:
    """Whether a class or function is neither this project's nor an installed package's."""
    module = sys.modules.get(part.__module__)
    if part.__module__.partition(".")[0] in (*_SHIPPED, "builtins"):
        return False
    file = getattr(module, "__file__", None)
    return file is None or not os.path.abspath(file).startswith(_INSTALLED)


def _sources(part: Any, seen: set[int]) -> Iterator[str]:
    """Yield the source of a class or function, then of the user's code and constants that it refers to."""
    if id(part) in seen or not _is_users(part):
        return
    seen.add(id(part))
    yield _source(part)
    if isinstance(part, type):
        for base in part.__mro__[1:]:
            yield from _sources(base, seen)
        members = [inspect.unwrap(_plain(member)) for member in vars(part).values()]
    else:
        members = [part]
    for function in members:
        if isinstance(function, types.FunctionType):
            for name in sorted(_names(function.__code__)):
                yield from _referred(name, function.__globals__.get(name), seen)


def _plain(member: Any) -> Any:
    """Return the function behind a property, a static or a class method."""
    return member.fget if isinstance(member, property) else getattr(member, "__func__", member)


def _referred(name: str, value: Any, seen: set[int]) -> Iterator[str]:
    if isinstance(value, type | types.FunctionType):
        yield from _sources(value, seen)
    elif value is None or isinstance(value, bool | int | float | str | tuple | list | dict | set | frozenset):
        try:
            yield f"{name}={_text(_state(value, name, ()))}"
        except IdentityError:
            # A global that holds what cannot be stated is no constant.
            return


def _names(code: types.CodeType) -> set[str]:
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _source(part: Any) -> str:
    try:
        return inspect.getsource(part)
    except (OSError, TypeError):
        # Typed at a prompt: compare what was compiled instead.
        members = vars(part).values() if isinstance(part, type) else [part]
        codes = [_plain(member).__code__ for member in members if hasattr(_plain(member), "__code__")]
        return "".join(_compiled(code) for code in codes)


def _compiled(code: types.CodeType) -> str:
    consts = [_compiled(const) if isinstance(const, types.CodeType) else repr(const) for const in code.co_consts]
    return f"{code.co_name}{code.co_code.hex()}{code.co_names}{consts}"
