"""Critics that need no model of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mas_gym.errors import ConfigError, CriticError
from mas_gym.graph import MAS
from search.protocol import Critic, Score, ScoringContext


class PolicyLikelihood:
    """The sigmoid of a message's mean token log-probability (paper, App. "Policy likelihood guidance").

    It scores a state by the message that led to it, with the log-probability that the
    policy reported when it wrote that message. So it costs nothing: RC = 0. Values lie in
    (0, 0.5].
    """

    name = "policy-likelihood"
    terminal_only = False
    free = True
    scores_actions = True

    def score(self, contexts: Sequence[ScoringContext]) -> list[float]:
        """Return one value per state, in order.

        Raises:
            CriticError: No policy wrote the state's last message, or the policy reports no log-probabilities.
        """
        return [self._score(context) for context in contexts]

    def _score(self, context: ScoringContext) -> float:
        if context.proposal is None:
            raise CriticError(
                f"policy likelihood: no policy wrote the last message of {context.state!r}; "
                "it scores only states made from proposals of this search"
            )
        mean = context.proposal.mean_logprob
        if mean is None:
            raise CriticError(
                "policy likelihood: the policy reports no log-probabilities; use one that does, or another critic"
            )
        return 1 / (1 + math.exp(-mean)) if mean > -700 else 0.0


class ConstantCritic:
    """Gives every state the same value: a baseline for search without guidance."""

    terminal_only = False
    free = True

    def __init__(self, value: float = 0.0) -> None:
        """Keep the value."""
        self.name = f"constant({value:g})"
        self.value = value

    def score(self, contexts: Sequence[ScoringContext]) -> list[float]:
        """Return the constant for each state."""
        return [self.value for _ in contexts]


class Ensemble:
    """The mean of several critics.

    Attributes:
        name: The members' names, joined by ``+``.
        terminal_only: Whether any member is.
        free: Whether every member is.
        concurrent: Whether any member is.
        max_batch: The smallest of the members'.
        scores_actions: Whether every member does.
        reads_peers: Whether any member does.
        members: The critics.

    Raises:
        ConfigError: There are no members.
    """

    def __init__(self, members: Sequence[Critic]) -> None:
        """Keep the members."""
        if not members:
            raise ConfigError("an ensemble needs at least one critic, got none")
        self.members = tuple(members)
        self.name = "+".join(member.name for member in members)
        self.terminal_only = any(member.terminal_only for member in members)
        self.free = all(member.free for member in members)
        self.concurrent = any(getattr(member, "concurrent", False) for member in members)
        self.max_batch = min(int(getattr(member, "max_batch", 64)) for member in members)
        self.scores_actions = all(getattr(member, "scores_actions", False) for member in members)
        self.reads_peers = any(getattr(member, "reads_peers", False) for member in members)

    def identity(self) -> Any:
        """Return the members, whose identities determine the mean."""
        return self.members

    def check_graph(self, mas: MAS) -> None:
        """Let the members refuse a graph."""
        for member in self.members:
            getattr(member, "check_graph", lambda mas: None)(mas)

    def score(self, contexts: Sequence[ScoringContext]) -> list[float]:
        """Return the members' mean for each state, with the sum of what they cost."""
        votes = [member.score(contexts) for member in self.members]
        return [_mean(values) for values in zip(*votes, strict=True)]


def _mean(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    costs = [value for value in values if isinstance(value, Score)]
    if not costs:
        return mean
    tokens, read, unread = (
        sum(getattr(cost, name) for cost in costs) for name in ("tokens", "prompt_tokens", "unread")
    )
    return Score(mean, tokens, read, unread, "; ".join(cost.reason for cost in costs if cost.reason))
