"""Labels and pairs: exactly the paper's, on trees built by hand; spread, split and exported as promised."""

from __future__ import annotations

from collections import Counter

import pytest
from grove import MODEL, chain, grove, grow, other_graph, random_tree
from hypothesis import given
from hypothesis import strategies as st

from mas_gym.errors import ConfigError, DataError, UnknownNameError
from mas_gym.systems.dynamics import Dynamics
from mas_gym.tasks.base import RULES, normalize_message, rule_of, same_after_opening, same_rule
from rewardmodels import LabeledTree, collect, histogram, outcomes, pairs, pointwise, split
from rewardmodels.data.mining import Pair, target
from search import Tree

MAS = MODEL.mas
D = MODEL.max_depth


def named(found: list[Pair]) -> list[tuple[str, str, float, int]]:
    return [(p.chosen.state.text, p.rejected.state.text, p.margin, p.depth) for p in found]


def hand_tree() -> Tree:
    """Ties, duplicates, unvisited children, values beyond 1 and branches of unequal depth, all in one tree."""
    tree = Tree(MODEL.initial_state("q"))
    tree.visits[0], tree.totals[0] = 10, 2.0
    a = grow(tree, 0, "a", 5, 5.0)
    grow(tree, 0, " A. ", 4, -4.0)  # a duplicate of "a" except for case and marks, with fewer visits
    b = grow(tree, 0, "b", 2, 0.0)
    grow(tree, 0, "c", 3, 0.0)  # ties with b
    grow(tree, 0, "never", 0, 0.0)
    aa = grow(tree, a, "aa", 3, 4.5)  # backed-up sum beyond N: clipped
    grow(tree, a, "ab", 2, -1.0)
    grow(tree, b, "ba", 1, -1.0)
    aaa = grow(tree, aa, "aaa", 3, 1.0)
    grow(tree, aaa, "18", 2, 2.0)
    grow(tree, aaa, "17", 1, -1.0)
    grow(tree, aaa, "16", 0, 0.0)
    return tree


def test_process_targets_are_the_clipped_means_of_visited_nodes() -> None:
    tree = hand_tree()
    visited = [node for node in range(1, len(tree.parents)) if tree.visits[node]]
    assert [(tree.states[node].text, target(tree, node)) for node in visited] == [
        *(("a", 1.0), (" A. ", -1.0), ("b", 0.0), ("c", 0.0), ("aa", 1.0), ("ab", -0.5), ("ba", -1.0)),
        *(("aaa", 1 / 3), ("18", 1.0), ("17", -1.0)),
    ]


def test_pairs_of_a_small_tree_equal_a_hand_computation() -> None:
    # Root: a (1.0) over b and c, which tie at 0. Node a: aa over ab. Node b has one child. Node aaa: 18 over 17.
    expected = [("a", "b", 1.0, 0), ("aa", "ab", 1.5, 1), ("18", "17", 2.0, 3), ("a", "c", 1.0, 0)]
    assert named(pairs(hand_tree(), D)) == expected


def test_pointwise_mining_uses_only_paths_to_visited_terminal_states() -> None:
    ends = [("18", 1.0), ("17", -1.0)]
    found = [(t.state.text, t.target) for t in pointwise(hand_tree())]
    assert found == [("a", 1.0), ("aa", 1.0), ("aaa", 1 / 3), *ends]
    assert [(t.state.text, t.target) for t in outcomes(hand_tree())] == ends


def test_pointwise_mining_removes_exact_duplicates() -> None:
    tree = Tree(MODEL.initial_state("q"))
    for _ in range(2):
        node = 0
        for text in ("a", "b", "c", "18"):
            node = grow(tree, node, text, 1, 1.0)
    assert len(pointwise(tree)) == 4
    assert len(outcomes(tree)) == 1


def test_terminal_children_of_uncertain_value_are_excluded() -> None:
    tree = Tree(MODEL.initial_state("q"))
    node = 0
    for text in ("a", "b", "c", "18"):
        node = grow(tree, node, text, 2, 0.0)
    assert pointwise(tree) == [] == outcomes(tree)


def family(values: list[float], visits: int = 1) -> Tree:
    tree = Tree(MODEL.initial_state("q"))
    tree.visits[0] = len(values)
    for i, value in enumerate(values):
        grow(tree, 0, f"m{i}", visits, value * visits)
    return tree


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.5], []),
        ([0.5, 0.5], []),
        ([0.2, 0.9], [("m1", "m0")]),
        ([1, -1, -1], [("m0", "m1"), ("m0", "m2")]),
        ([1, 1, -1], [("m0", "m2"), ("m1", "m2")]),
        ([1, 0.5, -1], [("m0", "m2"), ("m1", "m2")]),
        ([1, 1, 0, 0], [("m0", "m2"), ("m0", "m3"), ("m1", "m2"), ("m1", "m3")]),
    ],
)
def test_small_families_are_split_at_the_widest_gap(values: list[float], expected: list[tuple[str, str]]) -> None:
    assert [(a, b) for a, b, _, _ in named(pairs(family(values), D))] == expected


