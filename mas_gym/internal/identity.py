"""Identity: a JSON-serialisable description of everything that determines a component's results.

A run store returns a stored search only if planner, MAS, policy, critic, grader, seed and
sampling parameters are unchanged. A component can define its identity::

    class Judge:
        def __init__(self, client, prompt):
            self.client, self.prompt = client, prompt

        def identity(self):
            return {"model": self.client.model, "prompt": self.prompt}

The value may contain anything that `identity_of` accepts, including other components. Leave out
attributes that cannot affect a result, such as a server's address or a batch size; otherwise a change
to one of them would invalidate stored runs.

Most components need no such method, because `identity_of` derives their identity: from the
fields of a dataclass, from the attributes of any other object, and for user-defined functions and
classes from their file, the user's files that it imports, and the versions of the installed
distributions that these files import. A distribution is identified by its metadata, regardless of where it is
installed; one installed in editable mode is treated as the user's files. If `identity_of` cannot
determine the identity, for example that of an open connection, it raises `IdentityError` with the path
to the attribute. In that case define ``identity``, or run without a store.

A wrapper that does not change results, such as a cache, sets the attribute ``identical_to`` to the
wrapped component and so has the same identity.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import os
import sys
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from enum import Enum
from hashlib import blake2b
from pathlib import Path, PurePath
from typing import Any, TypeVar

from mas_gym.errors import IdentityError, PolicyError, shown_url
from mas_gym.internal.adapter import wrapped_part
from mas_gym.internal.json_types import JSONObject, JSONValue
from mas_gym.internal.source_files import (
    NO_CODE,
    STANDARD,
    Code,
    distributions_of,
    file_of,
    is_standard,
    parse_source,
    shown_file,
)

T = TypeVar("T")
R = TypeVar("R")

_SHIPPED = ("mas_gym", "search", "rewardmodels")
ADDED = "added later"
"""Metadata of a dataclass field that the identity omits at its default, so that stored runs stay valid."""

_REMEDY = "define identity() on the object that contains it, or run without a store"
_TAGS = {"bytes", "class", "float", "function", "mapping", "method", "path", "set"}
_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_UNKNOWN = object()
_LONGEST_VALUE = 200
"""Maximum length of a module variable that is included in full, in characters of JSON."""


def identity_of(part: object) -> JSONValue:
    """Return a component's identity: JSON-serialisable, and equal in every process for equal components.

    Args:
        part: A planner, policy, critic, task or grader, or a value inside one.

    Raises:
        IdentityError: The component contains an object without an identity.

    >>> identity_of(functools.partial(round, ndigits=2))
    {'class': 'partial', 'function': 'builtins.round', 'args': [], 'keywords': {'ndigits': 2}}
    """
    part = wrapped_part(part)
    path = type(part).__name__
    token = _read.set({} if _read.get() is None else _read.get())
    try:
        stated = _state(part, path, ())
        return _Stated(stated) if isinstance(stated, dict) else stated
    except RecursionError as error:
        raise IdentityError(f"{path} is nested too deeply; define identity() on it, or run without a store") from error
    finally:
        _read.reset(token)


class _Stated(dict[str, Any]):
    """An identity that `identity_of` returned; identities that contain it include it unchanged."""


def own_identity(part: object) -> Callable[[], object] | None:
    """Return the component's ``identity`` method; None if the identity is derived from its attributes."""
    stated: Callable[[], object] | None = getattr(part, "identity", None)
    return stated if callable(stated) else None


def digest_of(identity: object) -> str:
    """Return a digest of an identity, as 32 hexadecimal digits."""
    return blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=16).hexdigest()


def _state(value: object, path: str, inside: tuple[int, ...]) -> JSONValue:
    if isinstance(value, str):
        return _without_secrets(value)
    if value is None or isinstance(value, bool) or type(value) is int:
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
    if isinstance(value, _Stated):
        return value
    if isinstance(value, Mapping):
        return _mapping(value, path, inside)
    if isinstance(value, set | frozenset):
        return {"set": sorted((_state(item, f"{path}{{}}", inside) for item in value), key=_text)}
    if isinstance(value, tuple | list) and type(value) in (tuple, list):
        return [_state(item, f"{path}[{i}]", inside) for i, item in enumerate(value)]
    return _object(value, path, inside)


