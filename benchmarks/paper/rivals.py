"""The two comparisons of every table: MASPRM with policy likelihood, and with best-of-N at equal tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.paper.lab import LIKELIHOOD, ORM, Lab, Score, Setting, row_of
from benchmarks.paper.page import NEW, Claim, claim
from rewardmodels import load_critic
from search import Critic


class Rivals(NamedTuple):
    """A baseline of a guided search.

    Attributes:
        name: The compared part, such as ``"refine: "``, as prefix of each claim.
        guided: The search with MASPRM.
        likelihood: The same search with policy likelihood.
        best: Best-of-N with the ORM at the tokens of ``guided``.
    """

    name: str
    guided: Score
    likelihood: Score
    best: Score

    def claims(self, paper: str = NEW) -> list[Claim]:
        """Return the two claims; ``paper`` has the paper's figures of the first."""
        method, passes = self.guided.row.planner, self.best.row.planner
        return [
            compared(f"{self.name}{method}: MASPRM over policy likelihood", paper, self.guided, self.likelihood),
            compared(
                f"{self.name}MASPRM {method} over {passes} with the ORM, equal tokens", NEW, self.guided, self.best
            ),
        ]


def compared(text: str, paper: str, better: Score, worse: Score) -> Claim:
    return claim(text, paper, better.shares, worse.shares, (better.row.tokens.mean, worse.row.tokens.mean))


def passes_at(guided: Score, single: Score) -> int:
    """Return how many single passes cost as many tokens as a search."""
    return max(1, round(guided.row.tokens.mean / single.row.tokens.mean))


def rivals(
    lab: Lab,
    setting: Setting,
    guided: Score,
    single: Score,
    *,
    name: str = "",
    orm: Critic | None = None,
    seeds: Sequence[int] = (),
) -> Rivals:
    """Measure the baselines of a search with MASPRM.

    Args:
        lab: Runs the searches.
        setting: Task, system and agents.
        guided: The search with MASPRM.
        single: A single pass, for its tokens.
        name: Precedes each claim.
        orm: The ORM; that of the setting, trained on the same trees as MASPRM, if None.
        seeds: Run seeds; the run's own if empty.
    """
    judge = lab.critic(setting, ORM) if orm is None else orm
    searches = [
        row_of(guided.row.planner, load_critic(LIKELIHOOD), "PL"),
        row_of(f"bon:{passes_at(guided, single)}", judge, "ORM"),
    ]
    return Rivals(name, guided, *lab.measure(setting, searches, seeds))
