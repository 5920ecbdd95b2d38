"""Training sets as Parquet, with the columns that TRL's reward trainer reads and a data card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mas_gym.errors import DataError, DataNotFoundError, StoreError
from rewardmodels.data.dataset import RewardData, Row, histogram
from rewardmodels.data.serialise import FORMAT
from rewardmodels.model.backbone import need

SCHEMA = 1
INFO = "data.json"

_COLUMNS = {
    "chosen": "text of the better sibling state (of the one state, for points and outcomes)",
    "rejected": "text of the worse sibling state",
    "margin": "difference of the two targets",
    "chosen_target": "target of `chosen` in [-1, 1]: W / N of the search, or the terminal reward",
    "rejected_target": "target of `rejected`",
    "task, problem_id, tree": "where the row comes from; split by `problem_id`, never by row",
    "mas, depth, agent": "the system, the turns taken before the judged message, and who wrote it",
}


def export(data: RewardData, folder: str | Path) -> Path:
    """Write a set to a folder that HF `datasets`, pandas and TRL read.

    Args:
        data: The rows.
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
    columns = {name: [getattr(row, name) for row in data.rows] for name in Row._fields}
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
    """Read what `export` wrote.

    Raises:
        DataNotFoundError: There is no such folder.
        DataError: It is not an exported set, or damaged, or of another version.
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
        rows = tuple(Row(**row) for row in table)
        return RewardData(info["kind"], info["view"], info["graphs"], rows, info["trees"])
    except (OSError, KeyError, TypeError, json.JSONDecodeError, pa.ArrowInvalid) as error:
        raise DataError(f"cannot read the training set in {folder}: {error}; export it again") from error


def _card(data: RewardData) -> str:
    counts = histogram(data)
    problems = len({(row.task, row.problem_id) for row in data.rows})
    tasks = ", ".join(dict.fromkeys(row.task for row in data.rows))
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
