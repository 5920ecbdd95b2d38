"""Compute the tables of ``docs/real-models.md`` from the published samples of Qwen2.5-Coder-0.5B-Instruct on GSM8K.

    mas-gym train orm --store benchmarks/real_models/train-cot.db --base features --out models/orm-cot
    python -m benchmarks.real_models.table --orm models/orm-cot

Accuracies with the majority vote, policy likelihood and ``any`` are exact means over all draws; those with the ORM are
means over random draws. Intervals are over problems.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import rewardmodels
import search
from search.compare import select
from search.results.intervals import accuracy_interval, paired_difference
from search.store import open_store

FOLDER = Path(__file__).parent
DRAWS = 10
AGENTS = {"rpsv": "RPSV, low limits", "paper": "RPSV", "cot": "`cot`"}


class Row(NamedTuple):
    """A line of the table: the probability of a correct answer by problem, and the tokens per problem."""

    right: Mapping[str, float]
    tokens: float


Rows = dict[str, Row]
"""Rows by their label, such as ``RPSV | sc:5``."""


def sampled(system: str, ks: tuple[int, ...]) -> Rows:
    """Return the rows of choosing among samples by majority vote and by policy likelihood, and the upper limit."""
    found = select(FOLDER / f"samples-{system}.db", {"policy likelihood": search.PolicyLikelihood()}, ks=ks)
    rows = {}
    for curve in found.curves:
        for k, tokens in ((point.k, point.tokens) for point in curve.points):
            vote = "single" if k == 1 else f"sc:{k}"
            label = {"majority": vote, "best": f"bon:{k}, {curve.critic}", "any": f"any of {k}"}[curve.rule]
            if k > 1 or curve.rule == "majority":
                rows[f"{AGENTS[system]} | {label}"] = Row(curve.shares[k], tokens)
    return rows


def best(system: str, critic: search.Critic, ks: tuple[int, ...]) -> Rows:
    """Return the rows of a critic that compares the samples of a draw with each other: means over draws."""
    recorded = search.Recorded(FOLDER / f"samples-{system}.db")
    rows = {}
    for k in ks:
        right: Counter[str] = Counter()
        tokens = 0
        for seed in range(DRAWS):
            for plan in search.run(f"bon:{k}", recorded=recorded, critic=critic, seed=seed):
                right[plan.problem_id] += bool(plan.correct)
                tokens += plan.usage.generated_tokens
        shares = {problem.id: right[problem.id] / DRAWS for problem in recorded}
        rows[f"{AGENTS[system]} | bon:{k}, ORM"] = Row(shares, tokens / DRAWS / len(shares))
    return rows


def searched(system: str, name: str, label: str) -> Rows:
    """Return the row of a stored run."""
    with open_store(FOLDER / f"{name}.db") as store:
        plans = [plan for info in store.runs() for _, plan in store.searches(info.run)]
    tokens = sum(plan.usage.generated_tokens for plan in plans) / len(plans)
    return {f"{AGENTS[system]} | {label}": Row({plan.problem_id: float(bool(plan.correct)) for plan in plans}, tokens)}


def cut(system: str) -> float:
    """Return the share of transcripts in which the token limit ended a message."""
    with open_store(FOLDER / f"samples-{system}.db") as store:
        plans = [plan for info in store.runs() for _, plan in store.searches(info.run)]
    found = [
        any(plan.tree[node].finish_reason == "length" for node in plan.tree.path(candidate.node)[1:])
        for plan in plans
        for candidate in plan.candidates
    ]
    return sum(found) / len(found)


SEARCHES = {
    "paper-bon-orm": "bon:5, ORM",
    "paper-sbs-masprm": "sbs:5,1, MASPRM",
    "paper-mcts-masprm": "mcts:10,3, MASPRM",
}
"""Labels of the stored runs with the paper's token limits."""

PAIRS = (
    ("RPSV | single", "RPSV, low limits | single"),
    ("RPSV | single", "`cot` | sc:3"),
    ("RPSV | sc:5", "`cot` | sc:13"),
    ("RPSV | bon:5, ORM", "`cot` | sc:13"),
    ("RPSV | sbs:5,1, MASPRM", "`cot` | sc:13"),
    ("RPSV | mcts:10,3, MASPRM", "`cot` | sc:20"),
    ("RPSV | bon:5, ORM", "RPSV | sc:5"),
    ("RPSV | sbs:5,1, MASPRM", "RPSV | sc:5"),
    ("RPSV | mcts:10,3, MASPRM", "RPSV | sc:5"),
    ("RPSV | sbs:5,1, MASPRM", "RPSV | bon:5, policy likelihood"),
    ("`cot` | sc:10", "RPSV, low limits | sc:5"),
    ("`cot` | sc:20", "RPSV, low limits | sc:10"),
    ("`cot` | bon:10, ORM", "`cot` | sc:10"),
    ("`cot` | bon:20, ORM", "`cot` | sc:20"),
)


def lines(orm: str) -> Iterator[str]:
    """Yield the lines of both tables."""
    rows = sampled("paper", (1, 5))
    for store, label in SEARCHES.items():
        rows |= searched("paper", store, label)
    rows |= sampled("rpsv", (1, 5, 10)) | searched("rpsv", "beam-rpsv", "sbs:5,1, policy likelihood")
    rows |= sampled("cot", (1, 3, 5, 10, 13, 20)) | best("cot", rewardmodels.load_critic(orm), (5, 10, 20))
    yield from ("| agents | choice | Hit@1 | 95% interval | TOK |", "|---|---|---|---|---|")
    for label, row in rows.items():
        low, high = accuracy_interval(list(row.right.values()), 1)
        mean = sum(row.right.values()) / len(row.right)
        yield f"| {label} | {100 * mean:.1f} | {100 * low:.1f} to {100 * high:.1f} | {row.tokens:,.0f} |"
    shares = ", ".join(f"{100 * cut(system):.0f}% ({name})" for system, name in AGENTS.items())
    yield from ("", f"A token limit ended at least one message in this share of the transcripts: {shares}.")
    yield from ("", "| difference | points | 95% interval | tokens |", "|---|---|---|---|")
    for a, b in PAIRS:
        gap = paired_difference(rows[a].right, rows[b].right)
        names = f"{a} minus {b}".replace(" |", "")
        tokens = f"{rows[a].tokens:,.0f} and {rows[b].tokens:,.0f}"
        yield f"| {names} | {100 * gap.mean:+.1f} | {100 * gap.low:+.1f} to {100 * gap.high:+.1f} | {tokens} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--orm", required=True, help="critic trained on train-cot.db")
    for line in lines(parser.parse_args().orm):
        print(line)


if __name__ == "__main__":
    main()
