"""Upper bounds of the savings of early stopping, from rules with access to the truth."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from scipy.stats import rankdata

from benchmarks.stopping import Scores, against
from search.results.intervals import accuracy_interval


class Check(NamedTuple):
    """A point at which a search can stop.

    Attributes:
        cost: Tokens, messages or samples so far.
        right: Whether the answer at this point is right.
        probability: The probability that a stop rule gives to this answer.
    """

    cost: float
    right: bool
    probability: float = math.nan


class Run(NamedTuple):
    """A search of a problem: its checks, of which the last one is its end; a problem can have several runs."""

    problem: str
    checks: tuple[Check, ...]


Stop = Callable[[Run], Check]
"""Returns the check at which a run stops."""


def first_right(checks: Sequence[Check]) -> Check:
    """Return the first check with a right answer, or the last one."""
    return next((check for check in checks if check.right), checks[-1])


def kept_right(checks: Sequence[Check]) -> Check:
    """Return the first check with a right answer if the last answer is right, and otherwise the last check."""
    return first_right(checks) if checks[-1].right else checks[-1]


def scored(runs: Iterable[Run], ends: Iterable[Check]) -> Scores:
    """Return accuracy and cost by problem, as means over its runs."""
    found: dict[str, list[Check]] = defaultdict(list)
    for run, end in zip(runs, ends, strict=True):
        found[run.problem].append(end)
    hits = {problem: fmean(end.right for end in checks) for problem, checks in found.items()}
    return Scores(hits, {problem: fmean(end.cost for end in checks) for problem, checks in found.items()})


def fewest(runs: Sequence[Run], least: float) -> tuple[int, Scores]:
    """Return the smallest number of checks at which the rule reaches a Hit@1, and its accuracy and cost.

    If no number reaches it, the result is that of all checks.
    """
    longest = max(len(run.checks) for run in runs)
    for number in range(1, longest + 1):
        found = scored(runs, (first_right(run.checks[:number]) for run in runs))
        if found.hit >= least:
            break
    return number, found


def separation(runs: Iterable[Run]) -> float:
    """Return the AUC of the probabilities of right and wrong answers, over all checks but the last of each run."""
    pairs = [(check.probability, check.right) for run in runs for check in run.checks[:-1]]
    ranks = rankdata([probability for probability, _ in pairs])
    right = sum(mark for _, mark in pairs)
    wrong = len(pairs) - right
    if not right or not wrong:
        return math.nan
    total = sum(rank for rank, (_, mark) in zip(ranks, pairs, strict=True) if mark)
    return float((total - right * (right + 1) / 2) / (right * wrong))


def table(runs: Sequence[Run], fixed: Scores, unit: str = "tokens") -> Iterator[str]:
    """Yield the table that compares rules with access to the truth with a fixed size."""
    number, reached = fewest(runs, fixed.hit)
    rows = {
        "stops at the first right answer": scored(runs, (first_right(run.checks) for run in runs)),
        "as above, but only if the complete search is right": scored(runs, (kept_right(run.checks) for run in runs)),
        f"stops at the first right answer or at check {number}": reached,
    }
    yield f"| rule | Hit@1 | 95% interval | {unit} | against the fixed size |"
    yield "|---|---:|---:|---:|---|"
    for name, found in rows.items():
        span = accuracy_interval([*found.hits.values()], len(runs))
        cells = f"{100 * found.hit:.1f}", f"{100 * span.low:.1f} to {100 * span.high:.1f}", f"{found.spent:,.0f}"
        yield f"| {name} | {' | '.join(cells)} | {against(found, fixed).replace('tokens', unit)} |"
    wrong = [run for run in runs if not any(check.right for check in run.checks)]
    share = sum(run.checks[-1].cost for run in wrong) / sum(run.checks[-1].cost for run in runs)
    never = f"{len(wrong)} of {len(runs)} searches"
    yield "\nIn the last row, the number of the check is the smallest with which the rule reaches the Hit@1 of the"
    yield f"fixed size. {never} never find a right answer. These use {100 * share:.0f}% of the {unit} of all"
    yield "complete searches. The AUC of the predicted probability of a right answer, over all checks, is "
    yield f"{separation(runs):.2f}."
