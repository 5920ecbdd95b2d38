"""Reward-balanced search (REBASE)."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mas_gym.internal.suggestions import choice
from mas_gym.systems.state import MASState
from search.plan import Plan
from search.planners.stop_rules import StopChecks
from search.planners.tree_growth import path_scores, ranked
from search.planners.turnwise import TurnByTurn, extend, unsettled
from search.planners.voting import sigmoid, vote
from search.protocol import Extract, Model, PlanGenerator, check_at_least, check_positive
from search.tree import Tree


@dataclass(frozen=True)
class REBASE(TurnByTurn):
    """Reward-balanced search (Wu et al., 2024): a fixed width, allocated to states by their values.

    At each depth, the samples are divided among the states in proportion to the softmax of their values; terminal
    states keep their share of the width. With a fixed schedule, AC = ``width * D``.

    Attributes:
        width: Messages sampled per depth.
        temperature: Temperature of the softmax; smaller values give the best state a larger share.
        choose: ``"vote"``: a vote over the answers, weighted by the sigmoid of the path scores; ``"best"``: the
            terminal state with the best path score.
        stop: As for `TurnByTurn`.
    """

    size_setting = "width"

    width: int = 15
    temperature: float = 0.1
    choose: Literal["vote", "best"] = "vote"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, width=self.width)
        check_positive(self, temperature=self.temperature)
        choice("REBASE: choose", self.choose, ("vote", "best"))

    def plan(self, model: Model, root: MASState, rng: random.Random) -> PlanGenerator:
        """Extend depth by depth, and choose among the terminal states."""
        tree = Tree(root)
        checks = StopChecks(self.stop, tree)
        ends: list[int] = []
        shares = {0: self.width}
        while shares:
            fresh = yield from extend(tree, model, shares, answered=bool(ends))
            ends += [node for node in fresh if tree.is_terminal(node)]
            growing = [node for node in fresh if not tree.is_terminal(node)]
            free = self.width - len(ends)
            if growing and free:
                growing = yield from unsettled(tree, checks, growing, ends)
            values = [tree.values[node] / self.temperature for node in growing]
            counts = share(free if checks.stopped is None else 1, values) if growing else []
            shares = {node: n for node, n in zip(growing, counts, strict=True) if n}
        scores = path_scores(tree, ends, "process")
        chosen = max(ends, key=scores.__getitem__)
        if self.choose == "vote":
            [answers] = yield [Extract([tree.states[end] for end in ends])]
            chosen = ends[vote(answers, [sigmoid(scores[end]) for end in ends])]
        return Plan(ranked(tree, ends, scores, chosen), tree, stopped=checks.stopped)


def share(amount: int, logits: Sequence[float]) -> list[int]:
    """Divide ``amount`` in proportion to the softmax of ``logits``; the largest fractional parts are rounded up."""
    top = max(logits)
    weights = [math.exp(logit - top) for logit in logits]
    exact = [amount * weight / math.fsum(weights) for weight in weights]
    counts = [math.floor(part) for part in exact]
    # Different logits may have equal exponentials.
    order = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], -logits[i], i))
    for i in order[: amount - sum(counts)]:
        counts[i] += 1
    return counts
