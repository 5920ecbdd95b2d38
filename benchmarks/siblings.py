"""A critic's error detection by agent, on pairs of a right and a wrong message after the same correct prefix.

In the generated tasks the truth of each message is known. Such pairs can therefore be taken from stored search trees,
and the two states of a pair differ only in the last message::

    mas-gym rollouts --task ordering --mas logic --split dev -n 300 --store dev.db
    python -m benchmarks.siblings --store dev.db --task ordering --critic FOLDER --critic tiny-masprm

The script prints the share of pairs that each critic orders correctly, by agent, with 95% bootstrap intervals over
problems; a tie counts as half. To test whether the labels or the model limit a critic, a critic can be trained on the
truth: the target of each visited state is +1 if no message is wrong, else -1, with squared error and the training
config of ``mas-gym train``::

    mas-gym rollouts --task ordering --mas logic --split train -n 2400 --store train.db
    python -m benchmarks.siblings --store train.db --task ordering --split train --teach FOLDER
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

import mas_gym
import rewardmodels
from benchmarks.paper.credit import context_of
from benchmarks.paper.held_out import example_of
from benchmarks.tiny.truth import first_error
from mas_gym.systems.state import MASState
from mas_gym.tasks.base import Problem, Task
from rewardmodels import LabeledTree, RewardData, stored_trees
from rewardmodels.data.dataset import Example, graph_of
from rewardmodels.data.encode import state_parts
from rewardmodels.training.metrics import interval
from search import Critic, ScoringContext


class Sibling(NamedTuple):
    """Two messages after the same right beginning."""

    example: Example
    right: ScoringContext
    wrong: ScoringContext


def truths(item: LabeledTree, problem: Problem) -> dict[MASState, tuple[bool, int]]:
    """Return for each visited state whether every message so far is right, and its first node."""
    names = [agent.name for agent in item.mas.agents]
    spoken: dict[MASState, list[tuple[str, str]]] = {item.tree.states[0]: []}
    found: dict[MASState, tuple[bool, int]] = {}
    for node, state in enumerate(item.tree.states):
        if state.parent is not None:
            spoken[state] = [*spoken[state.parent], (names[state.speaker], state.text)]
        if state not in found and item.tree.visits[node]:
            found[state] = first_error(problem, spoken[state]) is None, node
    return found


def siblings(item: LabeledTree, problem: Problem) -> Iterator[Sibling]:
    """Yield every right and every wrong message after the same beginning without an error."""
    known = truths(item, problem)
    judged = ((state, *found) for state, found in known.items() if state.parent is None or known[state.parent][0])
    return paired(item, judged)


def paired(item: LabeledTree, judged: Iterable[tuple[MASState, bool, int]]) -> Iterator[Sibling]:
    """Yield every right and every wrong message with the same beginning.

    Args:
        item: The tree.
        judged: States, each with whether its last message is right, and its node.
    """
    families: dict[MASState, tuple[list[ScoringContext], list[ScoringContext]]] = defaultdict(lambda: ([], []))
    for state, right, place in judged:
        if state.parent is not None:
            families[state.parent][not right].append(context_of(item.tree[place], item.mas))
    for rights, wrongs in families.values():
        yield from (Sibling(example_of(item, one.state), one, other) for one in rights for other in wrongs)


class Share(NamedTuple):
    """The share of pairs that a critic orders right, ties counted half, with its interval over problems."""

    mean: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return f"{100 * self.mean:.1f} [{100 * self.low:.1f}, {100 * self.high:.1f}] of {self.pairs:,}"


def ordered_right(critic: Critic, pairs: Sequence[Sibling]) -> dict[str, Share]:
    """Return the share of pairs that a critic orders right: of all, named ``""``, then by agent in order of turns."""
    right, wrong = (np.array(critic.score([pair[side] for pair in pairs])) for side in (1, 2))
    hits = np.where(right == wrong, 0.5, (right > wrong).astype(float))
    found = {"": _share([pair.example for pair in pairs], hits)}
    for agent in dict.fromkeys(pair.example.agent for pair in sorted(pairs, key=lambda pair: pair.example.depth)):
        chosen = [i for i, pair in enumerate(pairs) if pair.example.agent == agent]
        found[agent] = _share([pairs[i].example for i in chosen], hits[chosen])
    return found


def judge(name: str, critic: Critic, pairs: Sequence[Sibling]) -> None:
    """Print the share of pairs ordered right, by agent."""
    overall, *agents = ordered_right(critic, pairs).items()
    print(f"{name}: {overall[1]}")
    for agent, share in agents:
        print(f"  {agent:24} {share}")


def _share(examples: Sequence[Example], hits: np.ndarray) -> Share:
    low, high = interval(examples, lambda chosen: float(hits[chosen].mean()))
    return Share(float(hits.mean()), low, high, len(examples))


def true_points(trees: Sequence[LabeledTree], task: Task) -> RewardData:
    """Return every distinct visited state with the truth as its target."""
    examples = [
        example_of(item, state, 1.0 if right else -1.0)._replace(chosen=tuple(state_parts(item.mas, state)))
        for item in trees
        for state, (right, _) in truths(item, task.problem(item.problem_id)).items()
        if state.parent is not None
    ]
    return RewardData(
        "points", "full", {item.mas.name: graph_of(item.mas) for item in trees}, tuple(examples), len(trees)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True, help="run store of mas-gym rollouts")
    parser.add_argument("--task", default="arithmetic", choices=("arithmetic", "ordering"))
    parser.add_argument("--split", default="dev", choices=("train", "dev"), help="of the store's problems")
    parser.add_argument("--critic", action="append", default=[], help="as for mas-gym eval; repeatable")
    parser.add_argument("--teach", help="train a critic on the truth into this folder instead")
    arguments = parser.parse_args()
    task = mas_gym.load_task(arguments.task, split=arguments.split)
    trees = list(stored_trees(arguments.store))
    if arguments.teach:
        data = true_points(trees, task)
        rewardmodels.train(data, arguments.teach, "tiny", kind="masprm", head="mse", log=print)
        return
    pairs = [pair for item in trees for pair in siblings(item, task.problem(item.problem_id))]
    print(
        f"{len(trees):,} trees, {len(pairs):,} pairs of {len({pair.example.problem_id for pair in pairs}):,} problems"
    )
    for spec in arguments.critic or ["policy-likelihood"]:
        judge(spec, rewardmodels.load_critic(spec), pairs)


if __name__ == "__main__":
    main()
