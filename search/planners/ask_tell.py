"""Ask-and-tell search algorithms of other libraries as planners."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from mas_gym.errors import BudgetError, ExhaustedError
from mas_gym.systems.state import MASState
from search.plan import Plan
from search.planners.stop_rules import Stop, StopChecks, read_stop, stop_for_run
from search.planners.tree_growth import child_of, evaluate, path_scores, ranked, step_values, turns_left
from search.protocol import (
    Critic,
    Model,
    PlanGenerator,
    Planner,
    Propose,
    Remaining,
    Steps,
    Tags,
    ValueKind,
    check_at_least,
)
from search.tree import Tree

ACTION = "message"
State = TypeVar("State")


class Trial(Protocol):
    """A sample that an algorithm requests; ``parent_state`` is the node to extend, or None for the root."""

    trial_id: object
    action: str
    parent_state: int | None


class AskTellAlgorithm(Protocol[State]):
    """The interface of a library's algorithm; its own state is passed through unchanged."""

    def init_tree(self) -> State:
        """Return the state of an empty search."""

    def ask_batch(self, state: State, batch_size: int, actions: list[str]) -> tuple[State, Sequence[Trial]]:
        """Return the state and the next trials."""

    def tell(self, state: State, trial_id: object, result: tuple[int, float]) -> State:
        """Report the result of a trial (its node and its score in [0, 1]); return the algorithm's new state."""


@dataclass(frozen=True)
class AskTell(Planner):
    """A planner driven by an ask/tell algorithm, which chooses the states to extend; AC is at most ``n_trials`` + D.

    A node is a transcript, and a trial is one sampled message. Ask/tell libraries have no terminal states. If the
    algorithm extends a terminal state, the planner reports the same state and score again, at no cost. The answer is
    the terminal state with the best path score; if no trial reached one, the best transcript is completed. Results are
    reproducible only if the algorithm's random generator is seeded.

    If the first agent's policy has tags, the algorithm's actions are the tag names, so that multi-model algorithms such
    as TreeQuest's ``ABMCTSA`` can choose among them. If an agent lacks the chosen tag, its tags take turns.

    Attributes:
        algorithm: An object with ``init_tree``, ``ask_batch`` and ``tell``.
        n_trials: Number of trials.
        batch: Number of trials requested at a time, sampled and scored together.
        values: Kind of the run's values; set by the scheduler.
        stop: Rule for stopping once the answer is settled; see `search.planners.stop_rules`. None never stops.
    """

    size_setting = "n_trials"

    algorithm: AskTellAlgorithm[Any]
    n_trials: int = 30
    batch: int = 1
    values: ValueKind = "process"
    stop: Stop = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", read_stop(self.stop))
        check_at_least(self, 1, n_trials=self.n_trials, batch=self.batch)

    def for_run(self, critic: Critic | None, training: bool) -> AskTell:
        """Check that the run scores intermediate states."""
        stop = stop_for_run(self, self.stop, critic, training)
        return replace(self, values=step_values("AskTell", critic, training), stop=stop)

    def plan(self, model: Model, root: MASState, rng: random.Random) -> PlanGenerator:
        """Run the trials; a spent budget ends them early."""
        tree = Tree(root)
        checks = StopChecks(self.stop, tree)
        with suppress(BudgetError):
            yield from self._search(tree, model, checks)
        yield from _carry_on(tree, model)
        ends = _ends(tree)
        scores = path_scores(tree, ends, self.values)
        return Plan(ranked(tree, ends, scores, max(ends, key=scores.__getitem__)), tree, stopped=checks.stopped)

    def _search(self, tree: Tree, model: Model, checks: StopChecks) -> Steps[None]:
        [tags] = yield [Tags(tree.states[0])]
        actions = [tag.name for tag in tags] if len(tags) > 1 else [ACTION]
        state, reported = self.algorithm.init_tree(), 0
        while reported < self.n_trials:
            batch = min(self.batch, self.n_trials - reported)
            if not _ends(tree):
                [left] = yield [Remaining()]
                # Reserve enough messages to complete any transcript.
                batch = batch if left is None else min(batch, left - turns_left(model, tree.states[0]) + 1)
                if batch < 1:
                    return
            state, trials = self.algorithm.ask_batch(state, batch, actions)
            nodes = [0 if trial.parent_state is None else int(trial.parent_state) for trial in trials]
            yield from _extend(tree, model, nodes, [trial.action for trial in trials] if len(tags) > 1 else ())
            for trial, node in zip(trials, nodes, strict=True):
                value = tree.values[node]
                state = self.algorithm.tell(state, trial.trial_id, (node, self._score(value)))
                for step in tree.path(node):
                    tree.visits[step] += 1
                    tree.totals[step] += value
            reported += len(trials)
            if self.stop is not None and reported < self.n_trials and (ends := _ends(tree)):
                scores = path_scores(tree, ends, self.values)
                if (yield from checks.check(max(ends, key=scores.__getitem__), ends)):
                    return

    def _score(self, value: float) -> float:
        """Map a value to [0, 1], the range that ask-tell libraries expect; likelihoods are already in this range."""
        return value if self.values == "likelihood" else (max(-1.0, min(1.0, value)) + 1) / 2


def _extend(tree: Tree, model: Model, nodes: list[int], tags: Sequence[str] = ()) -> Steps[None]:
    """Replace each non-terminal node with a newly sampled and scored child.

    In a recorded run, a node without further messages is replaced by its best child. ``tags`` has the tag that writes
    each node's message; it is empty if the algorithm does not choose tags.
    """
    open_ones = [i for i, node in enumerate(nodes) if not tree.is_terminal(node)]
    if not open_ones:
        return
    wanted = [Propose(tree.states[nodes[i]]) for i in open_ones]
    if tags:
        known = yield [Tags(request.state) for request in wanted]
        for place, (i, offered) in enumerate(zip(open_ones, known, strict=True)):
            if any(tag.name == tags[i] for tag in offered):
                wanted[place] = replace(wanted[place], tag=tags[i])
    try:
        replies = yield [*wanted]
    except ExhaustedError:
        replies = [[] for _ in open_ones]
    for i, proposals in zip(open_ones, replies, strict=True):
        if proposals:
            nodes[i] = child_of(tree, model, nodes[i], *proposals)
        else:
            nodes[i] = max(tree.children(nodes[i]), key=tree.values.__getitem__)
    yield from evaluate(tree, [node for node in dict.fromkeys(nodes) if node and math.isnan(tree.values[node])])


def _carry_on(tree: Tree, model: Model) -> Steps[None]:
    nodes = [max(range(1, len(tree)), key=lambda node: (tree.values[node], node), default=0)]
    while not _ends(tree):
        yield from _extend(tree, model, nodes)


def _ends(tree: Tree) -> list[int]:
    return [node for node in range(len(tree)) if tree.is_terminal(node)]
