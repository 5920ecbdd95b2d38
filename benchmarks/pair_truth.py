r"""Correctness of MASPRM's training pairs: which kinds of messages are preferred to which, according to the truth.

    python -m benchmarks.pair_truth --task stories-4 --policy transformers:models/tiny-natural \
        --base models/tiny-natural -n 200 --trees 4800 --out natural

The arguments are those of a table. A pair consists of two messages at the same state. Each message is right or
wrong independently of earlier messages, and pairs after an earlier error are counted separately.
"""

from __future__ import annotations

from collections import Counter

from benchmarks.paper.lab import Lab, problems, rule_for
from benchmarks.paper.options import Options, read
from benchmarks.tiny.truth import first_error
from mas_gym.systems.dynamics import Dynamics
from mas_gym.tasks.base import same_rule
from rewardmodels.data.mining import pairs
from rewardmodels.training.train_critic import trees


def counts(options: Options) -> Counter[tuple[str, str]]:
    """Return how often which kind of message is set over which, by the agent that wrote them."""
    lab = Lab(options)
    task = problems(lab.home, "train", None)
    same = same_rule(rule_for(lab.home))
    found: Counter[tuple[str, str]] = Counter()
    for tree in trees(lab.rollouts(lab.home), lab.trees(lab.home)):
        problem = task.problem(tree.problem_id)
        names = [agent.name for agent in tree.mas.agents]
        for pair in pairs(tree.tree, Dynamics(tree.mas).max_depth, same=same):
            errors = [
                first_error(problem, [(names[turn.speaker], turn.text) for turn in one.state.turns])
                for one in (pair.chosen, pair.rejected)
            ]
            words = ["wrong" if error else "right" for error in errors]
            early = errors[0] is not None and errors[0].place < pair.depth
            found[names[pair.chosen.state.turns[-1].speaker], "after an error" if early else " over ".join(words)] += 1
    return found


def main(arguments: list[str] | None = None) -> None:
    """Print the counts, of all agents and of each."""
    found = counts(read("python -m benchmarks.pair_truth", __doc__ or "", arguments))
    for agent in ("all", *sorted({agent for agent, _ in found})):
        kinds: Counter[str] = Counter()
        for (speaker, kind), number in found.items():
            if agent in ("all", speaker):
                kinds[kind] += number
        for kind, number in kinds.most_common():
            print(f"{agent}, {kind}: {number} of {kinds.total()} pairs, {100 * number / kinds.total():.1f}%")


if __name__ == "__main__":
    main()
