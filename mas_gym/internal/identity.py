"""Identity: a JSON-serializable description of everything that determines a component's results.

A run store returns a stored search only if planner, MAS, policy, critic, grader, seed and
sampling parameters are unchanged. The identity of user code consists of the spec or the name,
the digest of the file that defines it and of the local modules that this file imports, the
versions of the installed packages that these files import, and the attribute ``revision`` of
the function, class or object, if the user sets it. Nothing is read from running code: if
results depend on a module variable or on the environment, put its value into ``revision``.

The identity of a dataclass also contains its fields. A closure, or an instance of another class
with attributes, is identified only if it was made from a spec (``my.py:Judge:0.5``), has a
``revision``, or defines its identity::

    class Judge:
        def __init__(self, client, prompt):
            self.client, self.prompt = client, prompt

        def identity(self):
            return {"model": self.client.model, "prompt": self.prompt}

The value may contain anything that `identity_of` accepts, including other components. Leave out
attributes that cannot affect a result, such as a server's address or a batch size; otherwise a change
to one of them would invalidate stored runs.

A wrapper that does not change results, such as a cache, sets the attribute ``identical_to`` to the
wrapped component and so has the same identity.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from enum import Enum
from hashlib import blake2b
from numbers import Integral, Real
from pathlib import PurePath
from typing import Any

from mas_gym.errors import IdentityError, PolicyError, shown_url
from mas_gym.internal.adapter import wrapped_part
from mas_gym.internal.json_types import JSONObject, JSONValue
from mas_gym.internal.source_files import SHIPPED, file_of, files_behind, packages_of

_REMEDY = (
    "set its attribute revision, for example revision = '1', and change it with the results; or define identity(), "
    "make it a dataclass, name it in a spec (FILE.py:NAME), or run without a store"
)
_TAGS = {"bytes", "class", "float", "function", "mapping", "method", "path", "set"}
_MADE = "_mas_gym_made"


def identity_of(part: object) -> JSONValue:
    """Return a component's identity: JSON-serializable, and equal in every process for equal components.

    Args:
        part: A planner, policy, critic, task or grader, or a value inside one.

    Raises:
        IdentityError: The component contains an object without an identity.

    >>> identity_of(functools.partial(round, ndigits=2))
    {'class': 'partial', 'function': {'function': 'round'}, 'args': [], 'keywords': {'ndigits': 2}}
    """
    part = wrapped_part(part)
    path = type(part).__name__
    try:
        stated = _state(part, path)
    except RecursionError as error:
        raise IdentityError(f"{path} contains itself or is nested too deeply; {_REMEDY}") from error
    return _Stated(stated) if isinstance(stated, dict) else stated


class _Stated(dict[str, Any]):
    """An identity that `identity_of` returned; identities that contain it include it unchanged."""


def own_identity(part: object) -> Callable[[], object] | None:
    """Return the component's ``identity`` method; None if it has none."""
    stated: Callable[[], object] | None = getattr(part, "identity", None)
    return stated if callable(stated) else None


def digest_of(identity: object) -> str:
    """Return a digest of an identity, as 32 hexadecimal digits."""
    return blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=16).hexdigest()


