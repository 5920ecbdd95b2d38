"""The protocol between planners, critics and the scheduler.

A planner is a generator. It yields lists of requests, receives the list of replies in
the same order, and returns a `Plan`. It performs no I/O, does not read the clock, and
draws random numbers only from its ``rng`` argument. Therefore a planner can be tested without a model, and thousands
can run concurrently::

    planner                                 scheduler
    yield [Propose(s, n=3)]          ->
                                     <-     [[Proposal, Proposal, Proposal]]
    yield [Evaluate([a, b, c])]      ->
                                     <-     [[0.1, 0.7, -0.2]]
    return Plan(...)                 ->     graded, counted, stored

A planner should return an answer within any budget that covers one pass through the
schedule. It can request `Remaining` first. If a request exceeds the budget, the search
raises `BudgetError` at the planner's ``yield``. A planner that catches the error returns the
best plan so far. If no path is finished yet, the planner may finish one path by requesting
one message at a time, at most one per scheduled agent. These requests are granted while calls remain, even
if the token budget is exhausted.

A search of a recorded run (`search.Recorded`) draws recorded messages, so a state has a limited number of messages. A
reply with fewer than ``n`` messages means that none are left at that state. If no state in a list of requests has
messages left, the search raises `ExhaustedError`, a `BudgetError`. A planner that handles only `BudgetError` returns
the best plan so far; one that handles `ExhaustedError` can continue at other states. A state has at least one message
for each time it was reached, so every path can be continued to its end.
"""

from __future__ import annotations

import copy
import random
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from mas_gym.critics import Critic as Critic
from mas_gym.critics import Peers as Peers
from mas_gym.critics import Scores as Scores
from mas_gym.critics import ScoringContext as ScoringContext
from mas_gym.critics import as_critic as as_critic
from mas_gym.errors import ConfigError, is_number, whole_number
from mas_gym.internal.adapter import Adapter, describe_type, has_method
from mas_gym.systems.graph import MAS
from mas_gym.systems.state import Action, MASState
from search.plan import Plan

P = TypeVar("P")
T = TypeVar("T")
ValueKind = Literal["process", "outcome", "likelihood", "reward"]