def _without_secrets(text: str) -> str:
    """Return a text with a digest in place of the passwords and queries of its URLs, which determine results too."""
    plain = shown_url(text)
    if plain == text:
        return text
    return f"{plain} {blake2b(text.encode('utf-8', 'surrogatepass'), digest_size=8).hexdigest()}"


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _mapping(value: Mapping[object, object], path: str, inside: tuple[int, ...]) -> JSONValue:
    # A mapping that could be mistaken for another kind of value is written as pairs.
    if all(type(key) is str for key in value) and not _TAGS & set(value):
        return {str(key): _state(item, f"{path}[{key!r}]", inside) for key, item in value.items()}
    pairs = [
        [_state(key, f"{path} key", inside), _state(item, f"{path}[{key!r}]", inside)] for key, item in value.items()
    ]
    return {"mapping": sorted(pairs, key=_text)}


def _object(value: object, path: str, inside: tuple[int, ...]) -> JSONValue:
    if _in_module.get() and not isinstance(value, _CODE) and not _is_users(_module_of(type(value))):
        raise IdentityError(f"{path}: expected a plain value, got {type(value).__name__}; {_REMEDY}")
    if isinstance(value, functools.partial):
        parts = {"function": value.func, "args": value.args, "keywords": value.keywords}
        return {"class": "partial"} | {name: _state(part, f"{path}.{name}", inside) for name, part in parts.items()}
    if isinstance(value, types.MethodType):
        bound, function = _state(value.__self__, f"{path}.__self__", inside), value.__func__
        if isinstance(function, types.FunctionType):
            return _code_of(function) | {"of": bound}
        return {"method": _state(function, f"{path}.__func__", inside), "of": bound}
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
    if (inner := wrapped_part(value)) is not value:
        return _state(inner, f"{path}.identical_to", inside)
    stated = own_identity(value)
    if stated is not None:
        return _code_of(type(value)) | {"identity": _state(_called(stated, path), f"{path}.identity()", inside)}
    return _code_of(type(value)) | {"fields": _fields(value, path, inside)}


def _called(identity: Callable[[], object], path: str) -> object:
    try:
        return identity()
    except PolicyError:
        # Keep the error of an unreachable server, which contains a specific fix.
        raise
    except Exception as error:
        raise IdentityError(f"{path}.identity() raised {type(error).__name__}: {error}") from error


def _fields(value: object, path: str, inside: tuple[int, ...]) -> JSONValue:
    if dataclasses.is_dataclass(value):
        parts = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {
            field.name: _state(part, f"{path}.{field.name}", inside)
            for field, part in parts
            if not (field.metadata.get(ADDED) and part == field.default)
        }
    try:
        # The protocol of copy and pickle; it fails for objects with hidden state, such as locks and sockets.
        reduced = value.__reduce_ex__(2)
    except Exception as error:
        raise IdentityError(
            f"{path}: the identity of an instance of {type(value).__module__}.{type(value).__qualname__} cannot be "
            f"determined ({error}); {_REMEDY}"
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


def _function(value: types.FunctionType, path: str, inside: tuple[int, ...]) -> JSONValue:
    stated = _code_of(value)
    bound = {"defaults": value.__defaults__, "keywords": value.__kwdefaults__}
    for name, part in (bound | {"closure": _closure(value) or None}).items():
        if part:
            stated[name] = _state(part, f"{path}.{name}", inside)
    return stated


def _closure(function: types.FunctionType) -> dict[str, object]:
    """Return the values of a function's closure variables; unset variables are left out."""
    cells = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):
            cells[name] = cell.cell_contents
    return cells


# ------------------------------------------------------------------ code

_read: ContextVar[dict[object, Any] | None] = ContextVar("read", default=None)
"""Cache of facts about modules for the current identity only, because files may change later."""

_being_stated: ContextVar[tuple[int, ...]] = ContextVar("being_stated", default=())
"""Classes and functions that are being described now, to stop recursion at code that refers to itself."""

_in_module: ContextVar[bool] = ContextVar("in_module", default=False)
"""Whether module variables are being described; the files of their classes are already included."""


