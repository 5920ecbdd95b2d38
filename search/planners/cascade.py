"""Cascades, which run expensive searches only if the critic is uncertain about the answer of a cheaper search."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mas_gym.critics import Proposal
from mas_gym.errors import BudgetError, ConfigError, ExhaustedError, shown
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.state import MASState
from search.plan import AnytimePoint, Plan, checked_plan
from search.planners.stop_rules import Confident, Evidence, StopChecks, stop_for_run
from search.planners.tree_growth import evaluate
from search.planners.wrapper import delegate
from search.protocol import Critic, Model, PlanGenerator, Planner, Propose, Request, Steps, value_kind


@dataclass(frozen=True)
class Cascade(Planner):
    """Runs searches of increasing size until the answer is settled.

    It applies FrugalGPT's cascade of models (Chen et al., 2023) to searches. After each stage except the last, the next
    stage's rule computes the probability that the answer is right. If this probability is above the
    threshold, the cascade ends. Stages reuse messages: at each state, a stage first receives the messages drawn by
    earlier stages, then new ones.
    Without a budget, the last stage returns the same result as when it runs alone. Unused messages of earlier
    stages are an additional cost. The plan comes from the last stage that ran, and the anytime curve has one point per
    stage.

    Attributes:
        stages: The planners, cheapest first.
        rules: For each stage after the first, the rule that decides whether the answer so far is settled
            (`search.planners.stop_rules.Confident`).
        outcomes_only: Whether only terminal states have values; filled in for a run.
    """

    stages: tuple[Planner, ...]
    rules: tuple[Confident, ...]
    outcomes_only: bool = False

    def __post_init__(self) -> None:
        planners = [stage for stage in self.stages if isinstance(stage, Planner)]
        rules = [rule for rule in self.rules if isinstance(rule, Confident)]
        if len(planners) < 2 or len(planners) < len(self.stages) or len(rules) != len(planners) - 1:
            raise ConfigError(
                "cascade: expected at least two planners, and for each after the first a probability or a file from "
                f"mas-gym calibrate, got {len(self.stages)} stages and the rules {', '.join(map(shown, self.rules))}; "
                "write, for example, cascade:single>mcts:20,2@0.8"
            )
        object.__setattr__(self, "size_setting", self.stages[-1].size_setting)
        object.__setattr__(self, "needs_costs", any(stage.needs_costs for stage in self.stages))

    def for_run(self, critic: Critic | None, training: bool) -> Cascade:
        """Bind the stages and the rules to the critic."""
        if critic is None:
            raise ConfigError("cascade needs a critic: pass critic=load_critic(...)")
        stages = tuple(stage.for_run(critic, training) for stage in self.stages)
        rules = [
            stop_for_run(stage, rule, critic, training)
            for stage, rule in zip(self.stages[:-1], self.rules, strict=True)
        ]
        outcomes_only = value_kind(critic, training) == "outcome"
        return replace(self, stages=stages, rules=tuple(rules), outcomes_only=outcomes_only)  # type: ignore[arg-type]

    def current_size(self) -> int:
        """Return the size of the last stage."""
        return self.stages[-1].current_size()

    def resized(self, size: int) -> Cascade:
        """Return a copy with a resized last stage."""
        return replace(self, stages=(*self.stages[:-1], self.stages[-1].resized(size)))

    def plan(self, model: Model, root: MASState, rng: random.Random) -> PlanGenerator:
        """Run the stages until the answer is settled or the budget is spent."""
        supply, last = _Supply(), len(self.stages) - 1
        curve: list[AnytimePoint] = []
        earlier: Plan | None = None
        for number, stage in enumerate(self.stages):
            # Each stage draws as it does without the other stages.
            own = random.Random()
            own.setstate(rng.getstate())
            try:
                plan = yield from supply.run(stage.plan(model, root, own))
            except BudgetError:
                if earlier is None:
                    raise
                plan = earlier
            if supply.spent:
                # A stage stopped by the budget may have a worse answer than the previous stage.
                plan = plan if earlier is None or _value(plan) >= _value(earlier) else earlier
                return replace(plan, anytime=tuple(curve))
            plan = checked_plan(plan, root, Dynamics(model.mas), lambda state: None)
            curve.append(AnytimePoint(supply.calls, supply.tokens, plan.candidates[0].state))
            if number == last:
                break
            try:
                evidence = yield from self._evidence(plan)
            except BudgetError:
                break
            reason = self.rules[number].reason(evidence)
            if reason is not None:
                stopped = f"settled after stage {number + 1} of {last + 1}: {reason}"
                return replace(plan, anytime=tuple(curve), stopped=stopped)
            earlier = plan
        return replace(plan, anytime=tuple(curve))

    def _evidence(self, plan: Plan) -> Steps[Evidence]:
        """Score the answer of a stage if the stage has not scored it, and return the evidence."""
        tree, ends = plan.tree, [candidate.node or 0 for candidate in plan.candidates]
        assert tree is not None
        scored = ends[:1] if self.outcomes_only else tree.path(ends[0])[1:]
        yield from evaluate(tree, [node for node in scored if math.isnan(tree.values[node])])
        return (yield from StopChecks(None, tree, self.outcomes_only).evidence(ends[0], ends))


_Place = tuple[MASState, str]
"""A place to draw messages: a state and an tag."""


def _place(request: Propose) -> _Place:
    return request.state, request.tag


class _Supply:
    """Messages of all stages by state and tag; each stage receives them before new ones are drawn.

    Attributes:
        calls: Messages drawn so far.
        tokens: Tokens of these messages.
        spent: Whether a request was rejected because of the budget.
    """

    def __init__(self) -> None:
        self.calls = self.tokens = 0
        self.spent = False
        self._drawn: dict[_Place, list[Proposal]] = defaultdict(list)

    def run(self, stage: PlanGenerator) -> PlanGenerator:
        used: Counter[_Place] = Counter()

        def answer(requests: list[Request]) -> Steps[list[object]]:
            try:
                return (yield from self._answer(requests, used))
            except BudgetError as error:
                self.spent = self.spent or not isinstance(error, ExhaustedError)
                raise

        return (yield from delegate(stage, answer))

    def _answer(self, requests: Sequence[Request], used: Counter[_Place]) -> Steps[list[object]]:
        """Return the replies to a stage's requests; ``used`` counts the messages received at each place."""
        proposing = [request for request in requests if isinstance(request, Propose)]
        wanted = Counter({_place(request): used[_place(request)] for request in proposing})
        for proposal in proposing:
            wanted[_place(proposal)] += proposal.n
        missing = {place: n - len(self._drawn[place]) for place, n in wanted.items() if n > len(self._drawn[place])}
        others: list[Request] = [request for request in requests if not isinstance(request, Propose)]
        asked = [*(Propose(state, n, tag) for (state, tag), n in missing.items()), *others]
        replies: list[Any]
        try:
            replies = (yield asked) if asked else []
        except ExhaustedError:
            # The recorded run has no more messages; messages drawn by earlier stages may be left.
            if not any(self._drawn[place][used[place] :] for place in wanted):
                raise
            replies = [[] for _ in missing] + ((yield others) if others else [])
        for place, proposals in zip(missing, replies, strict=False):
            self._drawn[place] += proposals
            self.calls += len(proposals)
            self.tokens += sum(proposal.tokens for proposal in proposals)
        rest = iter(replies[len(missing) :])
        answers: list[object] = []
        for request in requests:
            if isinstance(request, Propose):
                place = _place(request)
                messages = self._drawn[place][used[place] : used[place] + request.n]
                used[place] += len(messages)
                answers.append(messages)
            else:
                answers.append(next(rest))
        return answers


def _value(plan: Plan) -> float:
    """Return the critic's value of a plan's answer, or the lowest possible value if it has none."""
    best, tree = plan.best, plan.tree
    if best is None or best.node is None or tree is None or math.isnan(tree.values[best.node]):
        return -math.inf
    return tree.values[best.node]