def note_spec(part: object, make: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """Note which class or function of a spec made an object; it identifies an object that cannot state its state."""
    with suppress(TypeError):
        vars(part)[_MADE] = functools.partial(make, *args, **kwargs)


def _state(value: object, path: str) -> JSONValue:
    if isinstance(value, str):
        return _without_secrets(value)
    if value is None or isinstance(value, bool) or type(value) is int:
        return value
    if isinstance(value, Enum):
        return {"class": type(value).__qualname__, "name": value.name, "value": _state(value.value, path)}
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else {"float": repr(number)}
    if isinstance(value, bytes | bytearray):
        return {"bytes": blake2b(value, digest_size=16).hexdigest()}
    if isinstance(value, PurePath):
        return {"path": os.fspath(value)}
    if isinstance(value, _Stated):
        return value
    if isinstance(value, Mapping):
        return _mapping(value, path)
    if isinstance(value, set | frozenset):
        return {"set": sorted((_state(item, f"{path}{{}}") for item in value), key=_text)}
    if type(value) in (tuple, list):
        return [_state(item, f"{path}[{i}]") for i, item in enumerate(value)]  # type: ignore[var-annotated, arg-type]
    return _object(value, path)


def _without_secrets(text: str) -> str:
    """Return a text with a digest in place of the passwords and queries of its URLs, which determine results too."""
    plain = shown_url(text)
    if plain == text:
        return text
    return f"{plain} {blake2b(text.encode('utf-8', 'surrogatepass'), digest_size=8).hexdigest()}"


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _mapping(value: Mapping[object, object], path: str) -> JSONValue:
    # A mapping that could be mistaken for another kind of value is written as pairs.
    if all(type(key) is str for key in value) and not _TAGS & set(value):
        return {str(key): _state(item, f"{path}[{key!r}]") for key, item in value.items()}
    pairs = [[_state(key, f"{path} key"), _state(item, f"{path}[{key!r}]")] for key, item in value.items()]
    return {"mapping": sorted(pairs, key=_text)}


def _object(value: object, path: str) -> JSONValue:
    if isinstance(value, functools.partial):
        parts = {"function": value.func, "args": value.args, "keywords": value.keywords}
        return {"class": "partial"} | {name: _state(part, f"{path}.{name}") for name, part in parts.items()}
    if isinstance(value, types.MethodType):
        return {"method": _state(value.__func__, f"{path}.__func__"), "of": _state(value.__self__, f"{path}.__self__")}
    if (inner := wrapped_part(value)) is not value:
        return _state(inner, f"{path}.identical_to")
    try:
        if isinstance(value, type | types.FunctionType) or _is_named(value):
            return _code(value, value, path)
        return _instance(value, path)
    except IdentityError:
        made = getattr(value, "__dict__", {}).get(_MADE)
        if made is None:
            raise
        return {"class": type(value).__qualname__, "spec": _state(made, path)}


def _instance(value: object, path: str) -> JSONValue:
    code = _code(type(value), value, path)
    if (own := own_identity(value)) is not None:
        return code | {"identity": _state(_called(own, path), f"{path}.identity()")}
    names: Iterable[str] | None = getattr(value, "_fields", None) if isinstance(value, tuple) else None
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    elif names is None and type(value).__module__.partition(".")[0] in SHIPPED:
        names = vars(value)
    if names is not None:
        return code | {"fields": {name: _state(getattr(value, name), f"{path}.{name}") for name in names}}
    if "revision" in code or _is_stateless(value):
        return code
    raise IdentityError(f"{path}: expected a value with an identity, got {_name(type(value))} with state; {_REMEDY}")


def _called(identity: Callable[[], object], path: str) -> object:
    try:
        return identity()
    except PolicyError:
        # Keep the error of an unreachable server, which contains a specific fix.
        raise
    except Exception as error:
        raise IdentityError(f"{path}.identity() raised {type(error).__name__}: {error}") from error


def _is_stateless(value: object) -> bool:
    """Whether pickle would restore an object from its class, without arguments or attributes."""
    try:
        reduced = value.__reduce_ex__(2)
    except Exception:
        # Locks, generators and connections cannot be pickled.
        return False
    return isinstance(reduced, tuple) and reduced[1] == (type(value),) and all(part is None for part in reduced[2:])


def _code(part: Any, owner: object, path: str) -> JSONObject:
    """Return the name of a class or function, and the files and packages behind it.

    Args:
        part: The class or function.
        owner: The described object, which may have a ``revision``: the class, the function or an instance.
        path: The path to it, for messages.
    """
    module = str(getattr(part, "__module__", None) or "")
    top, file = module.partition(".")[0], file_of(module)
    name: JSONObject = {"class" if isinstance(part, type) else "function": part.__qualname__}
    if top in (*SHIPPED, "builtins"):
        return name
    versions = {} if file is None and top in sys.builtin_module_names else file and packages_of(file, top)
    if versions is not None:
        return name | {"module": module} | ({"packages": versions} if versions else {})
    revision = getattr(owner, "revision", None)
    if isinstance(revision, str | int):
        name["revision"] = revision
    elif isinstance(owner, type) or own_identity(owner) is None:
        _check_self_contained(part, path)
    if file is not None:
        files, packages = files_behind(file)
        name |= {"files": files} | ({"packages": packages} if packages else {})
    if isinstance(part, types.FunctionType) and not _is_named(part):
        name["place"] = digest_of([list(position) for position in part.__code__.co_positions()])
    return name


def _check_self_contained(part: Any, path: str) -> None:
    """Raise `IdentityError` if code captures values, or if no file contains it."""
    if file_of(part.__module__) is None:
        raise IdentityError(f"{path}: expected code in a file, got {_name(part)} without one; {_REMEDY}")
    if _is_named(part):
        return
    if not isinstance(part, types.FunctionType):
        raise IdentityError(f"{path}: expected a class at the top level of its file, got {_name(part)}; {_REMEDY}")
    if part.__closure__ or part.__defaults__ or part.__kwdefaults__ or part.__code__.co_filename.startswith("<"):
        names = ", ".join(part.__code__.co_freevars) or "default values"
        raise IdentityError(
            f"{path}: expected a function without captured values, got {_name(part)} ({names}); {_REMEDY}"
        )


def _name(part: Any) -> str:
    return f"{part.__module__}.{part.__qualname__}"


def _is_named(part: Any) -> bool:
    """Whether a class or function, possibly decorated, is what its module has under its name."""
    found: Any = sys.modules.get(getattr(part, "__module__", None) or "")
    for name in getattr(part, "__qualname__", "?").split("."):
        found = getattr(found, name, None)
    return found is part
