"""Credit assignment compared with the ground truth: is a critic's largest fall in value at the first wrong message?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import search
from benchmarks.paper.lab import MASPRM, ORM, Lab, Setting, command
from benchmarks.paper.page import NEW, Claim, Page, claim, percent, span
from benchmarks.tiny.truth import FirstError, first_error
from mas_gym.systems.graph import MAS
from mas_gym.systems.state import Action
from search import ScoringContext
from search.compare.blame import falls
from search.results.intervals import Difference, mean_interval

FEWEST = 20
"""Rarer kinds of error are counted together."""

ASKS = """
In a generated task the first wrong message of every transcript is known. This page measures, for failed single passes,
how often the largest fall in value from one prefix to the next is at the first wrong message. This cannot be measured
on the paper's benchmarks, where only the final answers are labeled.

The value after a message is compared with the value before it; for the first message, with the mean of the values after
the first messages of all transcripts. `drop` is the largest fall. `centered` is the largest fall after the mean value
at each depth is subtracted, so that falls that are usual at a depth are ignored. The ORM scores unfinished transcripts,
although it was not trained on them. Policy likelihood scores the message itself. `most frequent agent` always blames
the agent that errs most often according to the ground truth; `chance` blames each agent with equal probability.
"""


@dataclass(frozen=True)
class Pass:
    """One finished single pass.

    Attributes:
        problem_id: The problem.
        agents: Who spoke, in order.
        values: Critic to the value after each message.
        error: The first wrong message; None if all were right.
        correct: Whether the final answer was right.
    """

    problem_id: str
    agents: tuple[str, ...]
    values: Mapping[str, tuple[float, ...]]
    error: FirstError | None
    correct: bool


def run(lab: Lab) -> Page:
    page = Page("credit", "Credit assignment compared with the ground truth", ASKS)
    critics: dict[str, Any] = {
        "MASPRM": lab.critic(lab.home, MASPRM),
        "ORM": lab.critic(lab.home, ORM, prefixes=True),
        "PL": search.PolicyLikelihood(),
    }
    passes = collect_passes(lab, lab.home, critics)
    failed = [one for one in passes if not one.correct and one.error is not None]
    wrong = sum(not one.correct for one in passes)
    lab.notes.append(f"{len(passes):,} single passes, one per problem and seed; {wrong:,} failed")
    if not failed:
        page.blocks.append("No single pass failed, so there is no error to find.\n")
        return page
    commonest = Counter(one.error.speaker for one in failed if one.error).most_common(1)[0][0]
    judges = judges_of(passes, list(critics), commonest)
    _overall(page, failed, judges)
    _grouped(page, "agent that erred first", failed, judges, lambda error: error.speaker)
    rare = {k for k, n in Counter(one.error.kind for one in failed if one.error).items() if n < FEWEST}
    _grouped(page, "kind of error", failed, judges, lambda error: "other" if error.kind in rare else error.kind)
    page.claims = _claims(failed, judges, list(critics))
    return page


def collect_passes(lab: Lab, setting: Setting, critics: Mapping[str, Any], split: str = "test") -> list[Pass]:
    """Take the single passes of the main table, or those of another split, and score every prefix with every critic."""
    spec = lab.spec(setting, split, lab.options.number, lab.options.seeds[0], lab.options.out / "searches.db")
    found: list[Pass] = []
    names = [agent.name for agent in spec.mas.agents]
    common = {"mas": spec.mas, "policy": spec.policy, "store": str(spec.store), "sampling": spec.sampling}
    for seed in lab.options.seeds:
        for plan in search.run("single", spec.problems, seed=seed, **common):
            if plan.error is not None or plan.tree is None or plan.best is None:
                continue
            contexts = [context_of(plan.tree[node], spec.mas) for node in plan.tree.path(plan.best.node)[1:]]
            values = {name: tuple(critic.score(contexts)) for name, critic in critics.items()}
            spoken = [(names[context.state.speaker], context.state.text) for context in contexts]
            error = first_error(spec.problems.problem(plan.problem_id), spoken)
            speakers = tuple(speaker for speaker, _ in spoken)
            found.append(Pass(plan.problem_id, speakers, values, error, bool(plan.correct)))
    return sorted(found, key=lambda one: one.problem_id)


def context_of(node: Any, mas: MAS) -> ScoringContext:
    """Return the scoring context of a stored node, with the log-probability of its message."""
    action = Action(node.state.text, mas.ALL)
    return ScoringContext(node.state, mas, search.Proposal(action, node.tokens, node.logprob))


Judge = Callable[[Pass], NDArray[np.float64]]
"""Spreads one unit of blame over a transcript's messages."""


