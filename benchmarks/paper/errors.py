"""Whose errors critics see: one right and one wrong message with the same beginning, from trees of the dev split."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from benchmarks.paper.credit import context_of
from benchmarks.paper.held_out import example_of
from benchmarks.paper.lab import Lab, Setting, problems
from benchmarks.paper.page import markdown_table
from benchmarks.siblings import Sibling, ordered_right
from benchmarks.tiny.truth import rights
from mas_gym.state import MASState
from mas_gym.tasks.base import Problem
from rewardmodels import LabelledTree
from search import Critic, ScoringContext


def seen(lab: Lab, setting: Setting, critics: Mapping[str, Critic]) -> str:
    """Return a table of the shares of such pairs that critics order right, by agent.

    Args:
        lab: Runs the searches of the dev split.
        setting: Task, system and agents; it is known which messages of the task are right.
        critics: By name.
    """
    task = problems(setting, "dev", lab.options.dev_trees, lab.options.grader)
    pairs = [pair for item in lab.dev_trees(setting) for pair in twins(item, task.problem(item.problem_id))]
    shares = {name: ordered_right(critic, pairs) for name, critic in critics.items()}
    rows = [
        (agent or "all", f"{share.pairs:,}", *(str(shares[name][agent]).partition(" of")[0] for name in critics))
        for agent, share in next(iter(shares.values())).items()
    ]
    return markdown_table((f"{setting.mas}: error of", "pairs", *critics), rows)


def twins(item: LabelledTree, problem: Problem) -> Iterator[Sibling]:
    """Yield every pair of a right and a wrong message with the same beginning, both visited by the search."""
    names = [agent.name for agent in item.mas.agents]
    families: dict[MASState, tuple[list[ScoringContext], list[ScoringContext]]] = defaultdict(lambda: ([], []))
    met: set[MASState] = set()
    for node, state in enumerate(item.tree.states):
        if state.parent is None or state in met or not item.tree.visits[node]:
            continue
        met.add(state)
        right = rights(problem, [(names[turn.speaker], turn.text) for turn in state.turns])[-1]
        families[state.parent][not right].append(context_of(item.tree[node], item.mas))
    for good, bad in families.values():
        yield from (Sibling(example_of(item, one.state), one, other) for one in good for other in bad)