def test_large_families_use_four_top_and_four_bottom_siblings() -> None:
    found = pairs(family([i / 10 for i in range(11)]), D, limit=100)
    assert {p.chosen.state.text for p in found} == {"m10", "m9", "m8", "m7"}
    assert {p.rejected.state.text for p in found} == {"m0", "m1", "m2", "m3"}
    assert len(found) == 16


@given(st.lists(st.integers(-4, 4), min_size=1, max_size=14))
def test_top_and_bottom_do_not_overlap_and_ties_form_no_pair(values: list[int]) -> None:
    found = pairs(family([v / 4 for v in values]), D, limit=1000)
    top, bottom = ({p[side].state.text for p in found} for side in (0, 1))
    assert not top & bottom
    assert len(top) <= 4 and len(bottom) <= 4
    assert all(p.margin > 0 for p in found)
    assert bool(found) == (len(set(values)) > 1)


def test_last_step_pairs_contain_only_terminal_children() -> None:
    model = Dynamics(other_graph())
    tree = Tree(model.initial_state("q"))
    for text, value in (("18", 1.0), ("17", -1.0)):
        node = grow(tree, 0, text, 1, value, model)
        tree.first[node] = 0  # as if the node were not known to be terminal
    assert pairs(tree, model.max_depth) == []
    assert len(pairs(tree, model.max_depth + 1)) == 1


def bushy() -> Tree:
    """Three children at every node, all with different values, so that every family has pairs."""
    tree = Tree(MODEL.initial_state("q"))
    tree.visits[0] = 81
    level = [0]
    for depth in range(D):
        nodes = []
        for parent in level:
            for k, value in enumerate((1.0, 0.0, -1.0)):
                visits = 3 ** (D - 1 - depth) + (parent == level[0])
                nodes.append(grow(tree, parent, f"{depth} {k}", visits, value * visits))
        level = nodes
    return tree


def test_pair_limit_is_spread_over_depths_and_parents() -> None:
    found = pairs(bushy(), D)
    assert len(found) == 8
    assert Counter(p.depth for p in found) == {0: 2, 1: 2, 2: 2, 3: 2}
    for depth in range(1, D):
        assert len({p.chosen.state.parent for p in found if p.depth == depth}) == 2


def test_without_pair_limit_every_family_contributes() -> None:
    assert len(pairs(bushy(), D, limit=10_000)) == 2 * (1 + 3 + 9 + 27)


@pytest.mark.parametrize(
    ("one", "two"), [("Work: 3+4.", "work:  3+4"), ("A\tb", "a b"), ("\uff11\uff18", "18"), ("18.", "18"), (" x ", "x")]
)
def test_formatting_variants_are_merged(one: str, two: str) -> None:
    assert normalize_message(one) == normalize_message(two)


@pytest.mark.parametrize(("one", "two"), [("3*4", "34"), ("-3", "3"), ("(A)", "(B)"), ("1.8", "18")])
def test_different_actions_are_not_merged(one: str, two: str) -> None:
    assert normalize_message(one) != normalize_message(two)


def worded_tree() -> Tree:
    """Two plans, each under two opening words."""
    tree = Tree(MODEL.initial_state("q"))
    tree.visits[0] = 10
    plans = (("Plan: + 2.", 4, 4.0), ("Steps: + 2.", 1, -1.0), ("Plan: - 2.", 2, -2.0), ("Path: - 2.", 3, -2.7))
    for text, visits, total in plans:
        grow(tree, 0, text, visits, total)
    return tree


def test_rule_merges_duplicate_siblings() -> None:
    assert [p[:2] for p in named(pairs(worded_tree(), D))] == [
        ("Plan: + 2.", "Steps: + 2."),
        ("Plan: + 2.", "Plan: - 2."),
        ("Plan: + 2.", "Path: - 2."),
    ]
    # The most visited message of each plan represents it.
    assert named(pairs(worded_tree(), D, same=same_after_opening)) == [("Plan: + 2.", "Path: - 2.", 1.9, 0)]


def test_mining_uses_the_tasks_rule_or_a_given_rule() -> None:
    trees = [LabeledTree(worded_tree(), MAS, task, "p") for task in ("arithmetic", "gsm8k")]
    assert [len(collect([tree], "pairs", same="text")) for tree in trees] == [3, 3]
    assert [len(collect([tree], "pairs")) for tree in trees] == [1, 3]
    assert len(collect(trees, "pairs", same=lambda a, b: a[:4] == b[:4])) == 4


@pytest.mark.parametrize("rule", RULES)
@given(st.lists(st.text(max_size=8) | st.sampled_from(["Plan: + 2.", "plan: + 2", "Path: + 2", ":", "a:"]), max_size=4))
def test_rules_are_equivalence_relations(rule: str, texts: list[str]) -> None:
    same = same_rule(rule)
    for a in texts:
        assert same(a, a)
        for b in texts:
            assert same(a, b) == same(b, a)
            assert all(same(a, c) for c in texts if same(a, b) and same(b, c))


