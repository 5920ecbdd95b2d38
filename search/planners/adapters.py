"""Planners around others: a rule that chooses recipients beside any planner, and ask/tell libraries as planners.

The paper's action is a message and a recipient. By default both are the agent's own. `ChosenRecipients`
puts another rule beside any planner: it changes the recipients of the proposals that the planner gets, and
nothing else. Four rules can so be compared with one planner and the same sampled messages, in systems whose
messages name the recipient (``route: message``)::

    mcts:10,3                        the recipient that each message names
    mcts:10,3,recipients=schedule    the next agent in listed order
    mcts:10,3,recipients=uniform     any legal recipient, with equal probability
    mcts:10,3,recipients=critic      the legal recipient whose successor state has the largest value

With `AskTell`, a library chooses which node to extend, and this project samples and scores it. Any object with
TreeQuest's three methods works (``pip install treequest``)::

    planner = AskTell(treequest.StandardMCTS(samples_per_action=3), n_trials=30)
    search.run(planner, task, mas=mas, policy=policy, critic=critic)
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, get_args

from mas_gym.errors import BudgetError, ConfigError, IllegalActionError
from mas_gym.policies.base import derive_seed
from mas_gym.prompts import nameable
from mas_gym.state import Action, MASState
from search.plan import Plan
from search.planners.common import (
    Steps,
    check_at_least,
    child_of,
    evaluate,
    path_scores,
    ranked,
    step_values,
    turns_left,
)
from search.protocol import (
    Critic,
    Evaluate,
    Model,
    PlanGenerator,
    Planner,
    Propose,
    Remaining,
    Request,
    ValueKind,
    bind_planner,
)
from search.tree import Proposal, Tree

Rule = Literal["schedule", "uniform", "critic"]
OWN = "own"
"""The rule that needs no `ChosenRecipients`: each message goes to the recipient that it names."""

RULES = (OWN, *get_args(Rule))
_DRAW = "recipient"


@dataclass(frozen=True)
class ChosenRecipients:
    """A planner whose messages go to recipients that a rule chooses.

    Messages of agents without ``route: message`` are not affected. A message that names no legal recipient
    gets one, too. Its text stays as it was written.

    Attributes:
        planner: The planner that gets the proposals.
        recipients: ``"schedule"``: the next legal recipient after the speaker in listed order, ``sink`` last,
            then from the beginning; ``"uniform"``: drawn from the legal ones; ``"critic"``: the one whose
            successor state the critic values most, at one critic call per legal recipient. Among equals the
            recipient that the message names wins, then the first.
    """

    planner: Planner
    recipients: Rule

    def __post_init__(self) -> None:
        """Check the rule."""
        if self.recipients not in get_args(Rule):
            raise ConfigError(f"expected recipients to be one of {RULES}, got {self.recipients!r}")

    def for_run(self, critic: Critic | None, training: bool) -> ChosenRecipients:
        """Bind the planner; the critic's choice needs a critic that scores states after any turn."""
        if self.recipients == "critic":
            step_values("recipients=critic", critic, training)
            if getattr(critic, "scores_actions", False):
                problem = "policy likelihood rates messages, not their recipients"
                raise ConfigError(f"recipients=critic: {problem}; use a process critic, such as masprm")
        return replace(self, planner=bind_planner(self.planner, critic, training))

    def plan(self, model: Any, root: MASState, rng: random.Random) -> PlanGenerator:
        """Run the planner, and change the recipients of its proposals."""
        rule = _RULES[self.recipients](rng)
        inner = self.planner.plan(model, root, rng)
        resume: Callable[[], list[Request]] = partial(next, inner)
        try:
            while True:
                try:
                    requests = resume()
                except StopIteration as end:
                    plan: Plan = end.value
                    return plan
                try:
                    replies = yield requests
                    yield from _readdress(model, requests, replies, rule)
                except BudgetError as error:
                    resume = partial(inner.throw, error)
                else:
                    resume = partial(inner.send, replies)
        finally:
            inner.close()


class _Fan(NamedTuple):
    """A message with the states that it leads to, by recipient."""

    state: MASState
    named: tuple[int, ...]
    successors: Mapping[int, MASState]


_Steps = Generator[list[Request], list[Any], list[int]]
_Choose = Callable[[Sequence[_Fan]], _Steps]


def _readdress(model: Any, requests: Sequence[Request], replies: list[Any], choose: _Choose) -> Steps:
    """Change the recipients of the proposals among the replies."""
    places: list[tuple[list[Proposal], int]] = []
    fans: list[_Fan] = []
    for slot, request in enumerate(requests):
        if isinstance(request, Propose) and nameable(model.mas, request.state):
            replies[slot] = proposals = list(replies[slot])
            for i, proposal in enumerate(proposals):
                places.append((proposals, i))
                fans.append(_fan(model, request.state, proposal.action))
    recipients = (yield from choose(fans)) if fans else []
    for (proposals, i), recipient in zip(places, recipients, strict=True):
        proposals[i] = proposals[i]._replace(action=Action(proposals[i].action.text, recipient))


def _fan(model: Any, state: MASState, action: Action) -> _Fan:
    successors: dict[int, MASState] = {}
    for recipient in nameable(model.mas, state):
        # A condition on the edge may not hold for this text.
        with suppress(IllegalActionError):
            successors[recipient] = model.transition(state, Action(action.text, recipient))
    return _Fan(state, model.transition(state, action).recipients, successors or {action.recipient: state})


def _schedule(rng: random.Random) -> _Choose:
    def choose(fans: Sequence[_Fan]) -> _Steps:
        yield from ()
        return [min(fan.successors, key=lambda r: (r <= fan.state.acting, r)) for fan in fans]

    return choose