@dataclass(frozen=True, slots=True)
class Propose:
    """Request ``n`` new messages at ``state`` from the acting agent's policy; the reply is a list of `Proposal`.

    Repeated requests at one state in the same search return further samples, never the same ones. The reply is shorter
    only in a recorded run without further messages at the state. It is empty only if the same list requests messages at
    other states too. The model interprets ``tag``: it names one of the
    policy's models, for example. Without a tag, the model chooses, and usage is counted by tag.
    """

    state: MASState
    n: int = 1
    tag: str = ""


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Request the critic's values of ``states``; the reply is a list of floats.

    A search scores each state only once, even if it is requested repeatedly.
    """

    states: Sequence[MASState]


@dataclass(frozen=True, slots=True)
class Extract:
    """Request the answers in the last messages of ``states``; the reply is a list of strings and Nones.

    Equal answers are equal strings, so they can be counted. The reference answer is not used.
    """

    states: Sequence[MASState]


@dataclass(frozen=True, slots=True)
class Reward:
    """Request the true reward of terminal ``states``; the reply is a list of +1.0 and -1.0.

    Available only in training runs (``search.run(..., training=True)``); in other runs the search fails.
    """

    states: Sequence[MASState]


@dataclass(frozen=True, slots=True)
class Remaining:
    """Request the number of messages left in the search's budget; the reply is an integer, or None without a limit.

    The number is exact for a call limit. For a token or USD limit, it is the amount left divided by
    the mean of the search's messages so far; before the first message, it is 1.
    A time limit is ignored.
    """


class Tag(NamedTuple):
    """A tag for `Propose` at a state.

    Attributes:
        name: The tag; empty if a state has no choice.
        cost: Cost of a million tokens generated with the tag, in USD; None if unknown.
    """

    name: str
    cost: float | None = None


@dataclass(frozen=True, slots=True)
class Tags:
    """Request the tags for messages at ``state``; the reply is a tuple with at least one `Tag`."""

    state: MASState


Request = Propose | Evaluate | Extract | Reward | Remaining | Tags
REQUESTS = "Propose, Evaluate, Extract, Reward, Remaining or Tags"

Steps = Generator[list[Request], list[Any], T]
"""A part of a search: it yields requests, receives a list with the reply to each, and returns a result."""

PlanGenerator = Steps[Plan]


class Model(Protocol):
    """The part of `mas_gym.Dynamics` that planners use.

    Attributes:
        mas: The system.
        max_depth: The maximum number of messages of an episode; 1 if unknown.
    """

    mas: MAS
    max_depth: int

    def is_terminal(self, state: MASState) -> bool:
        """Return whether the state is terminal."""

    def transition(self, state: MASState, action: Action) -> MASState:
        """Return the successor state."""


class Planner(ABC):
    """A search algorithm. A subclass defines `plan`; the rest has defaults.

    An object with only this method is also accepted: `as_planner` adapts it when it is loaded.

    A run with a store needs the planner's identity, which contains everything that its results depend on: the file of
    its class, and the fields of a dataclass. A planner of another class with attributes is loaded from a spec, or has
    an attribute ``revision`` or a method ``identity()``. See `mas_gym.internal.identity`, and
    `mas_gym.testing.check_planner`.

    Attributes:
        needs_critic: False for a planner that never requests values; it runs without a critic, and only once in
            comparisons.
        size_setting: The name of the integer attribute that scales the cost, such as ``"n_simulations"``. ``--match``
            changes it (see `resized`); ``""`` for a planner with a fixed cost.
        needs_costs: True for a planner that chooses by the cost of a `Tag`; a run then needs ``prices``, which
            become part of its identity.
    """

    needs_critic: bool = True
    size_setting: str = ""
    needs_costs: bool = False

    @abstractmethod
    def plan(self, model: Model, root: MASState, rng: random.Random) -> PlanGenerator:
        """Search from ``root``.

        Args:
            model: The dynamics.
            root: A non-terminal state.
            rng: The search's random generator, seeded from (run seed, problem).
        """

    def for_run(self, critic: Critic | None, training: bool) -> Planner:
        """Return the planner to run, adapted to the critic if necessary; by default the planner itself.

        Args:
            critic: The run's critic, or None.
            training: Whether `Reward` requests are answered.

        Raises:
            ConfigError: The planner cannot use the critic.
        """
        return self

    def current_size(self) -> int:
        """Return the value of ``size_setting``.

        Raises:
            ConfigError: The planner has no such integer attribute.
        """
        return whole_number(
            f"{planner_name(self)}: the attribute {self.size_setting!r}, which size_setting names",
            getattr(self, self.size_setting, None),
            at_least=1,
        )

    def resized(self, size: int) -> Planner:
        """Return a copy with another value of ``size_setting``."""
        resized: Planner = _with_setting(self, self.size_setting, size)
        return resized


def _with_setting(part: P, name: str, value: int) -> P:
    if is_dataclass(part) and not isinstance(part, type):
        return replace(part, **{name: value})
    other = copy.copy(part)
    setattr(other, name, value)
    return other


class _AdaptedPlanner(Adapter, Planner):
    def plan(self, model: Model, root: MASState, rng: random.Random) -> PlanGenerator:
        generator: PlanGenerator = self.identical_to.plan(model, root, rng)
        return generator

    def for_run(self, critic: Critic | None, training: bool) -> Planner:
        if not has_method(self.identical_to, "for_run"):
            return self
        return as_planner(self.identical_to.for_run(critic, training))

    def resized(self, size: int) -> Planner:
        return as_planner(_with_setting(self.identical_to, self.size_setting, size))


def as_planner(part: object) -> Planner:
    """Return a `Planner` unchanged; wrap an object with a method ``plan`` in a planner that adds missing attributes.

    Raises:
        ConfigError: The object has no such method.
    """
    if isinstance(part, Planner):
        return part
    if not has_method(part, "plan"):
        raise ConfigError(f"expected an object with a plan method, got {describe_type(part)}; subclass search.Planner")
    return _AdaptedPlanner(part, Planner)


def planner_name(planner: Planner) -> str:
    """Return the name of a planner's class."""
    return type(planner.identical_to if isinstance(planner, Adapter) else planner).__name__


def value_kind(critic: Critic | None, training: bool = False) -> ValueKind | None:
    """Return the kind of a run's values; None if states are not scored."""
    if training:
        return "reward"
    if critic is None:
        return None
    if critic.terminal_only:
        return "outcome"
    return "likelihood" if critic.scores_actions else "process"


def check_at_least(planner: object, low: int, **numbers: int) -> None:
    """Check that a planner's settings are integers of at least ``low``.

    Raises:
        ConfigError: A setting is too small or not an integer.
    """
    for name, number in numbers.items():
        whole_number(f"{type(planner).__name__}: {name}", number, at_least=low)


def check_positive(planner: object, **numbers: float) -> None:
    """Check that a planner's settings are finite numbers above 0.

    Raises:
        ConfigError: A setting is not a finite number above 0.
    """
    for name, number in numbers.items():
        if not is_number(number) or number <= 0:
            raise ConfigError(
                f"{type(planner).__name__}: expected {name} to be a positive finite number, got {number!r}"
            )
