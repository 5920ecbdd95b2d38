"""Export of stored trees: rows of nodes as Parquet or a Hugging Face dataset, and preference pairs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from mas_gym.errors import need
from mas_gym.internal.json_types import JSONObject
from mas_gym.internal.whole_files import whole_file
from mas_gym.systems.graph import MAS, Agent
from mas_gym.systems.prompts import chat_messages
from mas_gym.tasks.base import Problem, Same
from search.results.run_info import RunInfo
from search.store.search_rows import Document
from search.tree import Node, Tree

SCHEMA = 3
BATCH = 10_000
COLUMNS = {
    "problem": "string", "question": "string", "reference": "string", "node": "int64", "parent": "int64",
    "speaker": "string", "recipients": "list", "text": "string", "terminal": "bool_", "visits": "int64",
    "total": "float64", "q": "float64", "value": "float64", "tokens": "int64", "logprob": "float64", "finish": "string",
    "seed": "int64", "arm": "string", "rank": "int64", "score": "float64", "answer": "string", "correct": "bool_",
}  # fmt: skip
"""The columns of an exported run, with the names of their Arrow types."""


def preferences(tree: Tree, mas: MAS, least: float, same: Same) -> Iterator[JSONObject]:
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


def _rows(agents: Sequence[Agent], problem: Problem, content: Document) -> Iterator[JSONObject]:
    """Yield a search's nodes; a node with several candidates is repeated for each."""
    tree = content.tree
    if tree is None:
        return
    ends: dict[int, list[JSONObject]] = {}
    for rank, one in enumerate(content.candidates, 1):
        ends.setdefault(one.node, []).append({"rank": rank, **one._asdict()})
    asked = {"problem": problem.id, "question": problem.question, "reference": problem.answer}
    terminal, cut = set(tree["terminal"]), set(tree["truncated"])
    texts = [None, *(tree["texts"][place] for place in tree["text"])]
    for node, visits in enumerate(tree["visits"]):
        said = asked | {
            "node": node,
            "parent": tree["parent"][node],
            # The root, the question, has no speaker.
            "speaker": agents[tree["speaker"][node]].name if node else None,
            "recipients": tree["recipients"][node - 1] if node else [],
            "text": texts[node],
            "terminal": node in terminal,
            "visits": visits,
            "total": tree["total"][node],
            "q": tree["total"][node] / visits if visits else None,
            "finish": "length" if node in cut else "stop",
            "arm": (tree["tag"][node] or None) if "tag" in tree else None,
            **{name: tree[name][node] for name in ("value", "tokens", "logprob", "seed")},
        }
        for end in ends.get(node, [{}]):
            found = said | end
            yield {name: _plain(value) if isinstance(value, str) else value for name, value in found.items()}


def _plain(text: str) -> str:
    # Arrow strings are UTF-8, which does not allow lone surrogates.
    return text.encode("utf-8", "replace").decode("utf-8")


def _tables(searches: Iterable[tuple[Problem, Document]], info: RunInfo) -> Iterator[Any]:
    """Yield the rows of a run's searches by problem and node as Arrow tables; the first one is empty."""
    pa = need("pyarrow", "exporting", "data")
    kinds = [(name, pa.list_(pa.int64()) if kind == "list" else getattr(pa, kind)()) for name, kind in COLUMNS.items()]
    about = {"schema": SCHEMA, "run": info.run, "name": info.name, "config": info.config, "facts": info.facts}
    schema = pa.schema(kinds, metadata={"mas_gym": json.dumps(about, sort_keys=True)})
    yield schema.empty_table()
    agents = info.mas.agents
    rows = (row for search in searches for row in _rows(agents, *search))
    while batch := list(islice(rows, BATCH)):
        yield pa.Table.from_pylist(batch, schema=schema)


def write_parquet(searches: Iterable[tuple[Problem, Document]], info: RunInfo, path: Path) -> int:
    """Write one run as Parquet, completely or not at all, and return the number of rows."""
    tables, count = _tables(searches, info), 0
    schema = next(tables).schema
    from pyarrow import parquet

    with whole_file(path) as part, parquet.ParquetWriter(part, schema) as writer:
        for table in tables:
            writer.write_table(table)
            count += table.num_rows
    return count


def to_dataset(searches: Iterable[tuple[Problem, Document]], info: RunInfo) -> Any:
    """Return one run as a ``datasets.Dataset``."""
    tables = list(_tables(searches, info))
    return need("datasets", "a data set", "data").Dataset(need("pyarrow", "exporting", "data").concat_tables(tables))
