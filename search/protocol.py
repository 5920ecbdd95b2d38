"""The protocol between planners, critics and the driver.

A planner is a generator. It yields lists of requests, is sent the list of
replies in the same order, and returns a `Plan`; it does no I/O, reads no clock
and draws randomness only from the generator that it is given. So a planner can
be tested without a model, and thousands can run at once::

    planner                                 driver
    yield [Propose(s, n=3)]          ->
                                     <-     [[Proposal, Proposal, Proposal]]
    yield [Evaluate([a, b, c])]      ->
                                     <-     [[0.1, 0.7, -0.2]]
    return Plan(...)                 ->     graded, counted, stored

A planner should answer within any budget that pays for one pass through the
schedule. It can ask for `Remaining` before it commits itself. When a request does
not fit into the budget, the driver raises `BudgetError` at the planner's ``yield``;
a planner that catches it returns the best plan it has. If no path has reached its
end yet, it may finish one, with single messages: they are granted as long as calls
are left, even when the tokens are spent (at most one message per scheduled agent).
"""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from mas_gym.asking import ScoringContext as ScoringContext
from mas_gym.errors import ConfigError
from mas_gym.state import MASState
from search.plan import Plan

ValueKind = Literal["process", "outcome", "likelihood", "reward"]


@dataclass(frozen=True, slots=True)
class Propose:
    """Ask the acting agent's policy for ``n`` fresh messages at ``state``; the reply is a list of `Proposal`.

    Asking again at the same state in the same search gives further samples, never the same ones.
    """

    state: MASState
    n: int = 1


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Ask the critic for the values of ``states``; the reply is a list of floats.

    A state is scored once in a search, however often it is requested.
    """

    states: Sequence[MASState]


@dataclass(frozen=True, slots=True)
class Extract:
    """Ask for the answers in the last messages of ``states``; the reply is a list of strings and Nones.

    Equal answers come back as equal strings, so that they can be counted. The reference answer is not used.
    """

    states: Sequence[MASState]


@dataclass(frozen=True, slots=True)
class Reward:
    """Ask for the true reward of terminal ``states``; the reply is a list of +1.0 and -1.0.

    Answered only in training runs (``search.run(..., training=True)``); elsewhere the search fails.
    """

    states: Sequence[MASState]


@dataclass(frozen=True, slots=True)
class Remaining:
    """Ask how many more messages this search's budget pays for; the reply is a whole number, or None without a limit.

    The number is exact for a limit of calls. For a limit of tokens it divides the tokens left
    by the mean length of the search's messages so far, and is 1 before the first message.
    A limit of seconds does not count.
    """


Request = Propose | Evaluate | Extract | Reward | Remaining
PlanGenerator = Generator[list[Request], list[Any], Plan]


class Model(Protocol):
    """The part of `mas_gym.Dynamics` that planners use."""

    def is_terminal(self, state: Any) -> bool:
        """Return whether the state is terminal."""

    def transition(self, state: Any, action: Any) -> Any:
        """Return the successor state."""


@runtime_checkable
class Planner(Protocol):
    """A search algorithm; any object with this method is one.

    A planner may also define ``for_run(critic, training) -> Planner``: the driver calls it
    once, with the critic (or None) and whether the true reward is answered, and runs the
    planner that it returns. So a planner can adapt to the critic, or refuse it.

    A run with a store needs the planner's identity: what its results depend on. Its class,
    its source and its attributes are stated automatically; ``identity()`` replaces the
    attributes, and is needed if one of them cannot be stated or changes during a search.
    See `mas_gym.identity`, and `mas_gym.testing.check_planner`.
    """

    def plan(self, model: Model, root: MASState, rng: random.Random) -> PlanGenerator:
        """Search from ``root``.

        Args:
            model: The dynamics.
            root: A non-terminal state.
            rng: The search's own generator, seeded from (run seed, problem).
        """


@runtime_checkable
class Critic(Protocol):
    """Scores states; batch in, batch out.

    A critic may have more attributes: ``max_batch`` (the number of states it prefers to get
    at once, 64 by default); ``concurrent`` (True if scoring may and should run in a thread
    of its own beside generation, as on a GPU or a server; False by default);
    ``scores_actions`` (True if a value rates the message that led to the state and not what
    may follow, as policy likelihood does; then `MCTS` takes the best candidate's value for
    a frontier's); ``reads_peers`` (True if it gets each state as an `PeerContext`); and
    ``check_graph(mas)`` (raises `mas_gym.errors.CriticError` for a MAS that it cannot score;
    called before a run's searches).

    A value is a finite number. What cannot be scored gets no default: return a `Score` that is
    not a number, with the reason, or raise; that search fails with the reason, the others go on.

    A run with a store needs the critic's identity: what its values depend on. Its class, its
    source and its attributes are stated automatically; ``identity()`` replaces the
    attributes, and is needed if one of them cannot be stated (a loaded model: state the
    digest of its weights) or changes while it scores. See `mas_gym.identity`, and
    `mas_gym.testing.check_critic`.

    Attributes:
        name: Its name in reports, such as ``"masprm"``.
        terminal_only: True for outcome critics (ORM), which are defined on terminal states alone.
        free: True when scoring costs no model call (policy likelihood), so that RC stays 0.
    """

    name: str
    terminal_only: bool
    free: bool

    def score(self, contexts: Sequence[ScoringContext]) -> Sequence[float]:
        """Return one value per state, in order, each a float or a `Score`. Raises `mas_gym.errors.CriticError`."""


class Score(float):
    """A value with what it cost; a critic whose forwards are not its only cost returns these instead of floats.

    Attributes:
        tokens: Tokens that the critic generated for it.
        prompt_tokens: Tokens that it read to generate them.
        unread: Verdicts among them that could not be read.
        reason: Why the value is not a number, if it is not: the search then fails with this reason.
    """

    __slots__ = ("prompt_tokens", "reason", "tokens", "unread")
    tokens: int
    prompt_tokens: int
    unread: int
    reason: str

    def __new__(cls, value: float, tokens: int = 0, prompt_tokens: int = 0, unread: int = 0, reason: str = "") -> Score:
        """Keep a value and its cost."""
        score = super().__new__(cls, value)
        score.tokens, score.prompt_tokens, score.unread, score.reason = tokens, prompt_tokens, unread, reason
        return score


class PeerContext(ScoringContext):
    """What a critic with ``reads_peers`` gets: a context with other states of the search.

    Attributes:
        answer: The normalised answer of a terminal state; None without one.
        answers: The answers of all terminal states that this search has asked to score so far, this one's included,
            as often as they were asked for.
        siblings: The other states with the same parent that it asks to score now.
    """

    answer: str | None = None
    answers: tuple[str | None, ...] = ()
    siblings: tuple[MASState, ...] = ()


def bind_planner(planner: Planner, critic: Critic | None, training: bool) -> Planner:
    """Return the planner to run: the result of its ``for_run`` if it has one, else itself.

    Raises:
        ConfigError: The planner refuses the critic.
    """
    for_run = getattr(planner, "for_run", None)
    settled: Planner = planner if for_run is None else for_run(critic, training)
    return settled


def needs_critic(planner: Planner) -> bool:
    """Return whether a planner cannot run without a critic; True for a third-party planner without ``for_run``."""
    for_run = getattr(planner, "for_run", None)
    if for_run is None:
        # Shipped planners without for_run request no values; others may.
        return not type(planner).__module__.startswith("search.")
    try:
        for_run(None, False)
    except ConfigError:
        return True
    return False


def value_kind(critic: Critic | None, training: bool = False) -> ValueKind | None:
    """Return the kind of a run's values; None if nothing scores states."""
    if training:
        return "reward"
    if critic is None:
        return None
    if critic.terminal_only:
        return "outcome"
    return "likelihood" if getattr(critic, "scores_actions", False) else "process"
