"""The model card: what a critic is, its training data, metrics, use and limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rewardmodels.model.info import CriticInfo

_TARGETS = {
    "bt": "preference pairs of sibling states, with the Bradley-Terry loss",
    "mse": "value targets, with the squared error",
    "bce": "right and wrong final answers, with cross-entropy and p = sigmoid(2 logit)",
}


def model_card(info: CriticInfo) -> str:
    """Return the card as Markdown, with the metadata header of model hubs."""
    name = {"masprm": "process reward model (MASPRM)", "orm": "outcome reward model (ORM)"}[info.kind]
    sees = "the whole routed transcript" if info.view == "full" else "the local view of the agent that spoke last"
    states = "every state after an action" if info.kind == "masprm" else "terminal states only"
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            "pipeline_tag: text-classification",
            "tags: [mas-gym, reward-model, multi-agent]",
            "---",
            "",
            f"# A {name} for {', '.join(info.tasks)} on {', '.join(info.graphs)}",
            "",
            f"Scores {states} of a multi-agent system in [-1, 1]: `tanh` of the one logit of a sequence classifier on "
            f"the backbone {info.base}. Its input is {sees}, in MAS-Gym's text format 1, up to "
            f"{info.max_length} tokens. It was trained on {_TARGETS[info.head]}.",
            "",
            "```python",
            "from rewardmodels import load_critic",
            "",
            'critic = load_critic("PATH/TO/THIS/FOLDER")',
            "```",
            "",
            "`AutoModelForSequenceClassification.from_pretrained` loads it too.",
            "",
            "## Graphs",
            "",
            *(f"- {graph['name']}: {' -> '.join(map(str, graph['agents']))}" for graph in info.graphs.values()),  # type: ignore[call-overload]
            "",
            "## Training data",
            "",
            *_table(info.data),
            "",
            "## On held-out problems",
            "",
            *_table(info.metrics),
            "",
            "## Settings",
            "",
            *_table(info.settings),
            "",
            "## Versions",
            "",
            *_table(info.versions),
            "",
            "## Limits",
            "",
            "The labels are terminal rewards of a search with the agents named above, not human judgements: a score "
            "estimates how often these agents reach a right answer from a state. The critic was not evaluated on other "
            "graphs, agents or tasks; MAS-Gym refuses other graphs and views unless forced.",
            "",
        ]
    )


def _table(values: Mapping[str, Any]) -> list[str]:
    rows = ["| name | value |", "|---|---|"]
    for name, value in values.items():
        rows += [f"| {key} | {shown} |" for key, shown in _flat(name, value)]
    return rows


def _flat(name: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [item for key, part in value.items() for item in _flat(f"{name}, {key}", part)]
    if isinstance(value, float):
        return [(name, f"{value:.4g}")]
    if isinstance(value, list | tuple):
        return [(name, " to ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in value))]
    return [(name, str(value))]
