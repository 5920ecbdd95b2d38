"""Critics on the published complete trees of a real model: ``python -m benchmarks.real_models.trees``.

The value of each state of a complete tree is known: the mean reward of all transcripts below it. The script compares
the known values, these values plus noise, policy likelihood and trained critics: how often they prefer the better of
two siblings, and how accurate searches of the trees are with them. The values of the trained critics are published
(``held-out-values.safetensors``, written by `benchmarks.real_models.critics`). It also writes the pages that the table
of claims reads (``benchmarks/pages/qwen``).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

import search
from benchmarks.paper.claims import PAGES
from benchmarks.paper.page import Claim, Page, claim, claim_of, write_page
from benchmarks.paper.published import heads, lead, narrowing
from benchmarks.real_models.table import FOLDER
from rewardmodels.data.dataset import LabeledTree
from search.compare.first_errors import auc
from search.plan import Plan
from search.results.intervals import bootstrap
from search.store import open_store
from search.tree import Tree

PLANNERS = ("bon:3", "sbs:3,3", "mcts:10,3")
MCTS = "mcts:10,3"
NOISE = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
SEEDS = 10
VALUES = FOLDER / "held-out-values.safetensors"
CRITICS = {"PL": "policy likelihood", "MASPRM": "MASPRM", "ORM": "ORM"}

Values = Mapping[bytes, float]
"""Values of states, by their digest."""


def complete_trees() -> Iterator[LabeledTree]:
    """Yield the published trees, labeled with the outcomes of their transcripts."""
    with open_store(FOLDER / "trees-rpsv.db") as store:
        for info in store.runs():
            for plan in store.plans(info.run):
                yield LabeledTree(labeled(plan), info.mas, "gsm8k", plan.problem_id, int(info.config["seed"]))


def labeled(plan: Plan) -> Tree:
    """Return a plan's tree with the outcome of each candidate counted on its path."""
    tree = plan.tree
    assert tree is not None
    for candidate in plan.candidates:
        assert candidate.node is not None
        for node in tree.path(candidate.node):
            tree.visits[node] += 1
            tree.totals[node] += 1.0 if candidate.correct else -1.0
    return tree


def true_values(trees: Sequence[LabeledTree]) -> dict[bytes, float]:
    """Return the mean reward of all transcripts below each state, in [-1, 1]; equal states of a tree are one."""
    totals: Counter[bytes] = Counter()
    visits: Counter[bytes] = Counter()
    for item in trees:
        for state, total, count in zip(item.tree.states, item.tree.totals, item.tree.visits, strict=True):
            totals[state.digest] += total
            visits[state.digest] += count
    return {key: totals[key] / visits[key] for key in totals}


def likelihoods(trees: Sequence[LabeledTree]) -> dict[bytes, float]:
    """Return the mean log-probability of the message before each state."""
    return {
        item.tree.states[node].digest: item.tree.mean_logprob(node)
        for item in trees
        for node in range(1, len(item.tree))
    }


def trained() -> dict[str, dict[bytes, float]]:
    """Return the published values of trained critics."""
    stored = load_file(VALUES)
    digests = [bytes(row) for row in stored.pop("digest")]
    return {name: dict(zip(digests, column.tolist(), strict=True)) for name, column in stored.items()}


class Pair(NamedTuple):
    """Two siblings with different values, and the agent and problem of their messages."""

    better: bytes
    worse: bytes
    agent: str
    problem: str


def siblings(trees: Sequence[LabeledTree], truth: Values) -> list[Pair]:
    """Return all pairs of siblings with different values."""
    pairs = {
        Pair(one.digest, other.digest, item.mas.agents[one.speaker].name, item.problem_id): None
        for item in trees
        for parent in range(len(item.tree))
        for one, other in permutations([item.tree.states[node] for node in item.tree.children(parent)], 2)
    }
    return [pair for pair in pairs if truth[pair.better] > truth[pair.worse]]


def preferred(pairs: Sequence[Pair], values: Values) -> NDArray[np.float64]:
    """Return for each pair whether values prefer the better state; 0.5 for equal values."""
    better, worse = (np.array([values[digest] for digest in side]) for side in list(zip(*pairs, strict=True))[:2])
    return np.where(better == worse, 0.5, better > worse)


