"""Critics without a model: log-probabilities, agreement among leaves, random values, and combinations."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from mas_gym.critics import Proposal, scores_of
from mas_gym.errors import ConfigError, CriticError
from mas_gym.internal.suggestions import unknown_name
from mas_gym.policies.base import Sample
from mas_gym.systems.graph import MAS
from search.protocol import Critic, Scores, ScoringContext, as_critic


class PolicyLikelihood(Critic):
    """The sigmoid of a message's mean token log-probability (paper, App. "Policy likelihood guidance").

    It scores a state by its last message, using the log-probability reported by the policy when it sampled the message.
    Scoring is free: RC = 0. Values lie in (0, 0.5].
    """

    name = "policy-likelihood"
    terminal_only = False
    free = True
    scores_actions = True

    def score(self, contexts: Sequence[ScoringContext]) -> list[float]:
        """Return one value per state, in order.

        Raises:
            CriticError: The state's last message was not written by a policy, or the policy reports no
                log-probabilities.
        """
        return [self._score(context) for context in contexts]

    def _score(self, context: ScoringContext) -> float:
        mean = _proposal(self.name, context).mean_logprob
        if mean is None:
            raise CriticError(
                "policy-likelihood: expected log-probabilities from the policy, got none; use another policy or critic"
            )
        return 1 / (1 + math.exp(-mean)) if mean > -700 else 0.0


def _proposal(critic: str, context: ScoringContext) -> Sample | Proposal:
    if context.proposal is None:
        raise CriticError(
            f"{critic}: expected a state whose last message was proposed in this search, got {context.state!r}"
        )
    return context.proposal


KINDS = {"entropy": "entropy", "self-certainty": "self_certainty", "least": "least"}
"""Kinds of uncertainty, each with its field of `mas_gym.policies.base.Certainty`."""


class Uncertainty(Critic):
    """The agent's certainty about its message, from the log-probabilities that its policy reported.

    ======================  ==================  ===========================================================
    kind                    value               from
    ======================  ==================  ===========================================================
    ``entropy``             ``exp(-H)``         ``H``: mean entropy of the next-token distributions
    ``self-certainty``      ``S / (1 + S)``     ``S``: mean of ``KL(uniform || distribution)`` (Kang et al. 2025)
    ``least``               ``exp(m)``          ``m``: log-probability of the least likely token
    ======================  ==================  ===========================================================

    Values lie in [0, 1]; larger means more certain. ``H``, ``S`` and ``m`` are in nats, at temperature 1. Local models
    report all three; vLLM and OpenAI-compatible servers report only ``least``.

    Args:
        kind: ``"entropy"``, ``"self-certainty"`` or ``"least"``.

    Attributes:
        name: ``"uncertainty:KIND"``.
    """

    terminal_only = False
    free = True
    scores_actions = True

    def __init__(self, kind: str = "entropy") -> None:
        if kind not in KINDS:
            raise unknown_name("kind of uncertainty", kind, KINDS)
        self.kind = kind
        self.name = f"uncertainty:{kind}"

    def score(self, contexts: Sequence[ScoringContext]) -> list[float]:
        """Return one value per state, in order.

        Raises:
            CriticError: The state's last message was not written by a policy, or the policy does not report the
                required statistic.
        """
        return [self._score(context) for context in contexts]

    def _score(self, context: ScoringContext) -> float:
        certainty = _proposal(self.name, context).certainty
        value: float | None = None if certainty is None else certainty._asdict()[KINDS[self.kind]]
        if value is None:
            remedy = "" if self.kind == "least" else ", or uncertainty:least, which needs only log-probabilities"
            raise CriticError(
                f"{self.name}: expected the statistic {self.kind!r} from the policy, got none; use a local "
                f"model (tiny, transformers:PATH){remedy}"
            )
        if self.kind == "self-certainty":
            return value / (1 + value)
        return math.exp(value if self.kind == "least" else -value)


class ConstantCritic(Critic):
    """The same value for every state: a baseline for search without guidance."""

    terminal_only = False
    free = True

    def __init__(self, value: float = 0.0) -> None:
        if not math.isfinite(value):
            raise ConfigError(f"constant: expected a finite number, got {value!r}")
        self.name = f"constant({value:g})"
        self.value = value

    def score(self, contexts: Sequence[ScoringContext]) -> list[float]:
        """Return the constant for each state."""
        return [self.value for _ in contexts]


class Agreement(Critic):
    """The share of the search's leaves with the same answer as the scored leaf (self-consistency, Wang et al. 2023).

    The value is ``2 share - 1``. The leaves are the terminal states for which the search has requested scores so far,
    including repeats and those of the current request. For best-of-N, all passes count; for a tree search, the leaves
    found so far. A leaf without a readable answer has a share of 0.
    """

    name = "agreement"
    terminal_only = True
    free = True
    reads_peers = True

    def score(self, contexts: Sequence[ScoringContext]) -> list[float]:
        """Return one value in ``[-1, 1]`` per terminal state, in order. Raises `CriticError` outside a search."""
        return [self._score(context) for context in contexts]

    def _score(self, context: ScoringContext) -> float:
        peers = context.peers
        if peers is None:
            raise CriticError(
                "agreement: expected a state with the leaves of its search, got one without leaves; use this critic "
                "only in a search"
            )
        if peers.answer is None:
            return -1.0
        return 2 * peers.answers.count(peers.answer) / len(peers.answers) - 1


class RandomCritic(Critic):
    """A fixed random value in ``[-1, 1)`` for each state: a baseline for verifiers.

    Args:
        seed: Seed of the values.
    """

    terminal_only = False
    free = True

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.name = "random" if seed == 0 else f"random({seed})"

    def score(self, contexts: Sequence[ScoringContext]) -> list[float]:
        """Return one value per state, in order."""
        key = str(self.seed).encode()[:64]
        drawn = (blake2b(context.state.digest, digest_size=8, key=key).digest() for context in contexts)
        return [int.from_bytes(bits, "big") / 2**63 - 1 for bits in drawn]


class Combination(Critic):
    """Several critics that score each state; subclasses combine their values in `combined`.

    Attributes:
        members: The critics.

    Raises:
        ConfigError: There are no members.
    """

    def __init__(self, members: Sequence[Critic]) -> None:
        if not members:
            raise ConfigError(f"{type(self).__name__.lower()}: expected at least one critic, got none")
        self.members = tuple(map(as_critic, members))
        self.name = "+".join(member.name for member in self.members)
        self.terminal_only = any(member.terminal_only for member in self.members)
        self.free = all(member.free for member in self.members)
        self.calls = sum(member.calls for member in self.members if not member.free)
        self.concurrent = any(member.concurrent for member in self.members)
        self.max_batch = min(member.max_batch for member in self.members)
        self.scores_actions = all(member.scores_actions for member in self.members)
        self.reads_peers = any(member.reads_peers for member in self.members)

    def identity(self) -> object:
        """Return the members; their identities determine the values."""
        return self.members

    def check_graph(self, mas: MAS) -> None:
        """Check the graph with each member."""
        for member in self.members:
            member.check_graph(mas)

    def score(self, contexts: Sequence[ScoringContext]) -> Scores:
        """Return the combined value of each state, with the total cost of the members."""
        votes = [scores_of(member, contexts) for member in self.members]
        rows = zip(*votes, strict=True)
        values = [self.combined(context, row) for context, row in zip(contexts, rows, strict=True)]

        def sums(costs: Iterable[object]) -> list[int]:
            return [sum(column) for column in zip(*costs, strict=True)]

        tokens, read = sums(vote.tokens for vote in votes), sums(vote.prompt_tokens for vote in votes)
        reasons = [
            "" if math.isfinite(value) else "; ".join(filter(None, column)) or "no member voted"
            for value, column in zip(values, zip(*(vote.reasons for vote in votes), strict=True), strict=True)
        ]
        return Scores(values, tokens, read, sums(vote.unread for vote in votes), reasons)

    @abstractmethod
    def combined(self, context: ScoringContext, values: Sequence[float]) -> float:
        """Return the value of a state from the members' values; NaN marks a missing value."""


class Ensemble(Combination):
    """The mean of several critics; a state has no value if any member's value is missing."""

    def combined(self, context: ScoringContext, values: Sequence[float]) -> float:
        """Return the mean."""
        return math.fsum(values) / len(values)


class Vote(Combination):
    """The vote of several critics: the mean of their verdicts, in ``[-1, 1]``.

    A positive value is a verdict of 1, and a negative value is a verdict of -1. A member abstains if its value is
    missing or 0. If no member votes, the state has no value.
    """

    def __init__(self, members: Sequence[Critic]) -> None:
        super().__init__(members)
        self.name = f"vote({self.name})"

    def identity(self) -> object:
        """Return the members, with the constants that stored runs contain."""
        return {"members": self.members, "threshold": 0.0, "quorum": 1}

    def combined(self, context: ScoringContext, values: Sequence[float]) -> float:
        """Return the mean verdict."""
        verdicts = [math.copysign(1.0, value) for value in values if math.isfinite(value) and value]
        return math.fsum(verdicts) / len(verdicts) if verdicts else math.nan
