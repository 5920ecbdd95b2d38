"""What the checks share: a list of findings, texts to say, and random episodes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from mas_gym.dynamics import Dynamics
from mas_gym.errors import ComplianceError, IllegalActionError
from mas_gym.policies.base import mean_logprob
from mas_gym.state import Action, MASState

HOSTILE = ("", " \n\t", "\ud800", "نص من اليمين إلى اليسار", "\u202eesrever", "\x00\x1b[31m", "Final Answer: " * 50)
ORDINARY = (
    "Facts: 3 and 4.",
    "3 + 4 = 7",
    "VERDICT: DISAGREE\nRecount.",
    "VERDICT: AGREE",
    "Final Answer: 7",
)


class ProposalLike(NamedTuple):
    """What a driver would send for one sampled message."""

    action: Action
    tokens: int
    logprob: float | None
    finish_reason: str

    @property
    def mean_logprob(self) -> float | None:
        """Length-normalised log-likelihood, in nats per token."""
        return mean_logprob(self.logprob, self.tokens)


class Findings:
    """Collects breaches; `settle` raises them all."""

    def __init__(self, subject: str) -> None:
        """Name what is being checked."""
        self.subject = subject
        self.faults: list[str] = []

    def expect(self, holds: bool, fault: str) -> bool:
        """Note a fault, once, unless the expectation holds; return whether it does."""
        if not holds and fault not in self.faults:
            self.faults.append(fault)
        return holds

    def settle(self) -> None:
        """Raise `ComplianceError` if anything was found."""
        if self.faults:
            count = len(self.faults)
            head = f"{self.subject} breaks its contract in {count} way{'s' if count > 1 else ''}:"
            raise ComplianceError("\n".join([head, *(f"  {f}" for f in self.faults)]), tuple(self.faults))


def walk(model: Dynamics, question: str, texts: Sequence[str], rng: random.Random) -> list[MASState]:
    """Return the states of one random episode, from the initial to the terminal one.

    Args:
        model: The dynamics.
        question: The question.
        texts: What agents may say.
        rng: Chooses texts and recipients.
    """
    states = [model.initial_state(question)]
    while not model.is_terminal(states[-1]):
        text = rng.choice(texts)
        legal = model.legal_recipients(states[-1])
        # ALL is what policies use, so half of the messages go there.
        recipient = model.mas.ALL if rng.random() < 0.5 else rng.choice(legal)
        try:
            states.append(model.transition(states[-1], Action(text, recipient)))
        except IllegalActionError:
            states.append(model.transition(states[-1], Action(text, model.mas.ALL)))
    return states


def describe(value: Any) -> str:
    """Return a short form of a value for messages."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
