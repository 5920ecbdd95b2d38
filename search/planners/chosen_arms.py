"""Model selection for policies with several models (`mas_gym.policies.arms_policy`), as a wrapper for any planner.

Without it, the arms take turns. ``arms=thompson`` chooses by Thompson sampling for each agent, as AB-MCTS with several
models does for each node (Inoue et al., 2025, arXiv:2503.04412): nodes of one agent share statistics, because a single
node has few messages. ``arms=cost`` divides the expected gain by the price of a token. ``arms=only:NAME`` uses one arm,
for cascades from a small model to a large one.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from mas_gym.critics import Proposal
from mas_gym.errors import ConfigError
from mas_gym.policies.arms_policy import check_arm
from mas_gym.systems.state import MASState
from search.planners.normal_posterior import draw_normal, expected_excess
from search.planners.wrapper import PlannerWrapper, delegate
from search.protocol import (
    Critic,
    Evaluate,
    Model,
    PlanGenerator,
    Propose,
    Request,
    Reward,
    Steps,
    Tag,
    Tags,
    planner_name,
    value_kind,
)

LEARNED = ("thompson", "cost")
"""The rules that learn from values."""
ONLY = "only:"
"""Prefix of the rule that uses one arm."""
TURNS = "turns"
"""The name of the default: arms take turns."""
RULES = f"{TURNS}, {', '.join(LEARNED)} or {ONLY}NAME"
SPREAD = 0.3
"""Prior standard deviation of a gain, in units of the critic's values."""


@dataclass(frozen=True)
class ChosenArms(PlannerWrapper):
    """A planner wrapper that chooses the arm for each message by a rule.

    The gain of a message is the value of its successor state minus the value of its state, which is 0 at the root. With
    an outcome critic or the true reward, each terminal state below the message gives a gain, which is its value. The
    gains of an agent's messages by one arm are modeled by a normal distribution with unknown mean and variance; the
    prior is worth one observation at the mean of all arms. Without values during the search, as in best-of-N, nothing
    is learned.

    Attributes:
        planner: The wrapped planner.
        arms: ``"thompson"`` chooses the arm with the largest sampled mean. ``"cost"`` samples mean and variance, and
            chooses the arm with the largest expected improvement over the best message known at the state, or over the
            state itself, divided by the USD price of a generated token; the run needs prices. ``"only:NAME"`` uses the
            arm of that name.
        outcomes_only: Whether only terminal states have values; filled in for a run.
    """

    setting, default = "arms", TURNS

    arms: str
    outcomes_only: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.arms, str) and self.arms.startswith(ONLY):
            check_arm(self.arms.removeprefix(ONLY))
        elif self.arms not in LEARNED:
            raise ConfigError(f"expected arms to be {RULES}, got {self.arms!r}")
        elif not self.needs_critic:
            raise ConfigError(
                f"arms={self.arms} learns from values, but {planner_name(self.planner)} requests none; leave out arms="
            )
        if self.arms == "cost":
            object.__setattr__(self, "needs_costs", True)

    def for_run(self, critic: Critic | None, training: bool) -> ChosenArms:
        """Bind the planner."""
        outcomes_only = value_kind(critic, training) in ("outcome", "reward")
        return replace(super().for_run(critic, training), outcomes_only=outcomes_only)

    def plan(self, model: Model, root: MASState, rng: random.Random) -> PlanGenerator:
        """Run the planner, and choose the arms of its messages."""
        choice = _Choice(self.arms, self.outcomes_only, _independent(rng))
        return (yield from delegate(self.planner.plan(model, root, rng), choice.answer))


def _independent(rng: random.Random) -> random.Random:
    """Return a generator derived from ``rng`` without changing ``rng``."""
    copy = random.Random()
    copy.setstate(rng.getstate())
    return random.Random(f"arms {copy.getrandbits(64)}")


@dataclass
class _Gains:
    n: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, gain: float) -> None:
        self.n += 1
        self.total += gain
        self.squares += gain * gain


class _Part(NamedTuple):
    """The messages of one request for one arm, and their positions in the reply."""

    slot: int
    request: Propose
    places: Sequence[int]


