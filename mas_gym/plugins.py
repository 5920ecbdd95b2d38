"""Specs (strings that name planners, critics, policies, tasks, graders and programs) and registries of names.

All kinds of components use one grammar, in Python and on the command line::

    SPEC      = NAME [":" ARGUMENT] ["#" OPTIONS]                       mcts:10,3   judge:tiny   tiny#max_batch=32
              | FILE ".py:" NAME [":" SETTINGS] ["#" OPTIONS]           my.py:Lookahead:2,depth=3
    SETTINGS  = VALUE {"," VALUE} {"," KEY "=" VALUE}                   10,3,leaf=bootstrap
    OPTIONS   = KEY "=" YAML {"&" KEY "=" YAML}                         dtype=bfloat16&max_batch=32

``NAME`` is a built-in component, a component of an installed package (an entry point in the group of its kind), or a
class or function at the top level of a Python file. The argument of critics and policies is one string, such as an
address or specs. Settings are parsed as integers, decimals, ``true``, ``false`` or ``none``, otherwise as text.

A file is imported once per version of its contents, with its folder on ``sys.path``, so that it can import other files
in this folder. The code runs with the user's permissions, so use only files that you trust.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from mas_gym.errors import ConfigError, MASGymError, MissingDependencyError, UnknownNameError, UserCodeError, shown
from mas_gym.internal.identity import note_spec
from mas_gym.internal.suggestions import unknown_name
from mas_gym.internal.user_files import error_with_line, import_file

_IN_FILE = re.compile(r"(?P<file>.+\.py):(?P<rest>.*)", re.DOTALL)
_WORDS = {"true": True, "false": False, "none": None}

T = TypeVar("T")

Value = bool | int | float | str | None
"""A setting."""


class Spec(NamedTuple):
    """A parsed spec; ``str(spec)`` is its text.

    Attributes:
        name: The name of a component, or of a class or function in ``file``.
        argument: The text after the name's colon.
        fragment: The text after ``#``.
        file: The user's Python file; empty for a name.
    """

    name: str
    argument: str = ""
    fragment: str = ""
    file: str = ""

    @classmethod
    def parse(cls, text: str, known: Callable[[str], bool] = lambda name: False) -> Spec:
        """Parse a spec.

        Args:
            text: The spec.
            known: Returns whether a name is registered. ``judge:my.py:make`` names ``judge`` if it is registered,
                otherwise a file.

        >>> Spec.parse("my.py:Lookahead:2,3#greedy=true")
        Spec(name='Lookahead', argument='2,3', fragment='greedy=true', file='my.py')
        >>> Spec.parse("transformers:models/a#dtype=float32")
        Spec(name='transformers', argument='models/a', fragment='dtype=float32', file='')
        """
        text = text.strip()
        file = ""
        found = _IN_FILE.fullmatch(text)
        if found is not None and not known(re.split("[:#]", text, maxsplit=1)[0].strip()):
            file, text = found["file"], found["rest"]
        head, _, fragment = text.partition("#")
        name, _, argument = head.partition(":")
        return cls(name.strip(), argument.strip(), fragment.strip(), file)

    def __str__(self) -> str:
        """Return the text; parsing it gives the same spec."""
        argument = f":{self.argument}" if self.argument else ""
        fragment = f"#{self.fragment}" if self.fragment else ""
        return f"{self.file}:{self.name}{argument}{fragment}" if self.file else f"{self.name}{argument}{fragment}"

    def settings(self) -> tuple[list[Value], dict[str, Any]]:
        """Return positional and named settings; the options are included as named settings.

        Raises:
            ConfigError: A positional setting follows a named one, or a name occurs twice.
        """
        args: list[Value] = []
        kwargs: dict[str, Any] = {}
        for item in filter(None, map(str.strip, self.argument.split(","))):
            key, equals, value = item.partition("=")
            if equals:
                key = key.strip()
                if key in kwargs:
                    raise ConfigError(f"{str(self)!r}: {key!r} is set twice")
                kwargs[key] = _value(value.strip())
            elif kwargs:
                raise ConfigError(f"{str(self)!r}: {item!r} comes after a named setting; put it first or name it")
            else:
                args.append(_value(item))
        options = self.options()
        if twice := kwargs.keys() & options.keys():
            raise ConfigError(f"{str(self)!r}: {min(twice)!r} is set twice")
        return args, {**kwargs, **options}

    def blame(self, error: BaseException) -> str:
        """Return an error as one line of text, with the line of the spec's file that raised it."""
        return error_with_line(error, Path(self.file).expanduser()) if self.file else f"{type(error).__name__}: {error}"

    def options(self) -> dict[str, object]:
        """Return the options after ``#``.

        Raises:
            ConfigError: An option has no ``=`` or occurs twice, or its value is not valid YAML.
        """
        found: dict[str, Any] = {}
        for piece in filter(None, self.fragment.split("&")):
            key, equals, value = piece.partition("=")
            if not equals or not key.strip():
                raise ConfigError(
                    f"expected option=value after '#', got {shown(piece.rpartition('@')[2])} in {shown(str(self))}"
                )
            if key.strip() in found:
                raise ConfigError(f"{shown(str(self))}: the option {key.strip()!r} is set twice")
            found[key.strip()] = yaml_value(value, f"option {key.strip()}: expected a plain value")
        return found


