"""What a saved critic is: ``critic.json``, and the checks on everything that it says.

The file comes from outside as often as from our own training, so no value is used before its type, its
range and its length were checked. All faults of a file are reported together.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mas_gym.errors import ConfigError, DataError, DataNotFoundError
from rewardmodels.data.dataset import DataKind
from rewardmodels.data.serialise import FORMAT, View

META = "critic.json"
SCHEMA = 1

HEADS: dict[str, dict[str, DataKind]] = {
    "masprm": {"bt": "pairs", "mse": "points"},
    "orm": {"bce": "outcomes", "mse": "outcomes"},
}
"""For each kind of critic its heads, and the kind of training set that each head learns from."""

MAX_LENGTH = 2**20
"""Largest ``max_length``, in tokens."""

_BYTES = 2**24
_NAMES = 10_000
_WEIGHTS = re.compile(r"[0-9a-f]{32}(-[0-9a-f]{32})*|")

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80


@dataclass(frozen=True, slots=True)
class CriticInfo:
    """What a saved critic is.

    Attributes:
        kind: ``"masprm"`` or ``"orm"``.
        head: The loss that it was trained with.
        view: What it sees of a state.
        max_length: Longest state, in tokens.
        graphs: The MAS graphs that it was trained on, by name, each with its agents and edges.
        tasks: The tasks that it was trained on.
        base: Name of the backbone.
        settings: Hyper-parameters.
        data: Counts of the training data.
        metrics: Metrics on held-out problems.
        versions: Versions of the packages that trained it.
        weights: Digest of the weights as training wrote them. The identity of a loaded critic is computed from the
            files that are there, never read from this field.
    """

    kind: str
    head: str
    view: View
    max_length: int
    graphs: dict[str, dict[str, object]]
    tasks: list[str]
    base: str
    settings: dict[str, Any]
    data: dict[str, Any]
    metrics: dict[str, Any]
    versions: dict[str, str]
    weights: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able form of ``critic.json``."""
        fields = {name: getattr(self, name) for name in CriticInfo.__slots__}
        return {"schema": SCHEMA, "text_format": FORMAT, "value": "tanh(logit)", **fields}


def read_info(folder: Path) -> CriticInfo:
    """Read and check ``critic.json``.

    Raises:
        DataNotFoundError: There is no such folder.
        DataError: The folder holds no finished critic, or one of another version.
        ConfigError: A value is not what it should be, with every fault.
    """
    if not folder.is_dir():
        raise DataNotFoundError(f"no critic at {folder}: expected a folder that training wrote")
    path = folder / META
    if not path.exists():
        raise DataError(
            f"expected {META} in {folder}: this is not a critic that training finished; point to the folder given as "
            "--out, or run the training again to go on from its last checkpoint"
        )
    data = read_object(path)
    try:
        versions = (data["schema"], data["text_format"])
        fields = {name: data[name] for name in CriticInfo.__slots__}
    except KeyError as error:
        raise DataError(f"cannot read {path}: the field {error} is missing; train the critic again") from error
    if versions != (SCHEMA, FORMAT) or not all(type(version) is int for version in versions):
        raise DataError(
            f"expected a critic of schema {SCHEMA} and text format {FORMAT} in {folder}, got {show(versions[0])} and "
            f"{show(versions[1])}; load it with the release that trained it, or train it again"
        )
    faults = tuple(_faults(fields))
    if faults:
        raise ConfigError(
            f"{path}: {'; '.join(faults)}. Copy the critic's folder again from its source, or train it again", faults
        )
    return CriticInfo(**fields)


def read_object(path: Path, most: int = _BYTES) -> dict[str, Any]:
    """Read a JSON object from a regular file of bounded size.

    Args:
        path: The file.
        most: Largest size, in bytes.

    Raises:
        DataError: It is no regular file, too large, or no JSON object.
    """
    remedy = "copy the folder again from its source, or train the critic again"
    try:
        # A pipe or a device would block or never end.
        if not path.is_file():
            raise DataError(f"expected {path} to be a regular file; {remedy}")
        if path.stat().st_size > most:
            raise DataError(f"expected at most {most:,} bytes in {path}, got {path.stat().st_size:,}; {remedy}")
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else show(str(error))
        raise DataError(f"cannot read {path}: {reason}; {remedy}") from error
    if not isinstance(found, dict):
        raise DataError(f"expected a JSON object in {path}, got {show(found)}; {remedy}")
    return found


def show(value: Any) -> str:
    """Return a short, escaped form of a value from outside."""
    return _short.repr(value)


def _faults(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line per field that is wrong: what was expected, and what came."""
    heads = HEADS.get(fields["kind"], {}) if isinstance(fields["kind"], str) else {}
    expected: dict[str, tuple[Callable[[Any], bool], str]] = {
        "kind": (lambda v: isinstance(v, str) and v in HEADS, _either(HEADS)),
        "head": (lambda v: isinstance(v, str) and (v in heads or not heads), _either(heads or ["a string"])),
        "view": (lambda v: isinstance(v, str) and v in ("full", "local"), _either(["full", "local"])),
        "max_length": (_is_length, f"an integer from 64 to {MAX_LENGTH}"),
        "graphs": (
            _are_graphs,
            'an object of graphs, each with "name", "agents" (names) and "edges" (pairs of indices)',
        ),
        "tasks": (lambda v: _is_list(v, _is_name), "a list of task names"),
        "base": (_is_base, "the name of a model or a hub id, not a path"),
        "settings": (_is_object, "an object"),
        "data": (_is_object, "an object"),
        "metrics": (_is_object, "an object"),
        "versions": (lambda v: _is_object(v) and all(map(_is_name, v.values())), "an object of version strings"),
        "weights": (lambda v: isinstance(v, str) and bool(_WEIGHTS.fullmatch(v)), "32 hexadecimal digits per file"),
    }
    for name, (good, what) in expected.items():
        if not good(fields[name]):
            yield f"{name}: expected {what}, got {show(fields[name])}"


def _either(names: Any) -> str:
    return " or ".join(f'"{name}"' for name in names)


def _is_int(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_length(value: Any) -> bool:
    return _is_int(value, 64, MAX_LENGTH)


def _is_name(value: Any) -> bool:
    # A lone surrogate can be neither tokenized nor printed.
    return isinstance(value, str) and 0 < len(value) <= 1000 and not any("\ud800" <= c <= "\udfff" for c in value)


def _is_base(value: Any) -> bool:
    parts = value.split("/") if _is_name(value) else []
    return 0 < len(parts) <= 2 and not {"", ".", ".."} & set(parts) and "\\" not in value


def _is_list(value: Any, good: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and len(value) <= _NAMES and all(map(good, value))


def _is_object(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_name, value))


def _are_graphs(value: Any) -> bool:
    return _is_object(value) and 0 < len(value) <= _NAMES and all(map(_is_graph, value.values()))


def _is_graph(value: Any) -> bool:
    """Return whether a value has the form of `rewardmodels.data.dataset.graph_of`."""
    if not isinstance(value, dict) or set(value) != {"name", "agents", "edges"}:
        return False
    agents = value["agents"]
    if not _is_name(value["name"]) or not _is_list(agents, _is_name) or not agents:
        return False

    def is_edge(edge: Any) -> bool:
        ends = isinstance(edge, list) and len(edge) in (2, 3) and all(_is_int(v, -1, len(agents)) for v in edge[:2])
        return ends and (len(edge) == 2 or isinstance(edge[2], str))

    return _is_list(value["edges"], is_edge)
