"""Reading MAS configs: shipped names, YAML or JSON files, and plain dicts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from mas_gym.errors import ConfigError, DataNotFoundError
from mas_gym.graph import MAS
from mas_gym.names import unknown_name
from mas_gym.validation import Place, place_text, validate

MAX_BYTES = 1 << 20
MAX_DEPTH = 16
MAX_VALUES = 200_000
_PLAIN_TAGS = ("tag:yaml.org,2002:seq", "tag:yaml.org,2002:map")
_SUFFIXES = (".yaml", ".yml", ".json")

MASSource: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any] | MAS"
"""What `load_mas` accepts."""


def mas_names() -> tuple[str, ...]:
    """Return the names of the shipped systems (paper, App. "MAS Graph, Prompts, and Configuration").

    >>> mas_names()
    ('consensus', 'debate', 'dylan', 'logic', 'refine', 'rpsv', 'single')
    """
    folder = resources.files("mas_gym") / "configs"
    return tuple(sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml")))


def load_mas(source: MASSource) -> MAS:
    """Load and validate a multi-agent system.

    Args:
        source: A shipped name (in any case), the path of a YAML or JSON file, a dict of the same
            form, or a `MAS`, which is returned as it is.

    Returns:
        The system, immutable.

    Raises:
        ConfigError: The config is wrong; the message and ``faults`` list every fault with its place and remedy.
        UnknownNameError: No shipped system has that name; the message has the known and the nearest one.
        DataNotFoundError: There is no file at that path.

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
        raise ConfigError(f"{path.name}: larger than {MAX_BYTES} bytes; pass a dict if the MAS is really that large")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path.name}: not UTF-8 at byte {error.start}; save the file as UTF-8") from error


def _parse(label: str, name: str, text: str) -> MAS:
    try:
        _refuse_deep_nesting(text)
        root = yaml.compose(text, yaml.SafeLoader)
        reader = _NodeReader()
        data = None if root is None else reader.value(root, ())
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{label}: {_one_line(error)}; correct the YAML there") from error

    def where(place: Place) -> str:
        known = place
        while known and known not in reader.lines:
            known = known[:-1]
        return f"{label}:{reader.lines.get(known, 1)}: {place_text(place)}"

    return validate(data, name, where)


def _refuse_deep_nesting(text: str) -> None:
    """Walk the flat stream of events first, because composing a tree of nodes recurses."""
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise ValueError(f"line {_line(event)}: nested more than {MAX_DEPTH} levels deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


class _NodeReader:
    """Turns YAML nodes into plain data, with the line of every value and a budget against alias bombs."""

    def __init__(self) -> None:
        self.lines: dict[Place, int] = {}
        self.left = MAX_VALUES
        self.scalars = yaml.constructor.SafeConstructor()

    def value(self, node: yaml.Node, place: Place) -> Any:
        line = _line(node)
        self.lines[place] = line
        self.left -= 1
        if self.left < 0 or len(place) > MAX_DEPTH:
            raise ValueError(f"line {line}: aliases expand to too many or too deeply nested values")
        if not isinstance(node, yaml.ScalarNode) and node.tag not in _PLAIN_TAGS:
            raise ValueError(f"line {line}: the tag {node.tag!r} is not allowed")
        if isinstance(node, yaml.SequenceNode):
            return [self.value(child, (*place, i)) for i, child in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, place)
        return self.scalars.construct_object(node)

    def _mapping(self, node: yaml.MappingNode, place: Place) -> dict[Any, Any]:
        data: dict[Any, Any] = {}
        for key_node, child in node.value:
            line = _line(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                raise ValueError(f"line {line}: a key must be a plain word")
            key = self.scalars.construct_object(key_node)
            if key in data:
                raise ValueError(f"line {line}: the key {key!r} stands twice in one mapping")
            data[key] = self.value(child, (*place, str(key)))
            self.lines[*place, str(key)] = line
        return data


def _line(part: Any) -> int:
    return int(part.start_mark.line) + 1


def _one_line(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem and error.problem_mark is not None:
        said = " ".join(filter(None, (error.context, error.problem)))
        hint = " (a text with a colon in it needs quotes, or a | block)" if "mapping values" in said else ""
        return f"line {error.problem_mark.line + 1}: {said}{hint}"
    return " ".join(str(error).split())
