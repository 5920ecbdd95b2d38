"""Duplicates: the task's rule for equal messages in mining and in the search's child sets, against equal texts."""

from __future__ import annotations

from benchmarks.paper.held_out import pair_accuracy, pair_cells
from benchmarks.paper.lab import (
    MASPRM,
    MCTS,
    SCORE_HEADER,
    Lab,
    Recipe,
    command,
    keep_rows,
    row_of,
    rule_for,
    score_cells,
)
from benchmarks.paper.page import NEW, Page, markdown_table, percent
from benchmarks.paper.rivals import compared
from mas_gym.systems.dynamics import Dynamics
from mas_gym.tasks.base import same_rule
from rewardmodels.data import mining

ASKS = """
The paper removes duplicate siblings before it forms pairs (rule (i)). The bundled agents begin their messages with one
of six words that carry no information, so siblings that differ only in this word are duplicates, although their texts
differ. Here, the task's rule, which ignores the opening word, is used in mining, in the training searches, and in the
evaluated searches. The problems are from the dev split, because these results were used to choose the training
configuration.
"""


def run(lab: Lab) -> Page:
    page = Page("duplicates", "Duplicate messages", ASKS, split="dev")
    rule = rule_for(lab.home)
    merged = f"{MCTS},same={rule}"
    recipes = {
        # Trained here even if a critic is given: the three differ in the rule alone.
        "identical texts": Recipe(trees=lab.trees(lab.home), same="text"),
        "mining": Recipe(same=rule),
        "mining, training searches": Recipe(same=rule, rollouts=f"mcts:40,3,same={rule}"),
    }
    critics = {name: lab.critic(lab.home, recipe) for name, recipe in recipes.items()}
    searches = [row_of(planner, critic, name) for name, critic in critics.items() for planner in (MCTS, merged)]
    scores = lab.measure(lab.home, searches, split="dev")
    found = {(score.row.critic, score.row.planner): score for score in scores}
    page.blocks.append(_pairs(lab, rule))
    rows = []
    for (name, planner), score in found.items():
        accuracy = pair_cells(pair_accuracy(lab, lab.home, critics[name]))[:2]
        pairs = f"{critics[name].info.data['pairs']:,}"
        rows.append((name, "yes" if planner == merged else "no", pairs, *accuracy, *score_cells(score)))
    header = ("rule used in", "in the search", "pairs", "pairwise accuracy, dev trees, %", "95% interval")
    page.table((*header, *SCORE_HEADER), rows, 2)
    today = found["identical texts", MCTS]
    page.claims = [
        compared(f"rule in {name}{' and search' * (planner == merged)}, over none", NEW, score, today)
        for (name, planner), score in found.items()
        if score is not today
    ]
    keep_rows(lab, page.name, scores)
    return page


def _pairs(lab: Lab, rule: str) -> str:
    same = same_rule(rule)
    rows = []
    for planner in (MASPRM.rollouts, f"{MASPRM.rollouts},same={rule}"):
        nodes = plain = twins = blind = count = 0
        for item in lab.training_trees(lab.home, planner):
            depth = Dynamics(item.mas).max_depth
            found = mining.pairs(item.tree, depth)
            plain += len(found)
            twins += sum(same(pair.chosen.state.text, pair.rejected.state.text) for pair in found)
            blind += len(mining.pairs(item.tree, depth, same=same))
            nodes += len(item.tree.parents)
            count += 1
        rows.append(
            (planner, f"{nodes / count:.1f}", f"{plain / count:.2f}", percent(twins / plain), f"{blind / count:.2f}")
        )
    header = (
        "training search",
        "nodes per tree",
        "pairs per tree",
        "duplicate pairs, %",
        "pairs per tree with the rule",
    )
    return markdown_table(header, rows)


if __name__ == "__main__":
    command(run, "duplicates")
