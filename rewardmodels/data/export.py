"""Training sets as Parquet, with the columns of TRL's reward trainer and a data card."""

from __future__ import annotations

import json
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from mas_gym.errors import DataError, DataNotFoundError, StoreError
from rewardmodels.data.dataset import Example, RewardData, histogram
from rewardmodels.data.serialise import FORMAT, Parts
from rewardmodels.model.backbone import need

SCHEMA = 2
INFO = "data.json"

_COLUMNS = {
    "chosen": "text of the better sibling state (of the one state, for points and outcomes)",
    "rejected": "text of the worse sibling state",
    "margin": "difference of the two targets",
    "chosen_ends, rejected_ends": "where each part of the text ends: legend, question, then one part per message",
    "chosen_target": "target of `chosen` in [-1, 1]: W / N of the search, or the terminal reward",
    "rejected_target": "target of `rejected`",
    "task, problem_id, tree": "source of the example; split by `problem_id`, never by row",
    "mas, depth, agent": "the MAS, the number of turns before the judged message, and the agent that wrote it",
}


def export(data: RewardData, folder: str | Path) -> Path:
    """Write a set to a folder for HF `datasets`, pandas and TRL.

    Args:
        data: The examples.
        folder: A new or empty folder.

    Returns:
        The folder: one Parquet file, ``data.json`` and the data card ``README.md``.

    Raises:
        StoreError: The folder is not empty or cannot be written.
        MissingDependencyError: pyarrow is not installed.
    """
    need("pyarrow", "exporting data")
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise StoreError(f"{folder} is not empty; give a new folder")
    columns: dict[str, list[Any]] = {name: [getattr(e, name) for e in data.examples] for name in Example._fields}
    for name in ("chosen", "rejected"):
        columns[f"{name}_ends"] = [_ends(parts) for parts in columns[name]]
        columns[name] = [parts and "".join(parts) for parts in columns[name]]
    if data.kind != "pairs":
        columns = {name: values for name, values in columns.items() if "rejected" not in name and name != "margin"}
    info = {
        "schema": SCHEMA,
        "text_format": FORMAT,
        "kind": data.kind,
        "view": data.view,
        "graphs": data.graphs,
        "trees": data.trees,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), folder / f"{data.kind}.parquet")
        (folder / "README.md").write_text(_card(data), encoding="utf-8")
        (folder / INFO).write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise StoreError(f"cannot write {folder}: {error}; free some space or give another folder") from error
    return folder


def load_data(folder: str | Path) -> RewardData:
    """Read a set that `export` wrote.

    Raises:
        DataNotFoundError: There is no such folder.
        DataError: It is no exported set, or it is damaged or of another version.
        MissingDependencyError: pyarrow is not installed.
    """
    need("pyarrow", "reading exported data")
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = Path(folder)
    if not folder.is_dir():
        raise DataNotFoundError(f"no exported training set at {folder}")
    try:
        info: dict[str, Any] = json.loads((folder / INFO).read_text(encoding="utf-8"))
        if (info["schema"], info["text_format"]) != (SCHEMA, FORMAT):
            raise DataError(
                f"expected a training set of schema {SCHEMA} and text format {FORMAT} in {folder}, got "
                f"{info['schema']} and {info['text_format']}; export it again with this release"
            )
        table = pq.read_table(folder / f"{info['kind']}.parquet").to_pylist()
        examples = tuple(_example(row) for row in table)
        return RewardData(info["kind"], info["view"], info["graphs"], examples, info["trees"])
    except (OSError, KeyError, TypeError, ValueError, RecursionError, pa.ArrowException) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"cannot read the training set in {folder}: {error}; export it again") from error


def _ends(parts: Parts | None) -> list[int] | None:
    """Return where each part ends in the joined text."""
    return None if parts is None else list(accumulate(map(len, parts)))


def _example(row: dict[str, Any]) -> Example:
    for name in ("chosen", "rejected"):
        ends = row.pop(f"{name}_ends", None)
        if ends is not None:
            row[name] = tuple(row[name][a:b] for a, b in pairwise([0, *ends]))
    return Example(**row)


def _card(data: RewardData) -> str:
    counts = histogram(data)
    problems = len({(e.task, e.problem_id) for e in data.examples})
    tasks = ", ".join(dict.fromkeys(e.task for e in data.examples))
    by = [f"| {name} | {count} |" for part in ("depth", "agent") for name, count in counts[part].items()]
    columns = [f"- {name}: {what}" for name, what in _COLUMNS.items() if data.kind == "pairs" or "rejected" not in name]
    return "\n".join(
        [
            "---",
            "tags: [mas-gym, reward-model, multi-agent]",
            "---",
            "",
            f"# {data.kind.capitalize()} from search over {', '.join(data.graphs)} on {tasks}",
            "",
            f"{len(data)} {data.kind} of {problems} problems, mined from {data.trees} trees of a search with the true "
            f"terminal reward. States are written in text format {FORMAT}, {data.view} view.",
            "",
            "| depth or agent | rows |",
            "|---|---|",
            *by,
            "",
            "Columns:",
            "",
            *columns,
            "",
        ]
    )
