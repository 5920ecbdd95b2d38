"""Self-consistency that stops when its majority is settled, compared with fixed sizes, with the bundled agents.

    python -m benchmarks.stopping

Every vote is a prefix of the same passes, so one run of ``sc:20`` per problem and seed gives all results. The stopping
probability is the smallest whose Hit@1 on dev is at least that of ``sc:20``. The fixed size is the smallest whose
Hit@1 on dev is at least that of the chosen stopping probability. Intervals on test are paired over problems.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

import mas_gym
import search
from mas_gym.policies import load_policy
from mas_gym.tasks.base import Task
from search.planners.voting import leading_votes, majority_probability, vote
from search.results.intervals import bootstrap, paired_difference

LARGEST = 20
PROBABILITIES = (0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99)


class Pass(NamedTuple):
    """A finished pass: its answer, whether it is right, and its tokens."""

    answer: str | None
    correct: bool
    tokens: int


class Passes(NamedTuple):
    """The passes at one problem with one seed."""

    problem: str
    passes: tuple[Pass, ...]


Size = Callable[[Sequence[Pass]], int]
"""Returns after how many passes a search stops."""


def sampled(task: Task, seeds: Iterable[int]) -> list[Passes]:
    """Return the passes of every problem and seed, in sample order."""
    policy, found = load_policy("tiny"), []
    for seed in seeds:
        for plan in search.run(f"sc:{LARGEST}", task, mas="rpsv", policy=policy, seed=seed, raise_errors=True):
            tree = plan.tree
            assert tree is not None
            ends = sorted(plan.candidates, key=lambda one: one.node or 0)
            costs = [sum(tree.tokens[node] for node in tree.path(one.node or 0)[1:]) for one in ends]
            passes = [Pass(one.answer, bool(one.correct), cost) for one, cost in zip(ends, costs, strict=True)]
            found.append(Passes(plan.problem_id, tuple(passes)))
    return found


def fixed(size: int) -> Size:
    """Return the rule of ``sc:size``."""
    return lambda passes: size


def settled(probability: float) -> Size:
    """Return the rule of ``sc:20,stop=probability``."""

    def size(passes: Sequence[Pass]) -> int:
        answers = [one.answer for one in passes]
        sizes = range(1, len(answers) + 1)
        return next((n for n in sizes if majority_probability(*leading_votes(answers[:n])) > probability), len(answers))

    return size


class Scores(NamedTuple):
    """Share right and mean tokens by problem."""

    hits: dict[str, float]
    tokens: dict[str, float]

    @property
    def hit(self) -> float:
        """Hit@1."""
        return fmean(self.hits.values())

    @property
    def spent(self) -> float:
        """Tokens per problem."""
        return fmean(self.tokens.values())


def scored(found: Iterable[Passes], size: Size) -> Scores:
    """Return the accuracy and the cost of a rule."""
    hits, tokens = defaultdict(list), defaultdict(list)
    for problem, passes in found:
        used = passes[: size(passes)]
        winner = vote([one.answer for one in used], [1.0] * len(used))
        hits[problem].append(used[winner].correct)
        tokens[problem].append(sum(one.tokens for one in used))
    return Scores(*({key: fmean(values) for key, values in side.items()} for side in (hits, tokens)))


def against(one: Scores, other: Scores) -> str:
    """Return the paired difference in Hit@1 and the ratio of tokens, with 95% intervals."""
    gap = paired_difference(one.hits, other.hits)
    sides = [np.array([scores.tokens[key] for key in one.tokens]) for scores in (one, other)]
    low, high = bootstrap(len(sides[0]), lambda counts: (counts @ sides[0]) / (counts @ sides[1]))
    return (
        f"Hit@1 {100 * gap.mean:+.1f} ({100 * gap.low:+.1f} to {100 * gap.high:+.1f}), "
        f"tokens x {one.spent / other.spent:.2f} ({low:.2f} to {high:.2f})"
    )


def main() -> None:
    """Choose on dev, measure on test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dev", type=int, default=100, help="dev problems")
    parser.add_argument("--test", type=int, default=100, help="test problems")
    parser.add_argument("--seeds", type=int, nargs="+", default=[14, 24], help="seeds on test; the first on dev")
    options = parser.parse_args()
    dev = sampled(mas_gym.load_task("arithmetic", split="dev", limit=options.dev), options.seeds[:1])
    whole = scored(dev, fixed(LARGEST)).hit
    chosen = next((p for p in PROBABILITIES if scored(dev, settled(p)).hit >= whole), PROBABILITIES[-1])
    reached = scored(dev, settled(chosen)).hit
    size = next(n for n in range(1, LARGEST + 1) if scored(dev, fixed(n)).hit >= min(reached, whole))
    rules = {f"sc:{LARGEST}": fixed(LARGEST), f"sc:{LARGEST},stop=0.9": settled(0.9)}
    rules |= {f"sc:{LARGEST},stop={chosen}": settled(chosen), f"sc:{size}": fixed(size)}
    print(f"chosen on dev: stop={chosen}, and sc:{size} as the fixed size")
    test = sampled(mas_gym.load_task("arithmetic", split="test", limit=options.test), options.seeds)
    results = {name: scored(test, rule) for name, rule in rules.items()}
    for name, scores in results.items():
        print(f"{name:24} Hit@1 {100 * scores.hit:5.1f}  TOK {scores.spent:8,.1f}")
    stopping = [name for name in results if "stop" in name]
    for name in stopping:
        for other in (name for name in results if name not in stopping):
            print(f"{name} against {other}: {against(results[name], results[other])}")


if __name__ == "__main__":
    main()
