"""Compute the tables of ``docs/real-models.md`` from the published samples of Qwen2.5-Coder-0.5B-Instruct on GSM8K.

    mas-gym train orm --store benchmarks/real_models/train-cot.db --base features --out models/orm-cot
    python -m benchmarks.real_models.table --orm models/orm-cot

Accuracies with the majority vote, policy likelihood and ``any`` are exact means over all draws; those with the ORM are
means over random draws. Intervals are over problems.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import rewardmodels
import search
from search.compare import select
from search.results.intervals import accuracy_interval, paired_difference
from search.store import open_store

FOLDER = Path(__file__).parent
DRAWS = 10


class Row(NamedTuple):
    """A line of the table: accuracy and its probability by problem, and tokens per problem."""

    system: str
    rule: str
    right: Mapping[str, float]
    tokens: float


def sampled(system: str, critics: Mapping[str, search.Critic], ks: tuple[int, ...]) -> list[Row]:
    """Return the rows of choosing among samples of a system."""
    found = select(FOLDER / f"samples-{system}.db", critics, ks=ks)
    return [
        Row(system, f"{curve.label}, {point.k}", curve.shares[point.k], point.tokens)
        for curve in found.curves
        for point in curve.points
        if point.k > 1 or curve.rule == "majority"
    ]


def best(system: str, critic: search.Critic, ks: tuple[int, ...]) -> list[Row]:
    """Return the rows of a critic that compares the samples of a draw with each other: means over draws."""
    recorded = search.Recorded(FOLDER / f"samples-{system}.db")
    rows = []
    for k in ks:
        right: Counter[str] = Counter()
        tokens = 0
        for seed in range(DRAWS):
            for plan in search.run(f"bon:{k}", recorded=recorded, critic=critic, seed=seed):
                right[plan.problem_id] += bool(plan.correct)
                tokens += plan.usage.generated_tokens
        shares = {problem.id: right[problem.id] / DRAWS for problem in recorded}
        rows.append(Row(system, f"best + ORM, {k}", shares, tokens / DRAWS / len(shares)))
    return rows


def searched(system: str, name: str) -> list[Row]:
    """Return the row of a stored run."""
    with open_store(FOLDER / f"{name}.db") as store:
        plans = [plan for info in store.runs() for _, plan in store.searches(info.run)]
    tokens = sum(plan.usage.generated_tokens for plan in plans) / len(plans)
    return [Row(system, "sbs:5,1 + policy-likelihood", {p.problem_id: float(bool(p.correct)) for p in plans}, tokens)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--orm", required=True, help="critic trained on train-cot.db")
    likelihood = {"policy-likelihood": search.PolicyLikelihood()}
    orm = rewardmodels.load_critic(parser.parse_args().orm)
    rows = [
        *sampled("rpsv", likelihood, (1, 5, 10)),
        *searched("rpsv", "beam-rpsv"),
        *sampled("cot", likelihood, (1, 2, 5, 10, 20)),
        *best("cot", orm, (5, 10, 20)),
    ]
    print("| system | selection, samples | Hit@1 | 95% interval | TOK |\n|---|---|---|---|---|")
    for row in rows:
        low, high = accuracy_interval(list(row.right.values()), 1)
        mean = 100 * sum(row.right.values()) / len(row.right)
        print(f"| {row.system} | {row.rule} | {mean:.1f} | {100 * low:.1f} to {100 * high:.1f} | {row.tokens:,.0f} |")
    print("\n| difference at about equal tokens | points | 95% interval | tokens |\n|---|---|---|---|")
    by_name = {(row.system, row.rule): row for row in rows}
    for one, other in (
        (("cot", "majority, 2"), ("rpsv", "majority, 1")),
        (("cot", "majority, 10"), ("rpsv", "majority, 5")),
        (("cot", "majority, 10"), ("rpsv", "sbs:5,1 + policy-likelihood")),
        (("cot", "majority, 20"), ("rpsv", "majority, 10")),
        (("cot", "best + ORM, 10"), ("cot", "majority, 10")),
        (("cot", "best + ORM, 20"), ("cot", "majority, 20")),
    ):
        a, b = by_name[one], by_name[other]
        gap = paired_difference(a.right, b.right)
        print(
            f"| {' '.join(one)} minus {' '.join(other)} | {100 * gap.mean:+.1f} | {100 * gap.low:+.1f} to "
            f"{100 * gap.high:+.1f} | {a.tokens:,.0f} and {b.tokens:,.0f} |"
        )


if __name__ == "__main__":
    main()
