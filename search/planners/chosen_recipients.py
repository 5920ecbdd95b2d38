"""Rules that select the recipients of a planner's messages."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

from mas_gym.critics import Proposal
from mas_gym.errors import ConfigError, IllegalActionError
from mas_gym.policies.base import derive_seed
from mas_gym.systems.recipient_names import nameable
from mas_gym.systems.state import Action, MASState
from search.planners.tree_growth import step_values
from search.planners.wrapper import PlannerWrapper, delegate
from search.protocol import Critic, Evaluate, Model, PlanGenerator, Propose, Request, Steps

Rule = Literal["schedule", "uniform", "critic"]
OWN = "own"
"""The default rule, without `ChosenRecipients`: each message goes to the recipient that it names."""

RULES = (OWN, *get_args(Rule))
_DRAW = "recipient"


@dataclass(frozen=True)
class ChosenRecipients(PlannerWrapper):
    """A planner wrapper that chooses the recipient of each message by a rule.

    Messages of agents without ``route: message`` are not affected. A message that names no legal recipient also gets
    a recipient. The text of a message does not change.

    Attributes:
        planner: The wrapped planner.
        recipients: ``"schedule"``: the next legal recipient after the speaker in listed order (``sink`` is last), or
            the first one if none follows the speaker; ``"uniform"``: a random legal recipient; ``"critic"``: the
            recipient with the highest critic value of the successor state, at one critic call per legal recipient.
            Ties go to the recipient that the message names, then to the first in listed order.
    """

    setting, default = "recipients", OWN

    recipients: Rule

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recipients not in get_args(Rule):
            raise ConfigError(f"expected recipients to be one of {', '.join(RULES)}, got {self.recipients!r}")
        if self.recipients == "critic":
            object.__setattr__(self, "needs_critic", True)

    def for_run(self, critic: Critic | None, training: bool) -> ChosenRecipients:
        """Bind the planner; ``"critic"`` needs a critic that scores states after any turn."""
        if self.recipients == "critic":
            step_values("recipients=critic", critic, training)
            if critic is not None and critic.scores_actions:
                problem = "policy likelihood does not depend on the recipients"
                raise ConfigError(f"recipients=critic: {problem}; use a process critic, such as masprm")
        return super().for_run(critic, training)

    def plan(self, model: Model, root: MASState, rng: random.Random) -> PlanGenerator:
        """Run the planner, and change the recipients of its proposals."""
        choice = _Choice(self.recipients, rng)

        def answer(requests: list[Request]) -> Steps[list[Any]]:
            replies = yield requests
            yield from choice.readdress(model, requests, replies)
            return replies

        return (yield from delegate(self.planner.plan(model, root, rng), answer))


class _Fan(NamedTuple):
    """A message with its successor states, by recipient."""

    state: MASState
    named: tuple[int, ...]
    successors: Mapping[int, MASState]


class _Choice:
    def __init__(self, rule: Rule, rng: random.Random) -> None:
        self._rule: Rule = rule
        self._seed = rng.getrandbits(62) if rule == "uniform" else 0
        self._drawn = Counter[bytes]()

    def readdress(self, model: Model, requests: Sequence[Request], replies: list[Any]) -> Steps[None]:
        places: list[tuple[list[Proposal], int]] = []
        fans: list[_Fan] = []
        for slot, request in enumerate(requests):
            if isinstance(request, Propose) and nameable(model.mas, request.state):
                replies[slot] = proposals = list(replies[slot])
                for i, proposal in enumerate(proposals):
                    places.append((proposals, i))
                    fans.append(_fan(model, request.state, proposal.action))
        recipients = (yield from self._recipients(fans)) if fans else []
        for (proposals, i), recipient in zip(places, recipients, strict=True):
            proposals[i] = proposals[i]._replace(action=Action(proposals[i].action.text, recipient))

    def _recipients(self, fans: Sequence[_Fan]) -> Steps[list[int]]:
        if self._rule == "schedule":
            return [min(fan.successors, key=lambda r: (r <= fan.state.acting, r)) for fan in fans]
        if self._rule == "uniform":
            return [self._draw(fan) for fan in fans]
        states = [state for fan in fans if len(fan.successors) > 1 for state in fan.successors.values()]
        [found] = (yield [Evaluate(states)]) if states else [[]]
        values = dict(zip(states, found, strict=True))

        def preference(fan: _Fan, recipient: int) -> tuple[float, bool, int]:
            return values.get(fan.successors[recipient], 0.0), (recipient,) == fan.named, -recipient

        return [max(fan.successors, key=partial(preference, fan)) for fan in fans]

    def _draw(self, fan: _Fan) -> int:
        # Draw by state, so that choices at different states are independent.
        number = derive_seed(self._seed, _DRAW, fan.state.digest, self._drawn[fan.state.digest])
        self._drawn[fan.state.digest] += 1
        return sorted(fan.successors)[number % len(fan.successors)]


def _fan(model: Model, state: MASState, action: Action) -> _Fan:
    successors: dict[int, MASState] = {}
    for recipient in nameable(model.mas, state):
        # The edge's condition may be false for this text.
        with suppress(IllegalActionError):
            successors[recipient] = model.transition(state, Action(action.text, recipient))
    return _Fan(state, model.transition(state, action).recipients, successors or {action.recipient: state})
