"""Search with the truth as critic, and each critic's detection of errors by agent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.paper.credit import context_of
from benchmarks.paper.held_out import example_of
from benchmarks.paper.lab import LIKELIHOOD, MCTS, Lab, Score, Setting, problems, row_of
from benchmarks.paper.oracle import KNOWN
from benchmarks.paper.page import markdown_table
from benchmarks.tiny.truth import rights
from mas_gym.systems.state import MASState
from mas_gym.tasks.base import Problem
from rewardmodels import LabeledTree, load_critic
from rewardmodels.data.dataset import Example
from rewardmodels.training.metrics import interval
from search import Critic, ScoringContext

ASKS = """
For tasks with known correct messages, the ground truth is included as a critic: +1 if the newest message is right,
otherwise -1. The last tables show which agents' errors a critic detects. A pair is a right and a wrong message after
the same prefix; the tables report the share of pairs on dev trees that the critic orders correctly, in %, with 95%
intervals.
"""


class Sibling(NamedTuple):
    """Two messages after the same right beginning."""

    example: Example
    right: ScoringContext
    wrong: ScoringContext


class Share(NamedTuple):
    """The share of pairs that a critic orders right, ties counted half, with its interval over problems."""

    mean: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return f"{100 * self.mean:.1f} [{100 * self.low:.1f}, {100 * self.high:.1f}] of {self.pairs:,}"


def against_truth(lab: Lab, setting: Setting) -> tuple[list[Score], list[str]]:
    """Measure MCTS with the truth as critic, and the errors that MASPRM and policy likelihood detect, by agent.

    Args:
        lab: Runs the searches.
        setting: Task, system and agents.

    Returns:
        The score and the table; nothing where it is not known which messages are right.
    """
    if setting.task not in KNOWN:
        return [], []
    scores = lab.measure(setting, [row_of(MCTS, lab.truth(setting), "truth")])
    critics = {"its MASPRM": lab.critic(setting), "policy likelihood": load_critic(LIKELIHOOD)}
    return scores, [seen(lab, setting, critics)]


def seen(lab: Lab, setting: Setting, critics: Mapping[str, Critic]) -> str:
    """Return a table of the shares of such pairs that critics order right, by agent.

    Args:
        lab: Runs the searches of the dev split.
        setting: Task, system and agents; it is known which messages of the task are right.
        critics: By name.
    """
    task = problems(setting, "dev", lab.options.dev_trees)
    pairs = [pair for item in lab.dev_trees(setting) for pair in twins(item, task.problem(item.problem_id))]
    shares = {name: ordered_right(critic, pairs) for name, critic in critics.items()}
    rows = [
        (agent or "all", f"{share.pairs:,}", *(str(shares[name][agent]).partition(" of")[0] for name in critics))
        for agent, share in next(iter(shares.values())).items()
    ]
    return markdown_table((f"{setting.mas}: error of", "pairs", *critics), rows)


def twins(item: LabeledTree, problem: Problem) -> Iterator[Sibling]:
    """Yield every pair of a right and a wrong message with the same beginning, both visited by the search."""
    names = [agent.name for agent in item.mas.agents]
    visited: dict[MASState, int] = {}
    for node, state in enumerate(item.tree.states):
        if state.parent is not None and item.tree.visits[node]:
            visited.setdefault(state, node)
    families: dict[MASState, tuple[list[ScoringContext], list[ScoringContext]]] = defaultdict(lambda: ([], []))
    for state, node in visited.items():
        assert state.parent is not None
        right = rights(problem, [(names[turn.speaker], turn.text) for turn in state.turns])[-1]
        families[state.parent][not right].append(context_of(item.tree[node], item.mas))
    for rightly, wrongly in families.values():
        yield from (Sibling(example_of(item, one.state), one, other) for one in rightly for other in wrongly)


def ordered_right(critic: Critic, pairs: Sequence[Sibling]) -> dict[str, Share]:
    """Return the share of pairs that a critic orders right: of all, named ``""``, then by agent in order of turns."""
    right, wrong = (np.array(critic.score([pair[side] for pair in pairs])) for side in (1, 2))
    hits = np.where(right == wrong, 0.5, (right > wrong).astype(float))
    found = {"": _share([pair.example for pair in pairs], hits)}
    for agent in dict.fromkeys(pair.example.agent for pair in sorted(pairs, key=lambda pair: pair.example.depth)):
        chosen = [i for i, pair in enumerate(pairs) if pair.example.agent == agent]
        found[agent] = _share([pairs[i].example for i in chosen], hits[chosen])
    return found


def _share(examples: Sequence[Example], hits: np.ndarray) -> Share:
    low, high = interval(examples, lambda chosen: float(hits[chosen].mean()))
    return Share(float(hits.mean()), low, high, len(examples))