def judges_of(passes: Sequence[Pass], critics: Sequence[str], commonest: str) -> dict[str, Judge]:
    """Return the ways to blame: each critic's raw and centered drop, and the two baselines."""
    judges: dict[str, Judge] = {}
    for name in critics:
        means = _means([one.values[name] for one in passes])
        judges[f"{name}, drop"] = lambda one, n=name, m=means: largest_drop(one.values[n], m[0])
        judges[f"{name}, centered"] = lambda one, n=name, m=means: largest_drop(
            [value - mean for value, mean in zip(one.values[n], m, strict=False)], 0.0
        )
    judges["most frequent agent"] = lambda one: _share([agent == commonest for agent in one.agents])
    judges["chance"] = lambda one: _share([True] * len(one.agents))
    return judges


def largest_drop(values: Sequence[float], before: float) -> NDArray[np.float64]:
    """Blame the message with the largest fall in value; equal falls share.

    Args:
        values: After each message.
        before: The value before the first.
    """
    found = np.array(falls(values, before))
    return _share(list(found == found.max()))


def _share(chosen: Sequence[bool]) -> NDArray[np.float64]:
    hits = np.array(chosen, dtype=float)
    return hits / hits.sum() if hits.any() else np.full(len(hits), 1 / len(hits))


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    """Average the values at each depth."""
    depth = max(map(len, rows))
    return [float(np.mean([row[t] for row in rows if len(row) > t])) for t in range(depth)]


def hit(one: Pass, judge: Judge) -> float:
    """Return the share of the blame that falls on the first wrong message."""
    assert one.error is not None
    return float(judge(one)[one.error.place])


def shares(failed: Sequence[Pass], judge: Judge) -> dict[str, float]:
    """Return problem id to the mean of `hit` over its failed passes."""
    found: dict[str, list[float]] = {}
    for one in failed:
        found.setdefault(one.problem_id, []).append(hit(one, judge))
    return {key: float(np.mean(hits)) for key, hits in found.items()}


def _overall(page: Page, failed: Sequence[Pass], judges: Mapping[str, Judge]) -> None:
    rows = []
    for name, judge in judges.items():
        found = _mean(failed, judge)
        rows.append((name, percent(found.mean), span(found.low, found.high)))
    page.table(("method", "finds the erring agent, %", "95% interval"), rows)
    problems = len(shares(failed, judges["chance"]))
    page.blocks.append(
        f"The figures are for {len(failed):,} failed passes on {problems:,} problems. They are averaged per "
        "problem, and the intervals are over problems.\n"
    )


def _grouped(
    page: Page, what: str, failed: Sequence[Pass], judges: Mapping[str, Judge], key: Callable[[FirstError], str]
) -> None:
    groups: dict[str, list[Pass]] = {}
    for one in failed:
        assert one.error is not None
        groups.setdefault(key(one.error), []).append(one)
    shown = {name: judge for name, judge in judges.items() if name not in ("most frequent agent", "chance")}
    rows = [
        (name, len(group), *(_cell(group, judge) for judge in shown.values()))
        for name, group in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]
    page.blocks.append(f"Percentage of errors that are found, by {what}, with 95% intervals:\n")
    page.table((what, "passes", *shown), rows)


def _cell(group: Sequence[Pass], judge: Judge) -> str:
    found = _mean(group, judge)
    return f"{percent(found.mean)} ({span(found.low, found.high)})"


def _mean(group: Sequence[Pass], judge: Judge) -> Difference:
    found = shares(group, judge)
    return Difference(float(np.mean(list(found.values()))), *mean_interval(list(found.values()), 0, 1), len(found))


def _claims(failed: Sequence[Pass], judges: Mapping[str, Judge], critics: Sequence[str]) -> list[Claim]:
    best = {name: shares(failed, judges[f"{name}, centered"]) for name in critics}
    first, *others = critics
    baselines = {name: shares(failed, judges[name]) for name in ("most frequent agent", "chance")}
    return [
        *(claim(f"{first} over {other}, centered", NEW, best[first], best[other]) for other in others),
        *(claim(f"{first}, centered, over {name}", NEW, best[first], base) for name, base in baselines.items()),
    ]


if __name__ == "__main__":
    command(run, "credit")
