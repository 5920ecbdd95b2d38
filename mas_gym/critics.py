"""The base class of critics, which score states, with their input and result types.

Environments and `search` share these types; `search` exports them.
"""

from __future__ import annotations

import math
import numbers
import operator
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, overload

from mas_gym.errors import ConfigError, CriticError, EngineUnavailableError, shown
from mas_gym.internal.adapter import Adapter, ClassName, describe_type, has_method
from mas_gym.policies.base import Certainty, Sample, mean_logprob
from mas_gym.systems.graph import MAS
from mas_gym.systems.state import Action, MASState

Key = TypeVar("Key", bound=Hashable)


class Proposal(NamedTuple):
    """One message sampled from the acting agent's policy.

    Attributes:
        action: The message, routed to `ALL` or to a recipient that a planner chose.
        tokens: Generated tokens.
        logprob: Sum of token log-probabilities (nats); None if the policy does not report it.
        finish_reason: ``"stop"`` or ``"length"``.
        certainty: The policy's certainty about the message; None if the policy does not report it.
        tag: The tag that the message was requested with, such as the name of one of a policy's models; empty if none.
    """

    action: Action
    tokens: int = 0
    logprob: float | None = None
    finish_reason: str = "stop"
    certainty: Certainty | None = None
    tag: str = ""

    @property
    def mean_logprob(self) -> float | None:
        """Length-normalized log-likelihood (paper, Eq. "psi-pol"), in nats per token."""
        return mean_logprob(self.logprob, self.tokens)


class Peers(NamedTuple):
    """Other states of a search, for a critic with ``reads_peers``.

    Attributes:
        answer: The normalized answer of the state to score if it is terminal; None if there is no answer.
        answers: The answers of all terminal states whose scores this search has requested so far, including this
            state; one entry per request.
        siblings: The other states with the same parent in the same request.
    """

    answer: str | None = None
    answers: tuple[str | None, ...] = ()
    siblings: tuple[MASState, ...] = ()


class ScoringContext(NamedTuple):
    """A state to score, with its context.

    Attributes:
        state: The state to score.
        mas: The system of the state.
        proposal: Statistics of the message that led to the state; None if no policy generated it.
        peers: Other states of the search; None outside a search, and for critics without ``reads_peers``.
    """

    state: MASState
    mas: MAS
    proposal: Sample | Proposal | None
    peers: Peers | None = None


@dataclass(frozen=True, slots=True)
class Scores(Sequence[float]):
    """The values of a batch of states and their cost; as a sequence, it contains the values.

    Returned instead of plain floats if scoring generates tokens, or to report why a state has no value.

    Attributes:
        values: One per state, in order; NaN for a state without a value.
        tokens: Tokens that the critic generated: one number per state, or the sum for the batch, which is then
            divided evenly. With one number per state, a search's cost does not depend on the rest of its batch.
        prompt_tokens: The critic's prompt tokens, in the same form as ``tokens``.
        unread: Verdicts that could not be parsed, in the same form as ``tokens``.
        reasons: Empty, or one text per state: the reason if its value is NaN. The search then fails with this reason.
    """

    values: Sequence[float]
    tokens: int | Sequence[int] = 0
    prompt_tokens: int | Sequence[int] = 0
    unread: int | Sequence[int] = 0
    reasons: Sequence[str] = ()

    @classmethod
    def from_rows(cls, rows: Iterable[tuple[float, int, int, int, str]]) -> Scores:
        """Return the scores from one row per state: value, tokens, prompt tokens, unread and reason."""
        columns = list(zip(*rows, strict=True)) or [()] * 5
        return cls(*columns)

    def __len__(self) -> int:
        return len(self.values)

    @overload
    def __getitem__(self, index: int) -> float: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[float]: ...
    def __getitem__(self, index: int | slice) -> float | Sequence[float]:
        return self.values[index]

    def cost(self) -> tuple[int, int, int]:
        """Return the batch's generated tokens, prompt tokens and verdicts that could not be parsed."""
        tokens, read, unread = (
            sum(cost) if isinstance(cost, Sequence) else cost for cost in (self.tokens, self.prompt_tokens, self.unread)
        )
        return tokens, read, unread


class Critic(ABC):
    """Scores states; batch in, batch out. A subclass defines `score`; the attributes have defaults.

    An object with only this method is also accepted: `as_critic` adapts it on loading.

    A run with a store needs the critic's identity (`mas_gym.internal.identity`). Check a critic with
    `mas_gym.testing.check_critic`.

    Attributes:
        name: Name in reports, such as ``"masprm"``; by default the class's name.
        terminal_only: True for outcome critics (ORM), which are defined on terminal states only.
        free: True if scoring costs no model call (policy likelihood), so that RC stays 0.
        scores_actions: True if a value rates only the message that led to the state, not its continuations, as policy
            likelihood does; `search.MCTS` then uses the best candidate's value as the value of a frontier node.
        reads_peers: True if the critic needs the other states of the search: each `ScoringContext` then has its
            ``peers``.
        concurrent: True if scoring may and should run in a separate thread during generation, as on a GPU or a server.
        max_batch: Preferred number of states per batch.
        calls: Model calls per value, as counted in RC; for 0 calls, set ``free``.
        made_for: Name of the policy whose messages the critic was trained on; empty for critics of any agents.
    """

    name: str = ClassName()  # type: ignore[assignment]
    terminal_only: bool = False
    free: bool = False
    scores_actions: bool = False
    reads_peers: bool = False
    concurrent: bool = False
    max_batch: int = 64
    calls: int = 1
    made_for: str = ""

    @abstractmethod
    def score(self, contexts: Sequence[ScoringContext]) -> Sequence[float]:
        """Return one finite number per state, in order: a list, a tuple, a numpy array or `Scores`.

        A state that cannot be scored gets no default value: its value is NaN, with the reason in `Scores`, or the
        critic raises a `mas_gym.errors.CriticError`. The search that requested it fails with the reason; the other
        searches continue.
        """

    def check_graph(self, mas: MAS) -> None:  # noqa: B027 - most critics score every system
        """Check that the critic can score a system; called before a run's searches.

        Raises:
            mas_gym.errors.CriticError: The critic cannot score the system.
        """


