"""Blame: the message that is probably the first error of each failed sample.

The outcomes of the other samples of the question decide first (`search.compare.sibling_outcomes`). If they give no
message a probability of at least `SURE`, the values of a critic are used, where there are any: among the messages that
no right sample shares, the odds of a message are ``exp(SHARPNESS fall / 2)``, where the fall is the decrease in value
after it. If no message is sure then, the first error is not known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from mas_gym.critics import Proposal, finite_values, scores_of
from mas_gym.systems.state import Action
from search.compare.sibling_outcomes import FailedSample, SharedMessages, failed_samples
from search.plan import Plan
from search.protocol import Critic, ScoringContext

SURE = 0.7
"""Minimum probability to name an agent. Chosen on dev problems of Arithmetic, see benchmarks/LOG.md."""

SHARPNESS = 6.5
"""Weight of a critic: with four messages, one fall of 0.6 and no other gives a probability of `SURE`."""

SIBLINGS, CRITIC, REPLAY, ONLY_AUTHOR, SILENT = "siblings", "critic", "replay", "only author", "silent"


class Blame(NamedTuple):
    """The probable first error of a failed sample.

    Attributes:
        sample: The failed sample.
        turn: Position of the message in the transcript, from 0; None if nothing is known.
        confidence: Probability that it is the first error, in ``[0, 1]``.
        source: ``"siblings"``, ``"critic"`` or ``"replay"``; ``"only author"`` if all other
            messages are repetitions; ``"silent"`` if nothing is known.
    """

    sample: FailedSample
    turn: int | None
    confidence: float
    source: str

    def agent(self, least: float = SURE) -> int | None:
        """Return the index of the blamed agent; None if the confidence is below ``least``."""
        return None if self.turn is None or self.confidence < least else self.sample.speakers[self.turn]

    @property
    def evidence(self) -> str:
        """The outcomes on which the decision is based, or else its source."""
        if self.source not in (SIBLINGS, REPLAY) or self.turn is None:
            return self.source
        before, after = self.sample.after[self.turn], self.sample.after[self.turn + 1]
        if self.source == REPLAY:
            return f"replay: {before.right} of {before.total} right before it, {after.right} of {after.total} after it"
        right, total = before.right - after.right, before.total - after.total
        return f"{right} of {total} right without it, {after.right} of {after.total} with it"


Values = Callable[[Plan, Sequence[int]], Sequence[float]]
"""Returns a critic's values of a plan's nodes; empty if there are none."""


def stored_values(plan: Plan, nodes: Sequence[int]) -> list[float]:
    """Return the stored values of nodes; empty if one of them has no value."""
    assert plan.tree is not None
    found = [plan.tree.values[node] for node in nodes]
    return [] if any(map(math.isnan, found)) else found


def critic_values(critic: Critic) -> Values:
    """Return a function that scores nodes with a critic."""

    def values(plan: Plan, nodes: Sequence[int]) -> Sequence[float]:
        tree, mas = plan.tree, plan.mas
        assert tree is not None and mas is not None
        contexts = [
            ScoringContext(
                tree.states[i], mas, Proposal(Action(tree.states[i].text, mas.ALL), tree.tokens[i], tree[i].logprob)
            )
            for i in nodes
        ]
        return finite_values(critic, [one.state for one in contexts], scores_of(critic, contexts)) if contexts else []

    return values


def blame_failures(plans: Iterable[Plan], values: Values = stored_values, least: float = SURE) -> list[Blame]:
    """Return the probable first error of each failed sample of one run, in the order of the plans and candidates.

    Args:
        plans: All plans of the run with their trees, including those with right answers; read once.
        values: The critic. The mean value after the first messages serves as the value before them.
        least: Probability from which the outcomes of siblings suffice.
    """
    failed: list[tuple[FailedSample, Sequence[float]]] = []
    first: list[float] = []
    agreement = SharedMessages()
    for plan in plans:
        if plan.tree is None:
            continue
        first += values(plan, [plan.tree.path(one.node)[1] for one in plan.candidates if one.node])
        failed += [(sample, values(plan, sample.nodes)) for sample in failed_samples(plan, agreement)]
    before = math.fsum(first) / len(first) if first else 0.0
    return [_blame(sample, agreement, scores, before, least) for sample, scores in failed]


def _blame(
    sample: FailedSample, agreement: SharedMessages, scores: Sequence[float], before: float, least: float
) -> Blame:
    found = sample.first_error(agreement)
    if found is not None and found[1] >= least:
        return Blame(sample, *found, SIBLINGS)
    if sample.repeats.count(False) == 1:
        return Blame(sample, sample.repeats.index(False), 1.0, ONLY_AUTHOR)
    if len(scores):
        return Blame(sample, *_largest_share(sample, falls(scores, before)), CRITIC)
    return Blame(sample, None, 0.0, SILENT) if found is None else Blame(sample, *found, SIBLINGS)


def _largest_share(sample: FailedSample, found: Sequence[float]) -> tuple[int, float]:
    odds = [
        0.0 if copied or turn < sample.shared else math.exp(SHARPNESS * max(0.0, fall) / 2)
        for turn, (copied, fall) in enumerate(zip(sample.repeats, found, strict=True))
    ]
    turn = max(range(len(odds)), key=odds.__getitem__)
    return turn, odds[turn] / math.fsum(odds) if odds[turn] else 0.0


def falls(values: Sequence[float], before: float) -> list[float]:
    """Return the fall in value after each message."""
    return [old - new for old, new in zip((before, *values), values, strict=False)]


def largest_fall(values: Sequence[float], before: float) -> tuple[int, float]:
    """Return the position of the (first) largest fall, and half of that fall, or 0 if the value never falls."""
    found = falls(values, before)
    place = max(range(len(found)), key=found.__getitem__)
    return place, max(0.0, found[place]) / 2
