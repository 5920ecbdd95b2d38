"""Beyond the paper's planners: other tree searches, rules that choose recipients, and ask/tell libraries as planners.

PUCT, sequential halving and adaptive branching are tree searches to compare the paper's MCTS with.

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
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
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
    check_positive,
    child_of,
    evaluate,
    path_scores,
    ranked,
    step_values,
    turns_left,
)
from search.planners.mcts import MCTS, Flight, Search, check_serial
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
    as_planner,
)
from search.tree import Proposal, Tree


@dataclass(frozen=True)
class PUCT(MCTS):
    """MCTS that selects by ``Q + c P sqrt(1 + sum N) / (1 + N)``; all else as in `MCTS`, ``c_uct`` being ``c``.

    This is AlphaZero's rule in place of Eq. 1 (Silver et al., 2017). The prior of a child is the
    softmax of its message's mean token log-probability among its siblings; without
    log-probabilities it is uniform. A child without visits has the mean value of its parent's simulations as its Q, so
    the priors order first visits, too. The paper adds no priors to UCT; this is for comparison.

    Attributes:
        temperature: Temperature of the priors' softmax; the larger, the more even they are.
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        check_serial(self)
        check_positive(self, temperature=self.temperature)

    def search(self, model: Model, root: MASState) -> Search:
        """Return a new search from ``root``."""
        return _WithPriors(self, model, root)


class _WithPriors(Search):
    def __init__(self, planner: PUCT, model: Model, root: MASState) -> None:
        super().__init__(planner, model, root)
        self.temperature = planner.temperature
        self.priors = [1.0]

    def expand(self, path: list[int], count: int | None = None) -> Flight:
        tree = self.tree
        if not (yield from super().expand(path, count)):
            return False
        children = range(len(self.priors), len(tree))
        means = [tree.mean_logprob(child) / self.temperature for child in children]
        top = max(means)
        # An unknown log-probability makes the sum NaN, and the priors even.
        weights = [math.exp(mean - top) for mean in means]
        total = math.fsum(weights)
        self.priors += [1 / len(means)] * len(means) if math.isnan(total) else [w / total for w in weights]
        return True

    def select(self, node: int) -> int:
        tree = self.tree
        children = tree.children(node)
        scale = self.c_uct * math.sqrt(1 + sum(tree.visits[child] for child in children))
        unvisited = tree.totals[node] / max(tree.visits[node], 1)

        def score(child: int) -> float:
            n = tree.visits[child]
            return (tree.totals[child] / n if n else unvisited) + scale * self.priors[child] / (1 + n)

        return max(children, key=score)


@dataclass(frozen=True)
class SequentialHalving(MCTS):
    """MCTS that divides its simulations among ``width`` first messages by halving; below them as in `MCTS`.

    Sequential halving (Karnin et al., 2013; at the root of a tree: Danihelka et al., 2022): all
    first messages get the same number of simulations, then the better half gets as many again,
    and so on. The schedule is that of mctx (``seq_halving.py``), which spends ``n_simulations``
    exactly. As in mctx, decoding takes the first message with the most visits, among equals the one with the largest Q;
    below it, it follows the largest Q. Gumbel MuZero draws its root candidates by adding Gumbel noise to the policy's
    logits; messages sampled from the policy are such a draw already.

    Attributes:
        n_simulations: Number of simulations.
        width: First messages sampled.
    """

    width: int = 8

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        check_serial(self)
        check_at_least(self, 2, width=self.width)

    def search(self, model: Model, root: MASState) -> Search:
        """Return a new search from ``root``."""
        return _Halving(self, model, root)


class _Halving(Search):
    planner: SequentialHalving

    def run(self) -> Steps:
        tree = self.tree
        self.ceiling = float("inf")
        yield from self.expand([0], self.planner.width)
        children = tree.children(0)
        for visits in considered_visits(len(children), self.planner.n_simulations):
            due = [child for child in children if tree.visits[child] - self.virtual == visits]
            child = max(due, key=lambda child: tree.totals[child] / max(tree.visits[child], 1))
            if not (yield from self.simulate([0, child])):
                return

    def greedy(self, node: int, all_children: bool = False) -> int | None:
        if node:
            return super().greedy(node, all_children)
        tree = self.tree
        finalists = [child for child in tree.children(0) if all_children or self.leads[child]]
        most = max((tree.visits[child] for child in finalists), default=0)
        return max(
            (child for child in finalists if tree.visits[child] == most),
            key=lambda child: tree.totals[child] / max(most, 1),
            default=None,
        )


