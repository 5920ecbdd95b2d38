"""Parts shared by all checks: violations, test messages, random episodes, identities."""

from __future__ import annotations

import random
from collections.abc import Sequence

from mas_gym.errors import ComplianceError, IdentityError, IllegalActionError
from mas_gym.internal.identity import digest_of, identity_of
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.graph import MAS
from mas_gym.systems.recipient_names import nameable
from mas_gym.systems.state import Action, MASState

HOSTILE = ("", " \n\t", "\ud800", "نص من اليمين إلى اليسار", "\u202eesrever", "\x00\x1b[31m", "Final Answer: " * 50)
ORDINARY = ("Facts: 3 and 4.", "3 + 4 = 7", "VERDICT: DISAGREE\nRecount.", "VERDICT: AGREE", "Final Answer: 7")
QUESTION = "Maya has 3 apples and buys 4 more. How many apples does she have?"


class Findings:
    """Collects violations; `settle` raises an error that lists them."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.faults: list[str] = []

    def expect(self, holds: bool, fault: str) -> bool:
        """Record a violation, once, unless the expectation is met; return whether it is met."""
        if not holds and fault not in self.faults:
            self.faults.append(fault)
        return holds

    def settle(self) -> None:
        """Raise `ComplianceError` if anything was found."""
        if self.faults:
            count = len(self.faults)
            head = f"{self.subject} breaks its contract in {count} way{'s' if count > 1 else ''}:"
            raise ComplianceError("\n".join([head, *(f"  {f}" for f in self.faults)]), tuple(self.faults))


def addressed(mas: MAS, state: MASState, text: str, number: int) -> str:
    """Append a recipient, selected by ``number``, to a text if the acting agent must name a recipient."""
    legal = nameable(mas, state)
    return f"{text}\n-> {mas.node_name(legal[number % len(legal)])}" if legal else text


def walk(model: Dynamics, question: str, texts: Sequence[str], rng: random.Random) -> list[MASState]:
    """Return the states of one random episode, from the initial to the terminal one."""
    states = [model.initial_state(question)]
    # Policies always use ALL, as in half of the episodes.
    only_all = rng.random() < 0.5
    while not model.is_terminal(states[-1]):
        text = rng.choice(texts)
        if nameable(model.mas, states[-1]) and rng.random() < 0.5:
            text = addressed(model.mas, states[-1], text, rng.randrange(len(model.mas.agents) + 1))
        legal = model.legal_recipients(states[-1])
        recipient = model.mas.ALL if only_all else rng.choice(legal)
        try:
            states.append(model.transition(states[-1], Action(text, recipient)))
        except IllegalActionError:
            states.append(model.transition(states[-1], Action(text, model.mas.ALL)))
    return states


# -------------------------------------------------------------- identities


def stated(findings: Findings, part: object) -> str:
    """Return the digest of a component's identity; record a violation and return "" if there is none."""
    try:
        return digest_of(identity_of(part))
    except IdentityError as error:
        findings.expect(False, f"no run with store= accepts it: {error}")
        return ""


def check_steady(findings: Findings, part: object, before: str) -> None:
    """Check that a component's identity is the same before and after it is used."""
    if before:
        fault = "its identity changed during use: leave counters, caches and generators out of identity()"
        findings.expect(stated(findings, part) == before, fault)