def cell(pairs: Sequence[Pair], values: Values) -> str:
    """Return how often values prefer the better sibling, in percent with a 95% interval, and their AUC."""
    right = preferred(pairs, values)
    names = np.array([pair.problem for pair in pairs])
    sums = np.array([[right[names == name].sum(), (names == name).sum()] for name in dict.fromkeys(names)])
    low, high = bootstrap(len(sums), lambda counts: (counts @ sums)[:, 0] / (counts @ sums)[:, 1])
    scores = np.array([values[digest] for side in list(zip(*pairs, strict=True))[:2] for digest in side])
    area = auc(scores, np.repeat([1, 0], len(pairs)))
    return f"{100 * right.mean():.0f} ({100 * low:.0f} to {100 * high:.0f}), {area:.2f}"


class KnownValues(search.Critic):
    """Values given in advance; ``name`` says of which kind of critic they are."""

    def __init__(self, values: Values, name: str = "known") -> None:
        self.values, self.name = values, name
        self.terminal_only, self.scores_actions = name.startswith("ORM"), name == "PL"

    def score(self, contexts: object) -> list[float]:
        return [self.values[context.state.digest] for context in contexts]


class Found(NamedTuple):
    """Results of a planner on the trees: by problem, the shares of right answers and of a right one among five."""

    first: dict[str, float]
    fifth: dict[str, float]

    @property
    def accuracy(self) -> float:
        return float(np.mean(list(self.first.values())))


def searched(planner: str, critics: Sequence[search.Critic]) -> Found:
    """Search the trees once with each critic, with a seed each, which orders the messages of a state."""
    recorded = search.Recorded(FOLDER / "trees-rpsv.db", distinct=True)
    first: Counter[str] = Counter()
    fifth: Counter[str] = Counter()
    for seed, critic in enumerate(critics):
        for plan in search.run(planner, recorded=recorded, critic=critic, seed=seed):
            first[plan.problem_id] += plan.hit(1)
            fifth[plan.problem_id] += plan.hit(5)
    shares = ({one.id: counts[one.id] / len(critics) for one in recorded} for counts in (first, fifth))
    return Found(*shares)


def tables(trees: Sequence[LabeledTree], truth: Values, critics: Mapping[str, Values]) -> Iterator[str]:
    """Yield the lines of the table of pairs and of the table of searches."""
    pairs = siblings(trees, truth)
    yield from ("| agent | pairs | " + " | ".join(CRITICS.values()) + " |", "|---|---|" + "---|" * len(CRITICS))
    for agent in (*dict.fromkeys(pair.agent for pair in pairs), "all"):
        chosen = [pair for pair in pairs if agent in (pair.agent, "all")]
        cells = [cell(chosen, critics[name]) for name in CRITICS]
        yield f"| {agent} | {len(chosen)} | " + " | ".join(cells) + " |"
    last = trees[0].mas.agents[-1].name
    groups = [[pair for pair in pairs if (pair.agent == last) is final] for final in (True, False)]
    rows: dict[str, list[search.Critic]] = {}
    for noise in NOISE:
        drawn = [random.Random(seed) for seed in range(SEEDS)]
        noisy = [{key: value + rng.gauss(0, noise) for key, value in truth.items()} for rng in drawn]
        rows[f"known, noise {noise:g}" if noise else "known"] = [KnownValues(values) for values in noisy]
    rows |= {name: [KnownValues(critics[key], key)] * SEEDS for key, name in CRITICS.items()}
    header = ("values", "final messages", "others", *PLANNERS)
    yield from ("", "| " + " | ".join(header) + " |", "|---" * len(header) + "|")
    for name, found in rows.items():
        shares = [float(np.mean([preferred(group, one.values).mean() for one in found])) for group in groups]
        outcome = found[0].terminal_only
        hits = [
            "" if outcome and one.startswith("sbs") else f"{100 * searched(one, found).accuracy:.0f}"
            for one in PLANNERS
        ]
        yield f"| {name} | " + " | ".join([*(f"{100 * share:.0f}" for share in shares), *hits]) + " |"