def _code_of(part: Any) -> JSONObject:
    """Return a class's or function's name and the code that it depends on, except this project's code."""
    name: JSONObject = {"class" if isinstance(part, type) else "function": part.__qualname__}
    module, outer = _module_of(part), _being_stated.get()
    if module.partition(".")[0] in (*_SHIPPED, "builtins"):
        return name
    if not _is_users(module):
        return name | {"module": module} | _code_behind((module,))
    if id(part) in outer or _in_module.get():
        return name
    token = _being_stated.set((*outer, id(part)))
    try:
        behind = _code_behind((module,)) if _has_file(part) else _typed(part)
        members = _members(part) if isinstance(part, type) else {"place": _place(part.__code__)}
        return name | behind | members
    finally:
        _being_stated.reset(token)


def _module_of(part: object) -> str:
    return str(getattr(part, "__module__", None) or "")


def _once(find: Callable[[T], R]) -> Callable[[T], R]:
    """Cache a function's results while one identity is computed."""

    @functools.wraps(find)
    def found(about: T) -> R:
        known, key = _read.get(), (find, about, _in_module.get())
        if known is None:
            return find(about)
        if key not in known:
            known[key] = find(about)
        answer: R = known[key]
        return answer

    return found


@_once
def _is_users(module: str) -> bool:
    """Whether a module is user code: not part of this project, Python or an installed distribution."""
    if module.partition(".")[0] in (*_SHIPPED, "builtins"):
        return False
    file = file_of(module)
    return not is_standard(module, file) and (file is None or not distributions_of(file))


def _has_file(part: object) -> bool:
    """Whether a class or function comes from its module's file rather than from the REPL, a notebook or ``exec``."""
    code = getattr(part, "__code__", None)
    return file_of(_module_of(part)) is not None and (code is None or not code.co_filename.startswith("<"))


@_once
def _code_behind(modules: tuple[str, ...]) -> JSONObject:
    """Return the files, packages and variables that determine the behavior of modules.

    Returns:
        ``files``: the digests of the user's files and of the files that they import, without the code that runs only
        in scripts; ``packages``: the versions of the distributions that these files import; ``values``: the variables
        that functions in these files use, if they are plain values or instances of the user's classes.
    """
    files: dict[str, str] = {}
    packages: dict[str, str] = {}
    values: JSONObject = {}
    # Leave out variables of modules that are imported in functions: not every process has loaded these modules.
    left, later, seen = list(modules), list[str](), set[str]()
    while left or later:
        loaded = bool(left)
        module = (left or later).pop()
        file = None if module in seen or module.partition(".")[0] in _SHIPPED else file_of(module)
        seen.add(module)
        if file is None or is_standard(module, file):
            continue
        if found := distributions_of(file):
            packages |= found
            continue
        content = _content(file)
        key = shown_file(module, file)
        code = parse_source(content) if file.endswith((".py", ".pyw")) else NO_CODE
        lines = (line for number, line in enumerate(content.splitlines(True), 1) if number not in code.script)
        files[key] = blake2b(b"".join(lines), digest_size=16).hexdigest()
        (left if loaded else later).extend([module.rpartition(".")[0], *code.imported(module, file, code.imports)])
        later += code.imported(module, file, code.later)
        for name, value in (_variables(module, code) if loaded else {}).items():
            values[f"{key}: {name}"] = value
    stated = {"files": files, "packages": packages, "values": values}
    return {name: part for name, part in stated.items() if part}


