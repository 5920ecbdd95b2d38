"""Identity: what determines a part's results, as JSON-able values.

A run store returns a stored search only if planner, MAS, policy, critic, grader, seed and
sampling parameters are unchanged. Each part states what determines its results::

    class Judge:
        def __init__(self, client, prompt):
            self.client, self.prompt = client, prompt

        def identity(self):
            return {"model": self.client.model, "prompt": self.prompt}

Most parts need no such method, because `identity_of` derives their identity: from the
fields of a dataclass, the attributes of another object, and for user-defined functions and
classes from their source and everything that the source refers to, for those of an installed
package from their module's file. It raises `IdentityError`
for what it cannot state, such as an open connection, and names the path to it. In that case
define ``identity``, or run without a store.

A wrapper that changes no results, such as a cache, sets the attribute ``identical_to`` to the
part that it wraps, and so shares its identity.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import math
import os
import re
import sys
import sysconfig
import tokenize
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from enum import Enum
from functools import cache
from hashlib import blake2b
from pathlib import Path, PurePath
from typing import Any, Protocol, runtime_checkable

from mas_gym.errors import IdentityError, PolicyError

_SHIPPED = ("mas_gym", "search", "rewardmodels")
ADDED = "added later"
"""Metadata of a dataclass field that is left out of the identity at its default, so that stored runs stay valid."""

_REMEDY = "define identity() on the part that holds it, or run without a store"
_TAGS = {"bytes", "class", "float", "function", "mapping", "method", "path", "set"}
_CONSTANTS = (bool, int, float, str, bytes, tuple, list, dict, set, frozenset, re.Pattern, Enum, functools.partial)
_PACKAGES = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})
_INSTALLED = (*_PACKAGES, *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})


@runtime_checkable
class Identified(Protocol):
    """A part that states its own identity."""

    def identity(self) -> Any:
        """Return what determines this part's results.

        The value may contain anything that `identity_of` can state, including other parts. Two
        instances that can give different results for the same input must return different
        values. Leave out what cannot change a result, such as a server's address or a batch
        size; otherwise a change there would orphan stored runs.
        """


def identity_of(part: object) -> Any:
    """Return what determines a part's results: JSON-able, equal in every process for equal parts.

    Args:
        part: A planner, policy, critic, task or grader, or a value inside one.

    Raises:
        IdentityError: The part contains something that has no identity.

    >>> identity_of(functools.partial(round, ndigits=2))
    {'class': 'partial', 'function': 'builtins.round', 'args': [], 'keywords': {'ndigits': 2}}
    """
    inner = getattr(part, "identical_to", None)
    part = part if inner is None else inner
    path = type(part).__name__
    try:
        return _state(part, path, ())
    except RecursionError as error:
        raise IdentityError(f"{path} is nested too deeply; {_REMEDY}") from error


def digest_of(identity: Any) -> str:
    """Return a digest of an identity, 32 hexadecimal digits."""
    return blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=16).hexdigest()


def _state(value: object, path: str, inside: tuple[int, ...]) -> Any:
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if id(value) in inside:
        raise IdentityError(f"{path} refers back to itself; {_REMEDY}")
    inside = (*inside, id(value))
    if isinstance(value, Enum):
        return {"class": type(value).__qualname__, "name": value.name, "value": _state(value.value, path, inside)}
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
    # A mapping that could be mistaken for another kind of value is written as pairs.
    if all(type(key) is str for key in value) and not _TAGS & set(value):
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
    if isinstance(wrapped := getattr(value, "__wrapped__", None), types.FunctionType):
        # The result of functools.lru_cache and similar decorators.
        return {"class": type(value).__qualname__, "of": _state(wrapped, f"{path}.__wrapped__", inside)}
    inner = getattr(value, "identical_to", None)
    if inner is not None:
        return _state(inner, f"{path}.identical_to", inside)
    stated = getattr(value, "identity", None)
    if callable(stated):
        return _code_of(type(value)) | {"identity": _state(_called(stated, path), f"{path}.identity()", inside)}
    return _code_of(type(value)) | {"fields": _fields(value, path, inside)}


def _called(identity: Callable[[], Any], path: str) -> Any:
    try:
        return identity()
    except PolicyError:
        # An unreachable server has its own error, with its own remedy.
        raise
    except Exception as error:
        raise IdentityError(f"{path}.identity() raised {type(error).__name__}: {error}") from error


def _fields(value: Any, path: str, inside: tuple[int, ...]) -> Any:
    if dataclasses.is_dataclass(value):
        stated = {
            field.name: getattr(value, field.name)
            for field in dataclasses.fields(value)
            if not (field.metadata.get(ADDED) and getattr(value, field.name) == field.default)
        }
        return {name: _state(part, f"{path}.{name}", inside) for name, part in stated.items()}
    try:
        # The protocol of copy and pickle; it fails for objects with hidden state, such as locks and sockets.
        reduced = value.__reduce_ex__(2)
    except Exception as error:
        raise IdentityError(
            f"{path}: a {type(value).__module__}.{type(value).__qualname__} cannot state what determines its results "
            f"({error}); {_REMEDY}"
        ) from error
    if isinstance(reduced, str):
        return reduced
    _, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    if arguments and arguments[0] is type(value):
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
    for name, part in (bound | {"closure": _closure(value) or None}).items():
        if part:
            stated[name] = _state(part, f"{path}.{name}", inside)
    return stated


def _closure(function: types.FunctionType) -> dict[str, Any]:
    """Return the values of a function's closure variables; unset ones are left out."""
    cells = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):
            cells[name] = cell.cell_contents
    return cells


# ------------------------------------------------------------------ source of user code