def considered_visits(width: int, n_simulations: int) -> Iterator[int]:
    """Yield for each simulation the number of visits of the children among which it chooses the best."""
    phases = max(1, (width - 1).bit_length())
    visits = [0] * width
    considered, left = width, n_simulations
    while left:
        for _ in range(max(1, n_simulations // (phases * considered))):
            for i in range(min(considered, left)):
                yield visits[i]
                visits[i] += 1
                left -= 1
        considered = max(min(2, width), considered // 2)


@dataclass(frozen=True)
class AdaptiveBranching(Planner):
    """AB-MCTS with Gaussian arms; AC is at most ``n_simulations`` D.

    At each state, Thompson sampling decides between a new message and a known one (Inoue et al.,
    2025). A state's arms are its children and "sample another". The value of an arm is a normal
    distribution with unknown mean and variance, learned from the values backed up through it;
    the arm of new messages learns from the first value of each child. The arm with the largest
    sampled mean is taken, so a state grows wide if its messages differ and deep if they are good.

    A simulation goes down to a terminal state, sampling one message at each new state, and backs
    up the value of its terminal state. Decoding follows the largest Q among children.

    Attributes:
        n_simulations: Number of simulations.
        spread: Prior standard deviation of values around their mean, in units of the critic's values.
    """

    size_setting = "n_simulations"

    n_simulations: int = 20
    spread: float = 0.3

    def __post_init__(self) -> None:
        """Check the settings."""
        check_at_least(self, 1, n_simulations=self.n_simulations)
        check_positive(self, spread=self.spread)

    def for_run(self, critic: Critic | None, training: bool) -> AdaptiveBranching:
        """Check that the run scores intermediate states."""
        step_values("AdaptiveBranching", critic, training)
        return self

    def plan(self, model: Model, root: MASState, rng: random.Random) -> PlanGenerator:
        """Run the simulations and decode; the budget can end them early."""
        search = _Growth(self, model, root, rng)
        try:
            for _ in range(self.n_simulations):
                yield from search.simulate()
        except BudgetError:
            if not search.ends:
                yield from search.simulate(search.tree.path(len(search.tree) - 1))
        return search.finish()


class _Growth:
    def __init__(self, planner: AdaptiveBranching, model: Model, root: MASState, rng: random.Random) -> None:
        self.planner, self.model, self.rng = planner, model, rng
        self.tree = Tree(root)
        self.squares = [0.0]
        self.firsts: dict[int, list[float]] = {}
        self.ends: list[int] = []

    def simulate(self, start: Sequence[int] = (0,)) -> Steps:
        tree, path, new = self.tree, [*start], [*start[1:]]
        while not tree.is_terminal(path[-1]):
            node = self._choose(path[-1])
            if node is None:
                yield from self._sample(path)
                new.append(path[-1])
            else:
                path.append(node)
        value = tree.values[path[-1]]
        if not tree.visits[path[-1]]:
            self.ends.append(path[-1])
        for node in path:
            if node in new and not tree.visits[node]:
                self.firsts.setdefault(tree.parents[node], []).append(value)
            tree.visits[node] += 1
            tree.totals[node] += value
            self.squares[node] += value * value

    def _sample(self, path: list[int]) -> Steps:
        """Extend the path by the child that a new message leads to, which may already exist."""
        tree, parent = self.tree, path[-1]
        [[proposal]] = yield [Propose(tree.states[parent], 1)]
        child = child_of(tree, self.model, parent, proposal)
        if child == len(self.squares):
            self.squares.append(0.0)
            yield from evaluate(tree, [child])
        path.append(child)

    def _choose(self, node: int) -> int | None:
        """Return the child with the largest sampled mean; None if a new message has it, or there is no child."""
        tree = self.tree
        best, best_sample = None, -math.inf
        children = tree.children(node)
        if not children:
            return None
        mean = tree.totals[node] / max(tree.visits[node], 1)
        for child in children:
            n, total = tree.visits[child], tree.totals[child]
            sample = self._draw(mean, n, total, self.squares[child])
            if sample > best_sample:
                best, best_sample = child, sample
        firsts = self.firsts.get(node, [])
        fresh = self._draw(mean, len(firsts), math.fsum(firsts), math.fsum(v * v for v in firsts))
        return best if best_sample >= fresh else None

    def _draw(self, prior: float, n: int, total: float, squares: float) -> float:
        """Sample a mean from the posterior of a normal with a normal-inverse-gamma prior worth one observation."""
        mean = (prior + total) / (1 + n)
        deviation = squares - 2 * mean * total + n * mean * mean + (mean - prior) ** 2
        shape = (1 + n) / 2
        scale = (self.planner.spread**2 + max(deviation, 0.0)) / 2
        variance = scale / max(self.rng.gammavariate(shape, 1.0), 1e-12)
        return self.rng.gauss(mean, math.sqrt(variance / (1 + n)))

    def finish(self) -> Plan:
        tree, node = self.tree, 0
        while visited := [child for child in tree.children(node) if tree.visits[child]]:
            node = max(visited, key=lambda child: tree.totals[child] / tree.visits[child])
        return Plan(ranked(tree, self.ends, path_scores(tree, self.ends, "process"), node), tree)


Rule = Literal["schedule", "uniform", "critic"]
OWN = "own"
"""The rule that needs no `ChosenRecipients`: each message goes to the recipient that it names."""

RULES = (OWN, *get_args(Rule))
_DRAW = "recipient"


@dataclass(frozen=True)
class ChosenRecipients(Planner):
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
        planner = as_planner(self.planner)
        own = {
            "planner": planner,
            "needs_critic": planner.needs_critic or self.recipients == "critic",
            "size_setting": planner.size_setting,
        }
        for name, value in own.items():
            object.__setattr__(self, name, value)

    def for_run(self, critic: Critic | None, training: bool) -> ChosenRecipients:
        """Bind the planner; the critic's choice needs a critic that scores states after any turn."""
        if self.recipients == "critic":
            step_values("recipients=critic", critic, training)
            if critic is not None and critic.scores_actions:
                problem = "policy likelihood rates messages, not their recipients"
                raise ConfigError(f"recipients=critic: {problem}; use a process critic, such as masprm")
        return replace(self, planner=self.planner.for_run(critic, training))

    def current_size(self) -> int:
        """Return the planner's size."""
        return self.planner.current_size()

    def resized(self, size: int) -> ChosenRecipients:
        """Return a copy with the planner of another size."""
        return replace(self, planner=self.planner.resized(size))

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
class AskTell(Planner):
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

    size_setting = "n_trials"

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