@dataclass
class _Choice:
    rule: str
    outcomes_only: bool
    rng: random.Random
    arms: dict[int, tuple[Tag, ...]] = field(default_factory=dict)
    gains: dict[tuple[int, str], _Gains] = field(default_factory=lambda: defaultdict(_Gains))
    written: dict[tuple[MASState, str], str] = field(default_factory=dict)
    values: dict[MASState, float] = field(default_factory=dict)
    best: dict[MASState, float] = field(default_factory=dict)

    def answer(self, requests: list[Request]) -> Steps[list[Any]]:
        """Return the replies to a planner's requests; `Propose` requests are split by arm."""
        states = [request.state for request in requests if isinstance(request, Propose)]
        unknown = {state.acting: state for state in states if state.acting not in self.arms}
        if unknown:
            self.arms.update(zip(unknown, (yield [Tags(state) for state in unknown.values()]), strict=True))
        parts = [part for slot, request in enumerate(requests) for part in self._split(slot, request)]
        others = [slot for slot, request in enumerate(requests) if not isinstance(request, Propose)]
        asked: list[Request] = [*(part.request for part in parts), *(requests[slot] for slot in others)]
        replies = yield asked
        answers: list[Any] = [[] for _ in requests]
        for slot, reply in zip(others, replies[len(parts) :], strict=True):
            answers[slot] = reply
            self._learn(requests[slot], reply)
        placed: dict[int, list[tuple[int, Proposal]]] = defaultdict(list)
        for part, reply in zip(parts, replies, strict=False):
            placed[part.slot] += zip(part.places, reply, strict=False)
            for proposal in reply:
                self.written.setdefault((part.request.state, proposal.action.text), part.request.tag)
        for slot, found in placed.items():
            answers[slot] = [proposal for _, proposal in sorted(found, key=lambda one: one[0])]
        return answers

    def _split(self, slot: int, request: Request) -> list[_Part]:
        if not isinstance(request, Propose):
            return []
        arms = self.arms[request.state.acting]
        if request.tag or not arms[0].name:
            return [_Part(slot, request, range(request.n))]
        if self.rule.startswith(ONLY):
            return [_Part(slot, replace(request, tag=self.rule.removeprefix(ONLY)), range(request.n))]
        places: dict[str, list[int]] = defaultdict(list)
        for place in range(request.n):
            places[self._choose(request.state, arms)].append(place)
        return [_Part(slot, Propose(request.state, len(some), arm), some) for arm, some in places.items()]

    def _choose(self, state: MASState, arms: Sequence[Tag]) -> str:
        known = [self.gains[state.acting, arm.name] for arm in arms]
        mean = sum(gains.total for gains in known) / max(1, sum(gains.n for gains in known))
        draws = [draw_normal(self.rng, mean, SPREAD, gains.n, gains.total, gains.squares) for gains in known]
        if self.rule == "thompson":
            scores = [draw.mean for draw in draws]
        else:
            start = mean if self.outcomes_only else 0.0
            least = self.best[state] - self.values.get(state, 0.0) if state in self.best else start
            scores = [
                expected_excess(draw.mean, draw.deviation, least) / max(_price(arm), 1e-12)
                for arm, draw in zip(arms, draws, strict=True)
            ]
        return arms[max(range(len(arms)), key=scores.__getitem__)].name

    def _learn(self, request: Request, reply: Sequence[float]) -> None:
        if not isinstance(request, Evaluate | Reward):
            return
        for state, value in zip(request.states, reply, strict=True):
            if state.parent is None or state in self.values:
                continue
            self.values[state] = value
            steps = state.path()[1:] if self.outcomes_only else [state]
            for step in steps:
                assert step.parent is not None
                before = 0.0 if self.outcomes_only else self.values.get(step.parent, 0.0)
                self.best[step.parent] = max(value, self.best.get(step.parent, -math.inf))
                arm = self.written.get((step.parent, step.text))
                if arm:
                    self.gains[step.parent.acting, arm].add(value - before)


def _price(arm: Tag) -> float:
    if arm.cost is None:
        raise ConfigError(
            f"arms=cost: expected a price for tokens that the arm {arm.name!r} generates, got none; add one"
        )
    return arm.cost