class _AdaptedCritic(Adapter, Critic):
    def score(self, contexts: Sequence[ScoringContext]) -> Sequence[float]:
        found: Sequence[float] = self.identical_to.score(contexts)
        return found

    def check_graph(self, mas: MAS) -> None:
        if has_method(self.identical_to, "check_graph"):
            self.identical_to.check_graph(mas)


def as_critic(part: object) -> Critic:
    """Return a `Critic` unchanged; adapt any other object with a method ``score`` by adding the missing attributes.

    Raises:
        ConfigError: The object has no method ``score``.
    """
    if isinstance(part, Critic):
        return part
    if isinstance(part, str):
        raise ConfigError(
            f"critic: expected a critic, got {part!r:.80}; load one by name with rewardmodels.load_critic(...)"
        )
    if not has_method(part, "score"):
        raise ConfigError(
            f"critic: expected an object with score(contexts), got {describe_type(part)}; subclass search.Critic"
        )
    return _AdaptedCritic(part, Critic)


def scores_of(critic: Critic, contexts: Sequence[ScoringContext]) -> Scores:
    """Return a critic's scores with one value, one cost and one reason per state; a value is NaN if it has a reason.

    Raises:
        CriticError: The critic raised this error, or did not return one number per state.
    """
    found: Any = critic.score(contexts)
    scores = found if isinstance(found, Scores) else Scores(found)
    values: Any = _plain(scores.values)
    expected = f"critic {critic.name!r}: expected {len(contexts)} values"
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise CriticError(f"{expected}, as a list, a tuple, a numpy array or search.Scores, got {shown(found)}")
    if len(values) != len(contexts):
        raise CriticError(f"{expected}, got {len(values)}")
    given: Any = _plain(scores.reasons)
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) not in (0, len(values)):
        raise CriticError(f"{expected} with one reason per value or no reasons, got the reasons {shown(given)}")
    found_values = [_number(value) for value in values]
    reasons = [
        "" if math.isfinite(number) else str(reason or f"expected a finite number, got {shown(value)}")
        for number, value, reason in zip(found_values, values, given or [""] * len(values), strict=True)
    ]
    tokens, read, unread = (
        _shares(f"{expected} with Scores.{name}", cost, len(values))
        for name, cost in (
            ("tokens", scores.tokens),
            ("prompt_tokens", scores.prompt_tokens),
            ("unread", scores.unread),
        )
    )
    return Scores(tuple(found_values), tokens, read, unread, tuple(reasons))


def _plain(values: Any) -> Any:
    """Return an array or tensor of any library as lists of numbers, or as one number."""
    try:
        return values.tolist()
    except AttributeError:
        return values


def _number(value: object) -> float:
    """Return a real number or a zero-dimensional tensor as a float; NaN for anything else."""
    number = _plain(value)
    try:
        return math.nan if isinstance(number, bool) or not isinstance(number, numbers.Real) else float(number)
    except OverflowError:
        return math.nan


def _shares(expected: str, cost: object, count: int) -> tuple[int, ...]:
    """Return one cost per state; a sum is divided evenly, and the first states get the remainder."""
    try:
        if isinstance(plain := _plain(cost), Sequence):
            shares = tuple(operator.index(one) for one in plain)
        else:
            whole, rest = divmod(operator.index(plain), max(count, 1))
            shares = tuple(whole + (place < rest) for place in range(count))
    except TypeError:
        shares = (-1,)
    if len(shares) != count or any(share < 0 for share in shares):
        raise CriticError(f"{expected} given as one non-negative integer for all, or one per value, got {shown(cost)}")
    return shares


def finite_values(critic: Critic, states: Sequence[MASState], scores: Scores) -> list[float]:
    """Return the values of states.

    Raises:
        CriticError: A state has no value.
    """
    for state, reason in zip(states, scores.reasons, strict=True):
        if reason:
            raise CriticError(f"critic {critic.name!r} has no value for the state after turn {state.depth}: {reason}")
    return list(scores.values)


def score_batch(critic: Critic, batch: Mapping[Key, Sequence[ScoringContext]]) -> list[tuple[Key, Scores | Exception]]:
    """Score the states of several searches or environments together, and return the scores of each.

    If this fails, each search or environment is scored separately, so only those that cause the failure get an error.
    """
    try:
        scores = scores_of(critic, [context for share in batch.values() for context in share])
    except Exception as error:
        if len(batch) > 1 and not isinstance(error, EngineUnavailableError):
            return [outcome for key, share in batch.items() for outcome in score_batch(critic, {key: share})]
        return [(key, error) for key in batch]
    outcomes: list[tuple[Key, Scores | Exception]] = []
    start = 0
    for key, share in batch.items():
        part = slice(start, start := start + len(share))
        columns: tuple[Any, ...] = (scores.values, scores.tokens, scores.prompt_tokens, scores.unread, scores.reasons)
        outcomes.append((key, Scores(*(column[part] for column in columns))))
    return outcomes