def write_settings(args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    """Return settings in the form that `Spec.settings` parses; classes and functions are written by name.

    >>> write_settings([10, 0.5], {"leaf": "bootstrap", "greedy": True})
    '10,0.5,leaf=bootstrap,greedy=true'
    """
    return ",".join([*map(_written, args), *(f"{key}={_written(value)}" for key, value in kwargs.items())])


_EXPONENT = re.compile(r"[+-]?[0-9]+[eE][+-]?[0-9]+")


def yaml_value(text: str, expected: str) -> object:
    """Parse a YAML value of a spec. Raises `ConfigError`; its message begins with the argument ``expected``."""
    try:
        value = yaml.safe_load(text)
    except Exception as error:
        # The parser raises not only its own errors, but KeyError, ValueError, AttributeError and RecursionError too.
        raise ConfigError(f"{expected}, got {shown(text)}") from error
    # YAML 1.1 reads a float without a point, such as 1e-5, as a string.
    return float(text) if value == text and _EXPONENT.fullmatch(text) else value


def _value(text: str) -> Value:
    if text.casefold() in _WORDS:
        return _WORDS[text.casefold()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _written(value: object) -> str:
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    if isinstance(value, type) or inspect.isroutine(value):
        return str(value.__name__)
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Registry:
    """The names of one kind of component.

    Attributes:
        kind: The kind, for messages, such as ``"planner"``.
        group: The entry-point group in which packages add names.
        shipped: Built-in names with the component's factory, or its ``"module:attribute"``, which is imported on use.
        settings: Whether the argument of a name is a list of settings; otherwise it is one string.
    """

    kind: str
    group: str
    shipped: Mapping[str, Any]
    settings: bool = True

    def names(self) -> list[str]:
        """Return the names of built-in components and those of installed packages."""
        return sorted({*self.shipped, *self._points()})

    def __contains__(self, name: object) -> bool:
        return name in self.shipped or name in self._points()

    def _points(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self.group)}

    def parse(self, text: str) -> Spec:
        """Parse a spec of this kind."""
        return Spec.parse(text, self.__contains__)

    def find(self, spec: Spec, fits: Callable[[object], bool] = callable) -> Any:
        """Return the object that a spec names, without calling it.

        Args:
            spec: The spec.
            fits: Returns whether an object in a file is suitable.

        Raises:
            UnknownNameError: The name is unknown.
            MissingDependencyError: The package that provides the name cannot be imported.
            DataNotFoundError: The file does not exist.
            UserCodeError: The file cannot be imported.
        """
        if spec.file:
            return find_in_file(self.kind, spec, fits)
        shipped = self.shipped.get(spec.name)
        if shipped is not None and not isinstance(shipped, str):
            return shipped
        point = EntryPoint(spec.name, shipped, self.group) if shipped else self._points().get(spec.name)
        if point is None:
            raise self.unknown(spec.name)
        try:
            return point.load()
        except ImportError as error:
            raise MissingDependencyError(f"{self.kind} {spec.name!r} cannot be imported: {error}") from error

    def arguments(self, spec: Spec) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and named arguments of a spec. Raises `ConfigError`."""
        if self.settings or spec.file:
            return spec.settings()
        return [spec.argument], spec.options()

    def load(self, text: str, **options: object) -> Any:
        """Find the object that a spec names and call it; ``options`` take precedence over the spec's arguments.

        Raises:
            MASGymError: As for `find`, `arguments` and `call`.
        """
        spec = self.parse(text)
        make = self.find(spec)
        args, kwargs = self.arguments(spec)
        return self.call(spec, make, *args, **{**kwargs, **options})

    def call(self, spec: Spec, make: Callable[..., Any], /, *args: object, **kwargs: object) -> Any:
        """Call an object returned by `find`.

        Raises:
            ConfigError: The object does not accept the arguments.
            UserCodeError: Code in the user's file raised an error; the message contains the line.
        """
        self.check(spec, make, *args, **kwargs)
        try:
            made = make(*args, **kwargs)
        except MASGymError:
            raise
        except Exception as error:
            if not spec.file:
                raise
            raise UserCodeError(f"{self.kind} {str(spec)!r}: {spec.blame(error)}") from error
        if make not in self.shipped.values():
            note_spec(made, make, args, kwargs)
        return made

    def check(self, spec: Spec, make: Callable[..., Any], /, *args: object, **kwargs: object) -> None:
        """Check that a class or function accepts the given arguments.

        Raises:
            ConfigError: It does not accept them; the message lists the accepted arguments.
        """
        signature = inspect.signature(make)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            named = not spec.file and not self.settings
            takes = f"it takes {options_of(make)}" if named else f"expected {spec.name}{_plain(signature)}"
            raise ConfigError(f"{self.kind} {str(spec)!r}: {error}; {takes}") from None

    def unknown(self, name: str, other: str = "") -> UnknownNameError:
        """Return the error for an unknown name, with a hint on how to add one; ``other`` names another way."""
        remedy = f"to add your own, write FILE.py:NAME or register an entry point in the group {self.group}"
        return unknown_name(self.kind, name, self.names(), f"{remedy}; {other}" if other else remedy)


def find_in_file(kind: str, spec: Spec, fits: Callable[[object], bool] = callable) -> Any:
    """Import a spec's file and return the object that it names; for errors see `Registry.find`."""
    file = Path(spec.file).expanduser()
    module = import_file(kind, file)
    found = vars(module).get(spec.name)
    if not fits(found):
        own = [name for name, value in vars(module).items() if inspect.getmodule(value) is module]
        raise unknown_name(f"class or function in {file}:", spec.name, [name for name in own if name[:1] != "_"])
    return found


def build(place: str, make: Callable[..., T], /, *args: object, **options: object) -> T:
    """Call ``make``. Raises `ConfigError` with the valid options if an option is unknown."""
    try:
        inspect.signature(make).bind(*args, **options)
    except TypeError as error:
        raise ConfigError(f"{place}: {error}; it takes {options_of(make)}") from error
    return make(*args, **options)


def options_of(make: Callable[..., object]) -> str:
    """Return the names of the options that a class or function accepts, for messages."""
    parameters = inspect.signature(make).parameters.values()
    return ", ".join(p.name for p in parameters if p.kind is p.KEYWORD_ONLY) or "no options"


def _plain(signature: inspect.Signature) -> str:
    parameters = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))