_being_stated: ContextVar[tuple[int, ...]] = ContextVar("being_stated", default=())
"""Classes and functions that are being stated now, to stop at code that refers to itself."""


def _code_of(part: Any) -> dict[str, Any]:
    """Name a class or function, with a digest of the source it depends on; if installed, of its module's file."""
    name = {"class" if isinstance(part, type) else "function": part.__qualname__}
    outer = _being_stated.get()
    if _is_users(part):
        if id(part) not in outer:
            token = _being_stated.set((*outer, id(part)))
            try:
                name["source"] = _digest(_sources(part, set()))
            finally:
                _being_stated.reset(token)
    elif (module := _module_of(part)).partition(".")[0] not in _SHIPPED:
        name["module"] = module
        if (digest := _file_digest(getattr(sys.modules.get(module), "__file__", None))) is not None:
            name["source"] = digest
    return name


@cache
def _file_digest(file: str | None) -> str | None:
    """Return a digest of an installed package's module, so that a store does not answer for another version of it."""
    if file is None or not file.endswith(".py") or not os.path.abspath(file).startswith(_PACKAGES):
        return None
    return _digest([Path(file).read_text(encoding="utf-8", errors="backslashreplace")])


def _digest(texts: Iterable[str]) -> str:
    digest = blake2b(digest_size=16)
    for text in texts:
        digest.update(text.encode("utf-8", "backslashreplace") + b"\0")
    return digest.hexdigest()


def _module_of(part: Any) -> str:
    return str(getattr(part, "__module__", None) or "")


def _is_users(part: Any) -> bool:
    """Whether a class, function or module belongs neither to this project nor to an installed package."""
    name = part.__name__ if isinstance(part, types.ModuleType) else _module_of(part)
    if name.partition(".")[0] in (*_SHIPPED, "builtins"):
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is None or not os.path.abspath(file).startswith(_INSTALLED)


def _sources(part: Any, seen: set[int]) -> Iterator[str]:
    """Yield the source of a class or function, then of the user code and constants that it refers to."""
    if id(part) in seen or not _is_users(part):
        return
    seen.add(id(part))
    if isinstance(part, types.FunctionType):
        yield from _function_sources(part, seen)
        return
    yield _source(part)
    for base in part.__mro__[1:]:
        yield from _sources(base, seen)
    for name, member in sorted(vars(part).items()):
        functions = _functions(member)
        for function in functions:
            # The class's source is not enough: a class can be changed after its definition, or built by a function.
            yield from _sources(function, seen)
            for variable, value in _closure(function).items():
                yield from _variable(f"{name}.{variable}", value, seen, strict=True)
        if not functions and not (name.startswith("__") and name.endswith("__")):
            yield from _variable(name, member, seen)


def _function_sources(function: types.FunctionType, seen: set[int]) -> Iterator[str]:
    yield _source(function)
    names = sorted(_names(function.__code__))
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, types.ModuleType) and _is_users(value):
            for attribute in names:
                yield from _variable(f"{name}.{attribute}", vars(value).get(attribute), seen)
        else:
            yield from _variable(name, value, seen)


def _functions(member: Any) -> list[types.FunctionType]:
    """Return the functions of a class member: a method, property or cached property has one or more."""
    parts = [member, *(getattr(member, name, None) for name in ("fget", "fset", "func", "__func__", "__wrapped__"))]
    return [part for part in parts if isinstance(part, types.FunctionType)]


def _variable(name: str, value: Any, seen: set[int], strict: bool = False) -> Iterator[str]:
    """Yield what a name means to the code that uses it: source if it is code, else its identity.

    Args:
        name: The name.
        value: Its value; None if there is none.
        seen: Ids of the code already visited.
        strict: Whether a value that cannot be stated is an error; globals may be caches or clients.

    Raises:
        IdentityError: ``strict``, and the value cannot be stated.
    """
    value = inspect.unwrap(value) if callable(value) else value
    if isinstance(value, type | types.FunctionType):
        yield from _sources(value, seen)
        return
    if value is None or not (strict or isinstance(value, _CONSTANTS) or _is_users(type(value))):
        return
    try:
        yield f"{name}={_text(_state(value, name, ()))}"
    except IdentityError:
        if strict:
            raise


def _names(code: types.CodeType) -> set[str]:
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _source(part: Any) -> str:
    code = getattr(part, "__code__", None)
    try:
        if code is not None and code.co_name == "<lambda>":
            return _lambda_source(code)
        # From the code object: for a decorated function, getsource would return the inner function's source.
        return inspect.getsource(part if code is None else code)
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):
        # Typed at a prompt, or executed from a string: use the compiled code instead.
        return "" if code is None else _compiled(code)


def _lambda_source(code: types.CodeType) -> str:
    """Return the expression of a lambda, whose lines may contain others.

    Raises:
        OSError: It cannot be found.
    """
    lines, _ = inspect.findsource(code)
    places = [p for p in code.co_positions() if None not in p and p[2:] != (0, 0)]
    span = (min((p[0], p[2]) for p in places), max((p[1], p[3]) for p in places)) if places else None
    text = "".join(lines)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Lambda):
            body: Any = node.body
            if ((body.lineno, body.col_offset), (body.end_lineno, body.end_col_offset)) == span:
                return ast.get_source_segment(text, node) or ""
    raise OSError("no such lambda")


def _compiled(code: types.CodeType) -> str:
    consts = [_compiled(const) if isinstance(const, types.CodeType) else _constant(const) for const in code.co_consts]
    return f"{code.co_name}{code.co_code.hex()}{code.co_names}{consts}"


def _constant(value: object) -> str:
    # The order of a set of strings differs between processes.
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)
