"""Compute the tables of ``docs/real-models.md`` from the published samples of real models on GSM8K.

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


def drawn(system: str, planner: str, critic: search.Critic, label: str) -> Rows:
    """Return the row of a planner on the samples: means over draws."""
    recorded = search.Recorded(FOLDER / f"samples-{system}.db")
    right: Counter[str] = Counter()
    tokens = 0
    for seed in range(DRAWS):
        for plan in search.run(planner, recorded=recorded, critic=critic, seed=seed):
            right[plan.problem_id] += bool(plan.correct)
            tokens += plan.usage.generated_tokens
    shares = {problem.id: right[problem.id] / DRAWS for problem in recorded}
    return {f"{AGENTS[system]} | {label}": Row(shares, tokens / DRAWS / len(shares))}


def stored(name: str) -> list[search.Plan]:
    """Return the plans of a store."""
    with open_store(FOLDER / f"{name}.db") as store:
        return [plan for info in store.runs() for _, plan in store.searches(info.run)]


def searched(name: str, label: str) -> Rows:
    """Return the row of a stored search; a stored vote also has the row of best-of-N, with the same values."""
    plans = stored(name)
    tokens = sum(plan.usage.generated_tokens for plan in plans) / len(plans)
    rows = {label: Row({plan.problem_id: float(bool(plan.correct)) for plan in plans}, tokens)}
    if "weighted" in label:
        # Every sample of a weighted vote has a score.
        best = {plan.problem_id: max(plan.candidates, key=lambda one: float(one.score)) for plan in plans}  # type: ignore[arg-type]
        right = {problem: float(bool(candidate.correct)) for problem, candidate in best.items()}
        rows[label.replace("sc:5, weighted by", "bon:5,")] = Row(right, tokens)
    return rows


def cut(system: str) -> float:
    """Return the share of transcripts in which the token limit ended a message."""
    found = [
        any(plan.tree[node].finish_reason == "length" for node in plan.tree.path(candidate.node)[1:])
        for plan in stored(f"samples-{system}")
        for candidate in plan.candidates
    ]
    return sum(found) / len(found)


SEARCHES = {
    "sc": ("sc:5, weighted by ", ("MASPRM", "ORM")),
    "sbs": ("sbs:5,1, ", ("policy likelihood", "MASPRM")),
    "sbs53": ("sbs:5,3, ", ("policy likelihood",)),
    "mcts": ("mcts:10,3, ", ("policy likelihood", "MASPRM", "ORM")),
}
"""The stored searches with the paper's token limits: their labels and their critics, by the name of the search."""

PAIRS = (
    ("RPSV | single", "RPSV, low limits | single"),
    ("RPSV | single", "`cot` | sc:3"),
    ("RPSV | sc:5", "`cot` | sc:13"),
    ("RPSV | bon:5, ORM", "`cot` | sc:13"),
    ("RPSV | sbs:5,1, policy likelihood", "`cot` | sc:13"),
    ("RPSV | sbs:5,1, MASPRM", "`cot` | sc:13"),
    ("RPSV | sbs:5,3, policy likelihood", "`cot` | sc:20"),
    ("RPSV | mcts:10,3, MASPRM", "`cot` | sc:20"),
    ("RPSV | bon:5, ORM", "RPSV | sc:5"),
    ("RPSV | sbs:5,1, MASPRM", "RPSV | sc:5"),
    ("RPSV | mcts:10,3, MASPRM", "RPSV | sc:5"),
    ("RPSV | mcts:10,3, MASPRM", "RPSV | bon:5, ORM"),
    ("RPSV | sbs:5,1, MASPRM", "RPSV | sbs:5,1, policy likelihood"),
    ("RPSV | mcts:10,3, MASPRM", "RPSV | mcts:10,3, policy likelihood"),
    ("`cot` | sc:10", "RPSV, low limits | sc:5"),
    ("`cot` | sc:20", "RPSV, low limits | sc:10"),
    ("`cot` | bon:10, ORM", "`cot` | sc:10"),
    ("`cot` | bon:20, ORM", "`cot` | sc:20"),
    ("`cot`, 1.5B model | single", "`cot` | single"),
    ("`cot`, 1.5B model | single", "`cot` | sc:20"),
    ("`cot`, 1.5B model | single", "RPSV | sbs:5,3, policy likelihood"),
)


def lines(orm: str) -> Iterator[str]:
    """Yield the lines of both tables."""
    rows = sampled("paper", (1, 5))
    rows |= drawn("paper", "sc:5,weights=critic", search.PolicyLikelihood(), "sc:5, weighted by policy likelihood")
    for name, (label, critics) in SEARCHES.items():
        for critic in critics:
            rows |= searched(f"paper-{name}-{critic.lower().split()[-1]}", f"RPSV | {label}{critic}")
    rows |= sampled("rpsv", (1, 5, 10))
    rows |= sampled("cot", (1, 3, 5, 10, 13, 20))
    for k in (5, 10, 20):
        rows |= drawn("cot", f"bon:{k}", rewardmodels.load_critic(orm), f"bon:{k}, ORM")
    rows |= searched("samples-cot-1.5b", "`cot`, 1.5B model | single")
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
