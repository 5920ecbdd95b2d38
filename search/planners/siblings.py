"""A tree of independent samples, for credit assignment and training."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

from mas_gym.systems.state import MASState
from search.plan import Plan
from search.planners.tree_growth import ranked, widen
from search.protocol import Critic, Model, PlanGenerator, Planner, Reward, check_at_least
from search.tree import Tree


@dataclass(frozen=True)
class Siblings(Planner):
    """Samples ``k`` messages in every state and continues all of them.

    Equal messages stay separate nodes and none is preferred, so siblings are independent samples. `search.credit`
    computes unbiased advantages from them. The answer is that of the first path, which is a single pass. With a fixed
    schedule of D turns, AC = k + k^2 + ... + k^D. Training runs back up each leaf's true reward as one visit to
    every message on its path.

    ``turns`` moves samples from the last agents to the first. ``"siblings:8,turns=1"`` samples eight transcripts as
    one tree; ``"siblings:3,turns=2"`` samples three messages per state in the first two turns and one in later states.
    The ``spare`` messages are not continued; only their values are used, by the credit method ``control-variate``.

    Attributes:
        k: Messages per state.
        values: ``"reward"`` requests the true rewards, ``"none"`` does not; ``"auto"`` does only in training runs.
        turns: Turns with ``k`` messages per state; later states get one message. 0 for all turns.
        spare: Further messages in the initial state that are not continued.
    """

    needs_critic = False
    size_setting = "k"

    k: int = 2
    values: Literal["auto", "none", "reward"] = "auto"
    turns: int = 0
    spare: int = 0

    def __post_init__(self) -> None:
        check_at_least(self, 1, k=self.k)
        check_at_least(self, 0, turns=self.turns, spare=self.spare)

    def for_run(self, critic: Critic | None, training: bool) -> Siblings:
        """Return the planner with the kind of values that the run provides."""
        return replace(self, values="reward" if training else "none") if self.values == "auto" else self

    def plan(self, model: Model, root: MASState, rng: random.Random) -> PlanGenerator:
        """Grow the tree turn by turn; its leaves are the candidates."""
        tree, growing, ends, turn = Tree(root), [0], list[int](), 0
        while growing:
            count = 1 if 0 < self.turns <= turn else self.k
            wanted = dict.fromkeys(growing, count if turn else count + self.spare)
            grown = yield from widen(tree, model, wanted, answered=bool(ends))
            # Continued messages come first; the number of spare ones does not change their seeds.
            fresh = [child for children in grown.values() for child in children[:count]]
            turn += 1
            ends += [node for node in fresh if tree.is_terminal(node)]
            growing = [node for node in fresh if not tree.is_terminal(node)]
        if self.values == "reward":
            [rewards] = yield [Reward([tree.states[node] for node in ends])]
            for end, reward in zip(ends, rewards, strict=True):
                tree.values[end] = reward
                for step in tree.path(end):
                    tree.visits[step] += 1
                    tree.totals[step] += reward
        return Plan(ranked(tree, ends, {}, ends[0]), tree)