def _uniform(rng: random.Random) -> _Choose:
    seed, drawn = rng.getrandbits(62), Counter[bytes]()

    def choose(fans: Sequence[_Fan]) -> _Steps:
        yield from ()
        return [draw(fan) for fan in fans]

    def draw(fan: _Fan) -> int:
        # Drawn by state, so that the choices at one state do not depend on those at others.
        number = derive_seed(seed, _DRAW, fan.state.digest, drawn[fan.state.digest])
        drawn[fan.state.digest] += 1
        return sorted(fan.successors)[number % len(fan.successors)]

    return choose


def _critic(rng: random.Random) -> _Choose:
    def choose(fans: Sequence[_Fan]) -> _Steps:
        states = [state for fan in fans if len(fan.successors) > 1 for state in fan.successors.values()]
        [found] = (yield [Evaluate(states)]) if states else [[]]
        values = dict(zip(states, found, strict=True))
        return [max(fan.successors, key=lambda r: preference(fan, r, values)) for fan in fans]

    def preference(fan: _Fan, recipient: int, values: Mapping[MASState, float]) -> tuple[float, bool, int]:
        return values.get(fan.successors[recipient], 0.0), (recipient,) == fan.named, -recipient

    return choose


_RULES: dict[str, Callable[[random.Random], _Choose]] = {"schedule": _schedule, "uniform": _uniform, "critic": _critic}


ACTION = "message"


class AskTellAlgorithm(Protocol):
    """The interface of a library's algorithm; its own state is passed through unchanged."""

    def init_tree(self) -> Any:
        """Return the state of an empty search."""

    def ask_batch(self, state: Any, batch_size: int, actions: list[str]) -> tuple[Any, Sequence[Any]]:
        """Return the state and trials, each with ``trial_id`` and ``parent_state`` (None for the root)."""

    def tell(self, state: Any, trial_id: Any, result: tuple[Any, float]) -> Any:
        """Return the state after a trial's node and its score in [0, 1]."""


@dataclass(frozen=True)
class AskTell:
    """A planner whose states are chosen by an ask/tell algorithm; AC is at most ``n_trials`` + D.

    A node is a transcript, and a trial is one sampled message. Such libraries do
    not know terminal states: if one is to be extended, the planner reports the same state
    and score again, at no cost. The answer is the terminal state with the best path score; if no
    trial reached one, the best transcript is continued to its end. An algorithm with its own
    random generator is as reproducible as that generator.

    Attributes:
        algorithm: An object with ``init_tree``, ``ask_batch`` and ``tell``.
        n_trials: Number of trials.
        batch: Trials requested at a time, sampled and scored together.
        values: Kind of the run's values; set by the driver.
    """

    algorithm: AskTellAlgorithm
    n_trials: int = 30
    batch: int = 1
    values: ValueKind = "process"

    def __post_init__(self) -> None:
        """Check the settings."""
        check_at_least(self, 1, n_trials=self.n_trials, batch=self.batch)

    def for_run(self, critic: Critic | None, training: bool) -> AskTell:
        """Refuse a run whose values are not defined on intermediate states."""
        return replace(self, values=step_values("AskTell", critic, training))

    def plan(self, model: Model, root: MASState, rng: random.Random) -> PlanGenerator:
        """Run the trials; a spent budget ends them early."""
        tree = Tree(root)
        with suppress(BudgetError):
            yield from self._search(tree, model)
        yield from _carry_on(tree, model)
        ends = _ends(tree)
        scores = path_scores(tree, ends, self.values)
        return Plan(ranked(tree, ends, scores, max(ends, key=scores.__getitem__)), tree)

    def _search(self, tree: Tree, model: Model) -> Steps:
        state, reported = self.algorithm.init_tree(), 0
        while reported < self.n_trials:
            batch = min(self.batch, self.n_trials - reported)
            if not _ends(tree):
                [left] = yield [Remaining()]
                # Enough messages stay in reserve to carry on to an end from any transcript.
                batch = batch if left is None else min(batch, left - turns_left(model, tree.states[0]) + 1)
                if batch < 1:
                    return
            state, trials = self.algorithm.ask_batch(state, batch, [ACTION])
            nodes = [0 if trial.parent_state is None else int(trial.parent_state) for trial in trials]
            yield from _extend(tree, model, nodes)
            for trial, node in zip(trials, nodes, strict=True):
                value = tree.values[node]
                state = self.algorithm.tell(state, trial.trial_id, (node, self._score(value)))
                for step in tree.path(node):
                    tree.visits[step] += 1
                    tree.totals[step] += value
            reported += len(trials)

    def _score(self, value: float) -> float:
        """Map a value to the [0, 1] that such libraries expect; likelihoods are in it already."""
        return value if self.values == "likelihood" else (max(-1.0, min(1.0, value)) + 1) / 2


def _extend(tree: Tree, model: Model, nodes: list[int]) -> Steps:
    """Replace each node that is not terminal by a new child of it, sampled and scored."""
    open_ones = [i for i, node in enumerate(nodes) if not tree.is_terminal(node)]
    if not open_ones:
        return
    replies = yield [Propose(tree.states[nodes[i]], 1) for i in open_ones]
    for i, [proposal] in zip(open_ones, replies, strict=True):
        nodes[i] = child_of(tree, model, nodes[i], proposal)
    yield from evaluate(tree, [node for node in dict.fromkeys(nodes) if node and math.isnan(tree.values[node])])


def _carry_on(tree: Tree, model: Model) -> Steps:
    nodes = [max(range(1, len(tree)), key=lambda node: (tree.values[node], node), default=0)]
    while not _ends(tree):
        yield from _extend(tree, model, nodes)


def _ends(tree: Tree) -> list[int]:
    return [node for node in range(len(tree)) if tree.is_terminal(node)]
