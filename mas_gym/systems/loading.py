"""MAS configs: loaded from shipped names, YAML or JSON files, and plain dicts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TypeAlias

import yaml

from mas_gym.errors import ConfigError, DataNotFoundError, shown
from mas_gym.internal.json_types import JSONMapping
from mas_gym.internal.suggestions import unknown_name
from mas_gym.systems.graph import MAS
from mas_gym.systems.validation import Place, place_text, validate

# libyaml is ten times as fast as the parser in Python, the fallback if PyYAML was built without it.
_LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
_SUFFIXES = (".yaml", ".yml", ".json")

MASSource: TypeAlias = "str | os.PathLike[str] | JSONMapping | MAS"
"""Argument types of `load_mas`."""


def mas_names() -> tuple[str, ...]:
    """Return the bundled systems' names.

    They are ``cot``, ``game24``, ``handoff`` and the paper's (App. "MAS Graph, Prompts, and Configuration").

    >>> mas_names()
    ('consensus', 'cot', 'debate', 'dylan', 'game24', 'handoff', 'logic', 'refine', 'rpsv', 'single')
    """
    folder = resources.files("mas_gym") / "configs"
    return tuple(sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml")))


def load_mas(source: MASSource) -> MAS:
    """Load and validate a multi-agent system.

    Args:
        source: The name of a shipped system (case-insensitive), the path of a YAML or JSON file, a dict with the same
            keys, or a `MAS`, which is returned unchanged.

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
    try:
        path = Path(source)
        found = path.is_file()
    except TypeError as error:
        known = ", ".join(mas_names())
        got = type(source).__name__
        raise ConfigError(f"expected a MAS name, a path or a dict, got {got}; known names: {known}") from error
    except (OSError, ValueError):
        found = False
    if found:
        return _parse(path.name, path.stem, _read(path))
    if path.suffix.lower() in _SUFFIXES or len(path.parts) > 1:
        known = ", ".join(mas_names())
        raise DataNotFoundError(f"no MAS config at {str(source)!r}; expected a YAML file or one of {known}")
    raise unknown_name("MAS", str(source), mas_names())


@cache
def _shipped(name: str) -> MAS:
    text = (resources.files("mas_gym") / "configs" / f"{name}.yaml").read_text(encoding="utf-8")
    return _parse(f"{name}.yaml", name, text)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path.name}: cannot be read ({error.strerror}); check its permissions") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path.name}: not UTF-8 at byte {error.start}; save the file as UTF-8") from error


def read_yaml(path: Path) -> object:
    """Return the plain data of a YAML or JSON file, which must not contain aliases or repeated keys.

    Raises:
        ConfigError: The file cannot be read, or its YAML is invalid; the message contains the line.
    """
    return _document(path.name, _read(path))[0]


def _parse(label: str, name: str, text: str) -> MAS:
    data, lines = _document(label, text)

    def where(place: Place) -> str:
        known = place
        while known and known not in lines:
            known = known[:-1]
        return f"{label}:{lines.get(known, 1)}: {place_text(place)}"

    return validate(data, name, where)


def _document(label: str, text: str) -> tuple[object, dict[Place, int]]:
    """Return the data of the only document (None if it is empty) and the line of each value."""
    lines: dict[Place, int] = {}
    loader = _LOADER(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, lines
        _locate(node, (), lines, set())
        return loader.construct_document(node), lines
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{label}: {_one_line(error, text)}; correct the YAML there") from error


def _locate(node: yaml.Node, place: Place, lines: dict[Place, int], seen: set[int]) -> None:
    """Store the line numbers of a node and of the nodes in it. Raises `ValueError`."""
    line = lines.setdefault(place, _line(node))
    if id(node) in seen:
        raise ValueError(f"line {line}: YAML anchors and aliases are not supported: write the value out")
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            _locate(item, (*place, i), lines, seen)
    elif isinstance(node, yaml.MappingNode):
        keys = set[str]()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ValueError(f"line {_line(key)}: a key must be a plain word")
            if key.value in keys:
                raise ValueError(f"line {_line(key)}: the key {shown(key.value)} occurs twice in one mapping")
            keys.add(key.value)
            lines[*place, key.value] = _line(key)
            _locate(value, (*place, key.value), lines, seen)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _one_line(error: Exception, text: str) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem and error.problem_mark is not None:
        said = " ".join(filter(None, (error.context, error.problem)))
        hint = " (a text with a colon in it needs quotes, or a | block)" if "mapping values" in said else ""
        # libyaml reports an unexpected end on the line after the last one.
        line = min(error.problem_mark.line + 1, max(1, len(text.splitlines())))
        return f"line {line}: {said}{hint}"
    return " ".join(str(error).split())
