"""MAS configs: loaded from shipped names, YAML or JSON files, and plain dicts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from mas_gym.errors import ConfigError, DataNotFoundError, shown, unknown_name
from mas_gym.internal.json_types import JSONMapping
from mas_gym.systems.graph import MAS
from mas_gym.systems.validation import Place, place_text, validate

MAX_BYTES = 1 << 20
MAX_DEPTH = 16
MAX_NUMBER = 100
"""Limits on a file: bytes, nesting levels, and characters per number."""

_TAG = "tag:yaml.org,2002:"
_STRING = _TAG + "str"
_COLLECTION_TAGS = (None, "!", _TAG + "seq", _TAG + "map")
_SCALARS = ("int", "float", "bool", "null", "timestamp")
# libyaml is ten times as fast as the parser in Python, the fallback if PyYAML was built without it.
_LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
_SUFFIXES = (".yaml", ".yml", ".json")

MASSource: TypeAlias = "str | os.PathLike[str] | JSONMapping | MAS"
"""Argument types of `load_mas`."""


def mas_names() -> tuple[str, ...]:
    """Return the names of the shipped systems: the paper's (App. "MAS Graph, Prompts, and Configuration") and handoff.

    >>> mas_names()
    ('consensus', 'debate', 'dylan', 'game24', 'handoff', 'logic', 'refine', 'rpsv', 'single')
    """
    folder = resources.files("mas_gym") / "configs"
    return tuple(sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml")))


def load_mas(source: MASSource) -> MAS:
    """Load and validate a multi-agent system.

    Args:
        source: A shipped name (in any case), the path of a YAML or JSON file, a dict with the same
            keys, or a `MAS`, which is returned unchanged.

    Returns:
        The system, immutable.

    Raises:
        ConfigError: The config has errors, each listed with its location and fix.
        UnknownNameError: No shipped system has that name; the message lists the known names and suggests the nearest.
        DataNotFoundError: No file exists at that path.

    >>> load_mas("rpsv").agents[0].name
    'Reader'
    """
    if isinstance(source, MAS):
        return source
    if isinstance(source, Mapping):
        return validate(source, "custom")
    if isinstance(source, str) and source.lower() in mas_names():
        return _shipped(source.lower())
    path = _as_path(source)
    if path is None:
        got = type(source).__name__
        raise ConfigError(f"expected a MAS name, a path or a dict, got {got}; known names: {', '.join(mas_names())}")
    try:
        found = path.is_file()
    except (OSError, ValueError):
        found = False
    if found:
        return _parse(path.name, path.stem, _read(path))
    if path.suffix.lower() in _SUFFIXES or len(path.parts) > 1:
        known = ", ".join(mas_names())
        raise DataNotFoundError(f"no MAS config at {str(source)!r}; expected a YAML file or one of {known}")
    raise unknown_name("MAS", str(source), mas_names())


def _as_path(source: object) -> Path | None:
    return Path(source) if isinstance(source, str | os.PathLike) else None


@cache
def _shipped(name: str) -> MAS:
    text = (resources.files("mas_gym") / "configs" / f"{name}.yaml").read_text(encoding="utf-8")
    return _parse(f"{name}.yaml", name, text)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path.name}: cannot be read ({error.strerror}); check its permissions") from error
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{path.name}: larger than {MAX_BYTES} bytes; pass a dict if the MAS is that large")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path.name}: not UTF-8 at byte {error.start}; save the file as UTF-8") from error


def read_yaml(path: Path) -> object:
    """Return the plain data of a YAML or JSON file, which must not contain aliases, tags or repeated keys.

    Raises:
        ConfigError: The file cannot be read, or its YAML is invalid; the message contains the line.
    """
    text = _read(path)
    return _document(path.name, text, _EventReader(text))


def _document(label: str, text: str, reader: _EventReader) -> object:
    try:
        return reader.document()
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{label}: {_one_line(error, text)}; correct the YAML there") from error


def _parse(label: str, name: str, text: str) -> MAS:
    reader = _EventReader(text)
    data = _document(label, text, reader)

    def where(place: Place) -> str:
        known = place
        while known and known not in reader.lines:
            known = known[:-1]
        return f"{label}:{reader.lines.get(known, 1)}: {place_text(place)}"

    return validate(data, name, where)


class _EventReader:
    """Builds plain data from YAML events, with the line of each value and a limit on depth; aliases are rejected."""

    def __init__(self, text: str) -> None:
        self.events: Iterator[yaml.Event] = yaml.parse(text, _LOADER)
        self.scalars: Any = yaml.SafeLoader("")
        self.lines: dict[Place, int] = {}

    def document(self) -> object:
        """Return the only document; None if the text is empty."""
        data: object = None
        documents = 0
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise ValueError(f"line {_line(event)}: expected a single document, found another")
                data = self.value(next(self.events), ())
        return data

    def value(self, event: yaml.Event, place: Place) -> object:
        line = self.lines[place] = _line(event)
        if len(place) > MAX_DEPTH:
            raise ValueError(f"line {line}: nested more than {MAX_DEPTH} levels deep")
        if not isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) or event.anchor is not None:
            raise ValueError(f"line {line}: YAML anchors and aliases are not supported: write the value out")
        if isinstance(event, yaml.ScalarEvent):
            return self.scalar(event)
        if event.tag not in _COLLECTION_TAGS:
            raise ValueError(f"line {line}: the tag {shown(event.tag)} is not allowed")
        return self.sequence(place) if isinstance(event, yaml.SequenceStartEvent) else self.mapping(place)

    def sequence(self, place: Place) -> list[object]:
        data: list[object] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            data.append(self.value(event, (*place, len(data))))
        return data

    def mapping(self, place: Place) -> dict[object, object]:
        data: dict[object, object] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            line = _line(event)
            if not isinstance(event, yaml.ScalarEvent):
                raise ValueError(f"line {line}: a key must be a plain word")
            key = self.scalar(event)
            if key in data:
                raise ValueError(f"line {line}: the key {shown(key)} occurs twice in one mapping")
            step = key if isinstance(key, str) else shown(key)
            data[key] = self.value(next(self.events), (*place, step))
            self.lines[*place, step] = line
        return data

    def scalar(self, event: yaml.ScalarEvent) -> object:
        line, text = _line(event), event.value
        tag = event.tag
        if tag is None or tag == "!":
            tag = self.scalars.resolve(yaml.ScalarNode, text, event.implicit)
        if tag == _STRING:
            return text
        kind = tag.removeprefix(_TAG)
        if kind not in _SCALARS:
            raise ValueError(f"line {line}: the tag {shown(tag)} is not allowed")
        if len(text) > MAX_NUMBER:
            raise ValueError(f"line {line}: {len(text)} characters are too many for {kind}: put a text in quotes")
        try:
            return self.scalars.construct_object(yaml.ScalarNode(tag, text))
        except (ValueError, KeyError, IndexError, AttributeError, OverflowError) as error:
            raise ValueError(f"line {line}: {shown(text)} is not a valid {kind}: put a text in quotes") from error


def _line(part: Any) -> int:
    return int(part.start_mark.line) + 1


def _one_line(error: Exception, text: str) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem and error.problem_mark is not None:
        said = " ".join(filter(None, (error.context, error.problem)))
        hint = " (a text with a colon in it needs quotes, or a | block)" if "mapping values" in said else ""
        # libyaml reports an unexpected end on the line after the last one.
        line = min(error.problem_mark.line + 1, max(1, len(text.splitlines())))
        # The scanner reads ahead and has a separate limit, which it reaches first with PyYAML 6.0.4.
        if "nesting depth" in said:
            return f"line {line}: nested more than {MAX_DEPTH} levels deep"
        return f"line {line}: {said}{hint}"
    return " ".join(str(error).split())
