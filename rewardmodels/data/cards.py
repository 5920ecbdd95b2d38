"""The Markdown of model cards and data cards."""

from __future__ import annotations

from collections.abc import Mapping

from mas_gym.internal.json_types import JSONMapping

PLACEHOLDER = "PATH/TO/THIS/FOLDER"
"""Placeholder in a card's example until the model has a name."""

LOADING = f"""\
```python
from rewardmodels import load_critic

critic = load_critic("{PLACEHOLDER}")
```"""


def markdown(*blocks: str) -> str:
    """Return a document of blocks, such as headings, paragraphs and tables, separated by blank lines."""
    return "\n\n".join(blocks) + "\n"


def metadata(**fields: str) -> str:
    """Return the metadata block at the start of a card, which model hubs read."""
    return "\n".join(["---", *(f"{name}: {value}" for name, value in fields.items()), "---"])


def facts_table(values: JSONMapping) -> str:
    """Return names and values as a Markdown table."""
    rows = ["| name | value |", "|---|---|"]
    for name, value in values.items():
        rows += [f"| {key} | {shown} |" for key, shown in _flat(name, value)]
    return "\n".join(rows)


def _flat(name: str, value: object) -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [item for key, part in value.items() for item in _flat(f"{name}, {key}", part)]
    if isinstance(value, float):
        return [(name, f"{value:.4g}")]
    if isinstance(value, list | tuple):
        return [(name, " to ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in value))]
    return [(name, str(value))]
