"""Critics that cost nothing: the agents' own uncertainty, agreement among leaves, and chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b

from mas_gym.errors import ConfigError, CriticError, unknown_name
from search.protocol import PeerContext, ScoringContext

KINDS = {"entropy": "entropy", "self-certainty": "self_certainty", "least": "least"}
"""Kinds of uncertainty, each with its field of `mas_gym.policies.base.Certainty`."""


class Uncertainty:
    """How sure the agent was of its message, from the log-probabilities that its policy reported.

    ======================  ==================  ===========================================================
    kind                    value               from
    ======================  ==================  ===========================================================
    ``entropy``             ``exp(-H)``         ``H``: mean entropy of the next-token distributions
    ``self-certainty``      ``S / (1 + S)``     ``S``: mean of ``KL(uniform || distribution)`` (Kang et al. 2025)
    ``least``               ``exp(m)``          ``m``: log-probability of the least likely token
    ======================  ==================  ===========================================================

    Values lie in [0, 1]; larger is surer. The sums over tokens are in nats, at temperature 1.
    Local models report all three; vLLM and OpenAI-compatible servers ``least`` alone.

    Args:
        kind: ``"entropy"``, ``"self-certainty"`` or ``"least"``.

    Attributes:
        name: ``"uncertainty:KIND"``.
    """

    terminal_only = False
    free = True
    scores_actions = True

    def __init__(self, kind: str = "entropy") -> None:
        """Check the kind."""
        if kind not in KINDS:
            raise unknown_name("kind of uncertainty", kind, KINDS)
        self.kind = kind
        self.name = f"uncertainty:{kind}"

    def score(self, contexts: Sequence[ScoringContext]) -> list[float]:
        """Return one value per state, in order.

        Raises:
            CriticError: No policy wrote the state's last message, or the policy does not report what is needed.
        """
        return [self._score(context) for context in contexts]

    def _score(self, context: ScoringContext) -> float:
        if context.proposal is None:
            raise CriticError(
                f"{self.name}: no policy wrote the last message of {context.state!r}; it scores only states made from "
                "proposals of this search"
            )
        certainty = context.proposal.certainty
        value: float | None = None if certainty is None else getattr(certainty, KINDS[self.kind])
        if value is None:
            remedy = "" if self.kind == "least" else ", or uncertainty:least, for which log-probabilities are enough"
            raise CriticError(
                f"{self.name}: the policy reports no {KINDS[self.kind].replace('_', '-')} of its messages; use a local "
                f"model (tiny, transformers:PATH){remedy}"
            )
        if self.kind == "self-certainty":
            return value / (1 + value)
        return math.exp(value if self.kind == "least" else -value)


class Agreement:
    """The share of the search's leaves that give the same answer as this one (Wang et al. 2023, self-consistency).

    The value is ``2 share - 1``. The leaves are the terminal states that the search has asked to
    score so far, those of the same request included and repeats counted: for best-of-N all its
    passes, for a tree search those found before this one. A leaf without a readable answer agrees
    with none; its share is 0.
    """

    name = "agreement"
    terminal_only = True
    free = True
    reads_peers = True

    def score(self, contexts: Sequence[ScoringContext]) -> list[float]:
        """Return one value in ``[-1, 1]`` per terminal state, in order. Raises `CriticError` outside a search."""
        return [self._score(context) for context in contexts]

    def _score(self, context: ScoringContext) -> float:
        if not isinstance(context, PeerContext):
            raise CriticError(
                "agreement compares the leaves of a search, got a state without them; use it as the critic of one"
            )
        if context.answer is None:
            return -1.0
        return 2 * context.answers.count(context.answer) / len(context.answers) - 1


class RandomCritic:
    """Draws every state's value from ``[-1, 1)``, the same each time: the baseline that any verifier should beat.

    Args:
        seed: Another seed gives other values.
    """

    terminal_only = False
    free = True

    def __init__(self, seed: int = 0) -> None:
        """Keep the seed."""
        self.seed = seed
        self.name = "random" if seed == 0 else f"random({seed})"

    def score(self, contexts: Sequence[ScoringContext]) -> list[float]:
        """Return one value per state, in order."""
        return [self._draw(context.state.digest) for context in contexts]

    def _draw(self, digest: bytes) -> float:
        bits = blake2b(digest, digest_size=8, key=str(self.seed).encode()[:64]).digest()
        return int.from_bytes(bits, "big") / 2**63 - 1


def uncertainty(argument: str) -> Uncertainty:
    """Load ``"uncertainty:KIND"``."""
    return Uncertainty(argument or "entropy")


def agreement(argument: str) -> Agreement:
    """Load ``"agreement"``."""
    if argument:
        raise ConfigError(f"agreement takes no argument, got {argument!r}")
    return Agreement()


def random_critic(argument: str) -> RandomCritic:
    """Load ``"random"`` or ``"random:SEED"``."""
    try:
        return RandomCritic(int(argument or "0"))
    except ValueError as error:
        raise ConfigError(f'expected a whole number, as in "random:7", got {argument!r}') from error