def losses(trees: Sequence[LabeledTree], truth: Values, critics: Mapping[str, Values]) -> Iterator[str]:
    """Yield the lines of a table of MASPRM with each loss: preferences by agent, and accuracies."""
    pairs = siblings(trees, truth)
    agents = list(dict.fromkeys(pair.agent for pair in pairs))
    planners = PLANNERS[1:]
    yield from (
        "| critic | " + " | ".join([*agents, *planners]) + " |",
        "|---" * (1 + len(agents) + len(planners)) + "|",
    )
    for name in (name for name in critics if name.startswith("MASPRM")):
        values = critics[name]
        shares = [preferred([pair for pair in pairs if pair.agent == agent], values).mean() for agent in agents]
        hits = [searched(planner, [KnownValues(values)] * SEEDS).accuracy for planner in planners]
        yield f"| {name} | " + " | ".join(f"{100 * share:.0f}" for share in (*shares, *hits)) + " |"


def culprits(trees: Sequence[LabeledTree], truth: Values) -> Iterator[str]:
    """Yield the lines of a table: which agent wrote the message after which the value of a failed transcript fell most.

    Trees without a correct transcript are left out, because no message lowers their value.
    """
    names = [agent.name for agent in trees[0].mas.agents]
    shares = []
    for item in (one for one in trees if truth[one.tree.states[0].digest] > -1):
        blamed = np.zeros(len(names))
        for node in range(len(item.tree)):
            if item.tree.is_terminal(node) and item.tree.totals[node] < 0:
                values = [truth[state.digest] for state in item.tree.states[node].path()]
                blamed[int(np.argmin(np.diff(values)))] += 1
        shares.append(blamed / blamed.sum())
    table = np.array(shares)
    intervals = [
        bootstrap(len(table), lambda counts, turn=turn: counts @ table[:, turn] / len(table))
        for turn in range(len(names))
    ]
    yield from ("| agent | failed transcripts |", "|---|---|")
    for name, mean, (low, high) in zip(names, table.mean(0), intervals, strict=True):
        yield f"| {name} | {100 * mean:.0f} ({100 * low:.0f} to {100 * high:.0f}) |"


def claims(critics: Mapping[str, Values]) -> dict[str, list[Claim]]:
    """Return the paper's claims about MCTS(10,3), measured on the trees, by page."""
    results = {name: searched(MCTS, [KnownValues(values, name)] * SEEDS) for name, values in critics.items()}

    def over(text: str, paper: str, better: str, worse: str) -> Claim:
        return claim(text, paper, results[better].first, results[worse].first)

    def shrinks(means: NDArray[np.float64]) -> NDArray[np.float64]:
        return (means[..., 0] - means[..., 1]) - (means[..., 2] - means[..., 3])

    wide, narrow = results["PL"], results["MASPRM"]
    columns = [wide.fifth, wide.first, narrow.fifth, narrow.first]
    return {
        "main": [
            over(f"{MCTS}: MASPRM over ORM", lead(MCTS, "MASPRM", "ORM"), "MASPRM", "ORM"),
            over(f"{MCTS}: MASPRM over PL", lead(MCTS, "MASPRM", "PL"), "MASPRM", "PL"),
            claim_of("MCTS(10,3): the gap from Hit@1 to Hit@5 shrinks with MASPRM", narrowing(MCTS), columns, shrinks),
        ],
        "heads": [
            over("MASPRM: BT over MSE", heads("MASPRM", "BT", "MSE"), "MASPRM", "MASPRM, MSE"),
            over("MASPRM: BT alone over MSE", heads("MASPRM", "BT", "MSE"), "MASPRM, BT alone", "MASPRM, MSE"),
            over("ORM: BCE over MSE", heads("ORM", "BCE", "MSE"), "ORM", "ORM, MSE"),
        ],
    }


def main() -> None:
    trees = list(complete_trees())
    critics = {"PL": likelihoods(trees), **trained()}
    truth = true_values(trees)
    for line in (*tables(trees, truth, critics), "", *culprits(trees, truth), "", *losses(trees, truth, critics)):
        print(line)
    facts = [
        "Qwen2.5-Coder-0.5B-Instruct, GSM8K, RPSV with low token limits: [A real model](../../../docs/real-models.md)",
        f"MCTS(10,3) on the complete trees of {len(trees)} dev problems, {SEEDS} seeds",
        "critics are heads on the frozen backbone; all values are those of cross-validation by problem",
    ]
    for name, measured in claims(critics).items():
        page = Page(name, f"Claims on a real model: {name}", "MCTS(10,3) searches the published trees.", "dev")
        page.claims = measured
        write_page(page, PAGES / "qwen", "python -m benchmarks.real_models.trees", facts)


if __name__ == "__main__":
    main()
