"""Critics that need no model of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mas_gym.errors import CriticError
from search.protocol import ScoringContext


class PolicyLikelihood:
    """The sigmoid of a message's mean token log-probability (paper, App. "Policy likelihood guidance").

    It scores a state by the message that led to it, from what the policy said when it
    wrote that message, so it costs nothing: RC = 0. Values lie in (0, 0.5].
    """

    name = "policy-likelihood"
    terminal_only = False
    free = True
    scores_actions = True

    def score(self, contexts: Sequence[ScoringContext]) -> list[float]:
        """Return one value per state, in order.

        Raises:
            CriticError: No policy wrote the state's last message, or the policy tells no log-probabilities.
        """
        return [self._score(context) for context in contexts]

    def _score(self, context: ScoringContext) -> float:
        if context.proposal is None:
            raise CriticError(
                f"policy likelihood: no policy wrote the last message of {context.state!r}; "
                "it can only score states made from proposals of this search"
            )
        mean = context.proposal.mean_logprob
        if mean is None:
            raise CriticError(
                "policy likelihood: the policy tells no log-probabilities; use a policy that does, or another critic"
            )
        return 1 / (1 + math.exp(-mean)) if mean > -700 else 0.0


class ConstantCritic:
    """Gives every state the same value: a baseline, under which search is blind."""

    terminal_only = False
    free = True

    def __init__(self, value: float = 0.0) -> None:
        """Keep the value."""
        self.name = f"constant({value:g})"
        self.value = value

    def score(self, contexts: Sequence[ScoringContext]) -> list[float]:
        """Return the constant for each state."""
        return [self.value for _ in contexts]
