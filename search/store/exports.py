"""Export of stored trees: rows of nodes as Parquet or a Hugging Face dataset, and preference pairs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from mas_gym.errors import need
from mas_gym.internal.whole_files import whole_file
from mas_gym.systems.graph import MAS, Agent
from mas_gym.systems.prompts import chat_messages
from mas_gym.tasks.base import Same
from search.results.run_info import RunInfo
from search.store.row_conversion import CandidateRow, NodeRow, recipients_of
from search.tree import Node, Tree

SCHEMA = 3
BATCH = 10_000
TEXT = {"problem", "question", "reference", "speaker", "text", "finish", "arm", "answer"}
NUMBER = {"total", "q", "value", "logprob", "score"}
FLAG = {"terminal", "correct"}
COLUMNS = [
    "problem", "question", "reference", "node", "parent", "speaker", "recipients", "text", "terminal",
    "visits", "total", "q", "value", "tokens", "logprob", "finish", "seed", "arm",
    "rank", "score", "answer", "correct",
]  # fmt: skip
ExportedSearch = tuple[dict[str, Any], list[NodeRow], list[CandidateRow]]
"""A row of ``searches`` with nodes and candidates."""


def preferences(tree: Tree, mas: MAS, least: float, same: Same) -> Iterator[dict[str, Any]]:
    """Yield a row for each state whose messages' best and worst mean rewards differ by at least ``least``.

    Of messages that are equal by ``same``, only the most visited one is compared.
    """
    for node in tree:
        unique: list[Node] = []
        visited = [tree[child] for child in tree.children(node.id) if tree.visits[child]]
        for child in sorted(visited, key=lambda child: (-child.visits, child.id)):
            if not any(same(other.state.text, child.state.text) for other in unique):
                unique.append(child)
        judged = sorted((child.q or 0.0, -child.id, child.state.text) for child in unique)
        if len(judged) > 1 and judged[-1][0] - judged[0][0] >= least:
            chosen, rejected = ([{"role": "assistant", "content": _plain(judged[end][2])}] for end in (-1, 0))
            yield {
                "agent": mas.agents[node.state.acting].name,
                "prompt": [{"role": role, "content": _plain(text)} for role, text in chat_messages(mas, node.state)],
                "chosen": chosen,
                "rejected": rejected,
                "margin": judged[-1][0] - judged[0][0],
            }


def _rows(
    agents: Sequence[Agent], row: dict[str, Any], nodes: list[NodeRow], candidates: list[CandidateRow]
) -> Iterator[list[Any]]:
    """Yield a search's nodes; a node with several candidates is repeated for each."""
    ends: dict[int, list[CandidateRow]] = {}
    for candidate in candidates:
        ends.setdefault(candidate.node, []).append(candidate)
    for node in nodes:
        # The root, the question, has no speaker.
        speaker = agents[node.speaker].name if node.parent >= 0 else None
        said = [row["problem"], row["question"], row["reference"], node.node, node.parent, speaker]
        said += [recipients_of(node), node.text, bool(node.terminal), *node[7:]]
        for end in ends.get(node.node, [None]):
            rank = [None] * 4 if end is None else [end.rank, end.score, end.answer, bool(end.correct)]
            yield [value if not isinstance(value, str) else _plain(value) for value in (*said, *rank)]


def batches(searches: Iterable[ExportedSearch], info: RunInfo) -> Iterator[dict[str, list[Any]]]:
    """Yield the rows of a run's searches by problem and node, as columns, a few thousand at a time."""
    agents = info.mas.agents
    rows = (row for search in searches for row in _rows(agents, *search))
    while batch := list(islice(rows, BATCH)):
        yield dict(zip(COLUMNS, map(list, zip(*batch, strict=True)), strict=True))


def _plain(text: str) -> str:
    # Arrow strings are UTF-8, which does not allow lone surrogates.
    return text.encode("utf-8", "replace").decode("utf-8")


def arrow_schema(info: RunInfo) -> Any:
    """Return the Arrow schema, with the run's config as metadata."""
    pa = _pyarrow()
    kinds = {
        name: pa.string()
        if name in TEXT
        else pa.float64()
        if name in NUMBER
        else pa.bool_()
        if name in FLAG
        else pa.int64()
        for name in COLUMNS
    }
    kinds["recipients"] = pa.list_(pa.int64())
    about = {"schema": SCHEMA, "run": info.run, "name": info.name, "config": info.config, "facts": info.facts}
    return pa.schema(list(kinds.items()), metadata={"mas_gym": json.dumps(about, sort_keys=True)})


def write_parquet(searches: Iterable[ExportedSearch], info: RunInfo, path: Path) -> int:
    """Write one run as Parquet, completely or not at all, and return the number of rows."""
    pa = _pyarrow()
    from pyarrow import parquet

    schema, count = arrow_schema(info), 0
    with whole_file(path) as part, parquet.ParquetWriter(part, schema) as writer:
        for columns in batches(searches, info):
            table = pa.table(columns, schema=schema)
            writer.write_table(table)
            count += table.num_rows
    return count


def to_dataset(searches: Iterable[ExportedSearch], info: RunInfo) -> Any:
    """Return one run as a ``datasets.Dataset``."""
    pa, dataset = _pyarrow(), need("datasets", "a data set", "data").Dataset
    schema = arrow_schema(info)
    tables = [pa.table(columns, schema=schema) for columns in batches(searches, info)]
    return dataset(pa.concat_tables(tables) if tables else schema.empty_table())


def _pyarrow() -> Any:
    return need("pyarrow", "exporting", "data")