@pytest.mark.parametrize(("one", "two"), [("CORRECT", "INCORRECT"), ("1: 2", "3: 2"), ("Final Answer: 4", "4")])
def test_opening_rule_ignores_at_most_one_word_before_a_colon(one: str, two: str) -> None:
    assert not same_after_opening(one, two)


def test_unknown_rules_are_rejected() -> None:
    assert (rule_of("arithmetic"), rule_of("gsm8k")) == ("opening", "text")
    with pytest.raises(UnknownNameError, match="expected one of text, opening"):
        same_rule("label")
    with pytest.raises(ConfigError, match="got int"):
        same_rule(3)  # type: ignore[arg-type]


def test_mining_is_deterministic() -> None:
    assert collect(grove(), "pairs").fingerprint() == collect(grove(), "pairs").fingerprint()


def test_rows_contain_their_source() -> None:
    [row] = collect([LabeledTree(family([1.0, -1.0]), MAS, "arithmetic", "p1", 3)], "pairs").examples
    assert (row.task, row.problem_id, row.mas, row.depth, row.agent) == ("arithmetic", "p1", "rpsv", 0, "Reader")
    assert (row.chosen_target, row.rejected_target, row.margin) == (1.0, -1.0, 2.0)
    assert "".join(row.chosen).endswith("0>1: m0\n1")
    assert row.rejected is not None and "".join(row.rejected).endswith("0>1: m1\n1")


def test_histogram_counts_by_depth_and_agent() -> None:
    data = collect([LabeledTree(bushy(), MAS, "arithmetic", "p", 0)], "pairs")
    assert histogram(data) == {
        "depth": {"0": 2, "1": 2, "2": 2, "3": 2},
        "agent": {"Reader": 2, "Planner": 2, "Solver": 2, "Verifier": 2},
    }


def test_split_holds_out_problems() -> None:
    trees = [*grove(), *(tree._replace(seed=8) for tree in grove())]
    data = collect(trees, "pairs")
    learned, held = split(data, 0.25)
    problems = [{row.problem_id for row in side.examples} for side in (learned, held)]
    assert not problems[0] & problems[1]
    assert 0.1 < len(problems[1]) / len(problems[0] | problems[1]) < 0.4
    assert len(learned) + len(held) == len(data)


def test_split_of_a_problem_is_independent_of_other_problems() -> None:
    whole = {row.problem_id for row in split(collect(grove(), "points"), 0.25)[1].examples}
    data = collect(grove()[:20], "pairs")
    part = {row.problem_id for row in split(data, 0.25)[1].examples}
    assert part == whole & {row.problem_id for row in data.examples} != set()


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5])
def test_held_out_share_must_be_between_0_and_1(share: float) -> None:
    with pytest.raises(ConfigError, match="between 0 and 1"):
        split(collect(grove(), "pairs"), share)


def test_split_of_one_problem_is_rejected() -> None:
    with pytest.raises(DataError, match="at least two problems"):
        split(collect([random_tree(1)], "points"))


def test_mining_without_visited_trees_is_rejected() -> None:
    with pytest.raises(DataError, match="no tree"):
        collect([], "pairs")
    with pytest.raises(DataError, match="no pairs in 1 trees"):
        collect([LabeledTree(Tree(chain([])), MAS, "arithmetic", "p")], "pairs")


def ended(reward: float, name: str) -> LabeledTree:
    tree = Tree(MODEL.initial_state(name))
    node = 0
    for text in ("a", "b", "c", "d"):
        node = grow(tree, node, text, 1, reward)
    return LabeledTree(tree, MAS, "arithmetic", name)


@pytest.mark.parametrize(
    ("reward", "which", "remedy"), [(1.0, "only successes", "harder"), (-1.0, "only failures", "easier")]
)
def test_trees_with_one_outcome_are_rejected_with_a_suggested_fix(reward: float, which: str, remedy: str) -> None:
    trees = [ended(reward, f"problem-{i}") for i in range(7)]
    with pytest.raises(DataError, match=rf"7 with {which} \(problem-0, .*\.\.\.\)") as error:
        collect(trees, "pairs")
    assert "solve only sometimes" in str(error.value)
    with pytest.raises(DataError, match=f"every outcome is .*{which} .*{remedy} problems"):
        collect(trees, "outcomes")


def test_different_graphs_with_one_name_are_rejected() -> None:
    from dataclasses import replace

    other = random_tree(1, model=Dynamics(replace(other_graph(), name="rpsv")))
    with pytest.raises(DataError, match="both called 'rpsv'"):
        collect([random_tree(0), other], "points")


def test_data_of_two_tasks_can_be_combined() -> None:
    both = collect([*grove(6), *(tree._replace(task="ordering") for tree in grove(6))], "points")
    assert len(both) == 2 * len(collect(grove(6), "points")) and both.trees == 12
    assert {row.task for row in both.examples} == {"arithmetic", "ordering"}
