"""Search with the truth as critic, and each critic's detection of errors by agent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from benchmarks.paper.lab import LIKELIHOOD, MCTS, Lab, Score, Setting, problems, row_of
from benchmarks.paper.oracle import KNOWN
from benchmarks.paper.page import markdown_table
from benchmarks.siblings import Sibling, ordered_right, paired
from benchmarks.tiny.truth import rights
from mas_gym.systems.state import MASState
from mas_gym.tasks.base import Problem
from rewardmodels import LabeledTree, load_critic
from search import Critic

ASKS = """
For tasks with known correct messages, the ground truth is included as a critic: +1 if the newest message is right,
otherwise -1. The last tables show which agents' errors a critic detects. A pair is a right and a wrong message after
the same prefix; the tables report the share of pairs on dev trees that the critic orders correctly, in %, with 95%
intervals.
"""


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
    task = problems(setting, "dev", lab.options.dev_trees, lab.options.grader)
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
    return paired(
        item,
        (
            (state, rights(problem, [(names[turn.speaker], turn.text) for turn in state.turns])[-1], node)
            for state, node in visited.items()
        ),
    )