def _content(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise IdentityError(
            f"the file {file} cannot be read ({error.strerror}); make it readable, or run without a store"
        ) from error


def _variables(module: str, code: Code) -> JSONObject:
    """Return the module variables that functions use and that are not determined by the file."""
    if _in_module.get():
        return {}
    loaded, found = vars(sys.modules[module]) if module in sys.modules else {}, {}
    for name in sorted(code.used & loaded.keys()):
        value, literal = loaded[name], code.literals.get(name, _UNKNOWN)
        # A container that was filled after the import is often a cache, which must not invalidate stored runs.
        in_file = type(value) is type(literal) and (isinstance(value, list | dict | set) or value == literal)
        if name.startswith("__") or isinstance(value, _CODE) or in_file:
            continue
        with suppress(IdentityError, RecursionError):
            found[name] = _short(_value(name, value))
    return found


def _value(name: str, value: object) -> JSONValue:
    """Describe a plain value, or an instance of a user's class. Raises `IdentityError` for anything else."""
    token = _in_module.set(True)
    try:
        return _state(value, name, ())
    finally:
        _in_module.reset(token)


def _short(value: JSONValue) -> JSONValue:
    """Return a described value, or its digest if it is long."""
    return value if len(_text(value)) <= _LONGEST_VALUE else {"digest": digest_of(value)}


def _members(part: type) -> JSONObject:
    """Describe the parts of a class that are set at run time: variables of enclosing functions, changed attributes."""
    places: JSONObject = {}
    values: JSONObject = {}
    for base in part.__mro__:
        if not _is_users(_module_of(base)):
            continue
        for name, member in sorted(vars(base).items()):
            functions = _functions(member)
            for function in (function for function in functions if not _has_file(base) or _is_written(function)):
                places[f"{base.__qualname__}.{name}"] = _place(function.__code__)
                for variable, value in _closure(function).items():
                    if value is not base:
                        path = f"{name}.{variable}"
                        values[f"{base.__qualname__}.{path}"] = _state(value, path, ())
            if not functions and not (name.startswith("__") and name.endswith("__")):
                with suppress(IdentityError, RecursionError):
                    values[f"{base.__qualname__}.{name}"] = _short(_value(name, member))
    return {"places": places, "members": values}


def _is_written(function: types.FunctionType) -> bool:
    """Whether a function is written in the user's source, not generated by a dataclass or a package's decorator."""
    file = function.__code__.co_filename
    return not (file.startswith(("<", *STANDARD)) or distributions_of(file))


def _functions(member: object) -> list[types.FunctionType]:
    """Return the functions of a class member: a method, property or cached property has one or more."""
    parts = [member, *(getattr(member, name, None) for name in ("fget", "fset", "func", "__func__", "__wrapped__"))]
    return [part for part in parts if isinstance(part, types.FunctionType)]


def _place(code: types.CodeType) -> JSONValue:
    """Return the position of code in its file, which distinguishes it from other code with the same name."""
    places = [p for p in code.co_positions() if None not in p and p[2:] != (0, 0)]
    if not places:
        return blake2b(_compiled(code).encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()
    return [*min((p[0], p[2]) for p in places), *max((p[1], p[3]) for p in places)]


def _typed(part: object) -> JSONObject:
    """Describe code without a file: its compiled form, and everything that its names refer to."""
    sources: list[str] = []
    modules: set[str] = set()
    values: JSONObject = {}
    left, seen = [part], set[int]()
    while left:
        code = left.pop()
        if id(code) in seen:
            continue
        seen.add(id(code))
        bases = code.__mro__ if isinstance(code, type) else ()
        members = [member for base in bases if _is_users(_module_of(base)) for member in vars(base).values()]
        for function in [code] if isinstance(code, types.FunctionType) else [f for m in members for f in _functions(m)]:
            sources.append(_compiled(function.__code__))
            for name in sorted(_names(function.__code__) & function.__globals__.keys()):
                value = function.__globals__[name]
                value = inspect.unwrap(value) if isinstance(value, types.FunctionType) else value
                if isinstance(value, types.ModuleType):
                    modules.add(value.__name__)
                elif isinstance(value, type | types.FunctionType) and _is_users(_module_of(value)):
                    left.append(value)
                elif isinstance(value, type | types.FunctionType):
                    modules.add(_module_of(value))
                else:
                    with suppress(IdentityError, RecursionError):
                        values[name] = _short(_value(name, value))
        if code is not part and _has_file(code):
            modules.add(_module_of(code))
    behind = _code_behind(tuple(sorted(modules)))
    digest = blake2b("\0".join(sources).encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()
    return behind | {"source": digest, "values": behind.get("values", {}) | values}


def _names(code: types.CodeType) -> set[str]:
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _compiled(code: types.CodeType) -> str:
    consts = [_compiled(const) if isinstance(const, types.CodeType) else _constant(const) for const in code.co_consts]
    return f"{code.co_name}{code.co_code.hex()}{code.co_names}{consts}"


def _constant(value: object) -> str:
    # The order of a set of strings differs between processes.
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)
