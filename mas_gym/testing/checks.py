"""The check for MAS configs, and what all checks share: findings, messages to try, random episodes, and identities."""

from __future__ import annotations

import copy
import json
import random
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mas_gym.dynamics import Dynamics
from mas_gym.errors import ComplianceError, IdentityError, IllegalActionError
from mas_gym.graph import MAS
from mas_gym.identity import digest_of, identity_of
from mas_gym.loading import MASSource, load_mas
from mas_gym.policies.base import mean_logprob
from mas_gym.prompts import nameable
from mas_gym.state import Action, MASState
from mas_gym.tasks import Problem, ProblemTask

HOSTILE = ("", " \n\t", "\ud800", "نص من اليمين إلى اليسار", "\u202eesrever", "\x00\x1b[31m", "Final Answer: " * 50)
ORDINARY = (
    "Facts: 3 and 4.",
    "3 + 4 = 7",
    "VERDICT: DISAGREE\nRecount.",
    "VERDICT: AGREE",
    "Final Answer: 7",
)


class ProposalLike(NamedTuple):
    """Stands in for the driver's proposal of one sampled message."""

    action: Action
    tokens: int
    logprob: float | None
    finish_reason: str

    @property
    def mean_logprob(self) -> float | None:
        """Length-normalised log-likelihood, in nats per token."""
        return mean_logprob(self.logprob, self.tokens)


class Findings:
    """Collects violations; `settle` raises them all."""

    def __init__(self, subject: str) -> None:
        """Start without faults; ``subject`` names the part in messages."""
        self.subject = subject
        self.faults: list[str] = []

    def expect(self, holds: bool, fault: str) -> bool:
        """Record a fault, once, unless the expectation holds; return whether it does."""
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
    """Return a text that names one of the recipients, chosen by a number, if the acting agent must name one."""
    legal = nameable(mas, state)
    return f"{text}\n-> {mas.node_name(legal[number % len(legal)])}" if legal else text


def walk(model: Dynamics, question: str, texts: Sequence[str], rng: random.Random) -> list[MASState]:
    """Return the states of one random episode, from the initial to the terminal one.

    Args:
        model: The dynamics.
        question: The question.
        texts: The messages that agents may send.
        rng: Chooses texts and recipients.
    """
    states = [model.initial_state(question)]
    while not model.is_terminal(states[-1]):
        text = rng.choice(texts)
        if nameable(model.mas, states[-1]) and rng.random() < 0.5:
            text = addressed(model.mas, states[-1], text, rng.randrange(len(model.mas.agents) + 1))
        legal = model.legal_recipients(states[-1])
        # Policies always use ALL, so half of the messages go there.
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


# -------------------------------------------------------------- identities


def stated(findings: Findings, part: object) -> str:
    """Return the digest of a part's identity; record a fault and return "" if it cannot state one."""
    try:
        return digest_of(identity_of(part))
    except IdentityError as error:
        findings.expect(False, f"no run with store= accepts it: {error}")
        return ""


def check_steady(findings: Findings, part: object, before: str) -> None:
    """Expect a part to state the same identity after its work as before."""
    if before:
        fault = "its identity changed while it worked: leave counters, caches and generators out of identity()"
        findings.expect(stated(findings, part) == before, fault)


def check_apart(findings: Findings, first: str, second: str, alike: bool, difference: str) -> None:
    """Expect two parts that behave differently to state different identities."""
    if first and second and not alike:
        fault = f"{difference} changes what it does and not its identity: state it in identity()"
        findings.expect(first != second, fault)


def variants(part: Any) -> Iterator[tuple[str, Any]]:
    """Yield copies of a part with one numeric setting changed, and the name of the setting.

    A changed setting may be invalid, so an error in such a copy is not a fault of the part.
    """
    names = [*getattr(part, "__dict__", {}), *getattr(type(part), "__slots__", ())]
    for name in dict.fromkeys(names):
        changed = _changed(getattr(part, name, None))
        if changed is None:
            continue
        other = copy.copy(part)
        # Settings of frozen dataclasses are changed too.
        object.__setattr__(other, name, changed)
        yield name, other


def _changed(value: Any) -> Any:
    """Return another value of the same type; None if it is not numeric."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, list | tuple) and value and (first := _changed(value[0])) is not None:
        return type(value)((first, *value[1:])) if type(value) in (list, tuple) else None
    return None


_QUESTION = "Maya has 3 apples and 4 pears. How many pieces of fruit?"


def check_mas(source: MASSource, *, texts: Sequence[str] = (), episodes: int = 50, seed: int = 0) -> MAS:
    """Check a MAS config: it is valid, its episodes end, every agent can act, and its environment works.

    Args:
        source: What `mas_gym.load_mas` takes.
        texts: Messages that meet the conditions of your edges; patterns of ``contains:`` are tried automatically.
        episodes: Number of random episodes to play.
        seed: Seed of the episodes.

    Returns:
        The system.

    Raises:
        ConfigError: The config is not valid.
        ComplianceError: The config is valid but violates a contract.
    """
    mas = load_mas(source)
    findings = Findings(f"MAS {mas.name!r}")
    findings.expect(load_mas(json.loads(json.dumps(mas.to_dict()))) == mas, "its dict form does not load back equal")
    model = Dynamics(mas)
    patterns = [e.condition.pattern for e in mas.edges if e.condition and e.condition.kind.endswith("contains")]
    rng = random.Random(seed)
    says = [*ORDINARY, *HOSTILE, *patterns, *texts]
    acted: set[int] = set()
    for _ in range(episodes):
        states = walk(model, _QUESTION, says, rng)
        acted.update(turn.speaker for turn in states[-1].turns)
        for state in states:
            _check_state(findings, model, state)
    for i, agent in enumerate(mas.agents):
        findings.expect(
            i in acted,
            f"agents[{i}] {agent.name!r} acted in none of {episodes} episodes: its conditions may exclude each other, "
            "or need a message that you should pass in texts=",
        )
    _check_env(findings, mas)
    findings.settle()
    return mas


def _check_state(findings: Findings, model: Dynamics, state: MASState) -> None:
    findings.expect(state.depth <= model.max_depth, f"an episode is longer than {model.max_depth} turns")
    again = model.state_from_dict(json.loads(json.dumps(state.to_dict())))
    findings.expect(again == state, "a state does not survive its JSON form")
    if not model.is_terminal(state):
        name = model.mas.agents[state.acting].name
        findings.expect(model.mas.ALL in model.legal_recipients(state), f"{name} cannot speak to ALL")


def _check_env(findings: Findings, mas: MAS) -> None:
    from gymnasium.utils.env_checker import check_env

    from mas_gym.env import MASEnv

    env = MASEnv(ProblemTask.of([Problem("check/0", _QUESTION, "7"), Problem("check/1", "1 + 1?", "2")]), mas)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_env(env, skip_render_check=True)
    for warning in caught:
        findings.expect(False, f"gymnasium's checker warns: {warning.message}")
