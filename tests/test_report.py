"""Intervals, tables, pictures and the tree page."""

import base64
import csv
import hashlib
import io
import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import search
from benchmarks.nested_bootstrap import nested_bootstrap
from mas_gym.errors import ConfigError
from mas_gym.internal.text import one_line
from mas_gym.policies.scripted import ScriptedPolicy
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.loading import load_mas
from mas_gym.systems.state import Action
from mas_gym.tasks import Problem, ProblemTask
from search.compare import Comparison
from search.pages import tree_page, write_tree_page
from search.results.intervals import (
    FEWEST_PROBLEMS,
    Difference,
    accuracy_interval,
    mean_interval,
    mean_std,
    paired_difference,
    wilson,
)
from search.results.outcomes import Outcome
from search.results.plots import save_tradeoff, tradeoff_figure
from search.results.summary import ResultRow, summarize
from search.results.table_formats import to_markdown
from search.tree import Tree

shares = st.lists(st.sampled_from([0.0, 1 / 3, 0.5, 2 / 3, 1.0]), min_size=1, max_size=60)


# Intervals


@pytest.mark.parametrize(
    ("right", "asked", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662)],
)
def test_interval_of_one_seed_is_the_wilson_interval(right: int, asked: int, low: float, high: float) -> None:
    interval = accuracy_interval([1.0] * right + [0.0] * (asked - right), asked)
    assert interval == pytest.approx((low, high), abs=5e-5)


def test_seeds_with_equal_results_do_not_narrow_the_interval() -> None:
    values = [1.0] * 30 + [0.0] * 20
    assert accuracy_interval(values, 150) == pytest.approx(accuracy_interval(values, 50), abs=0.01)


def test_seeds_with_different_results_narrow_the_interval() -> None:
    alike, varied = accuracy_interval([1.0] * 30 + [0.0] * 15, 135), accuracy_interval([1.0, 2 / 3, 1 / 3] * 15, 135)
    assert varied.high - varied.low < alike.high - alike.low


@given(shares, st.integers(1, 2))
def test_accuracy_interval_contains_the_mean_and_is_in_range(values: list[float], seeds: int) -> None:
    low, high = accuracy_interval(values, seeds * len(values))
    assert 0 <= low <= np.mean(values) + 1e-12
    assert np.mean(values) - 1e-12 <= high <= 1
    assert high > low


def test_wilson_without_problems_returns_the_whole_range() -> None:
    assert wilson([]) == (0.0, 1.0)


@pytest.mark.parametrize("values", [[1.5], [-0.1], [math.nan], [[0.5]]])
def test_wilson_rejects_values_outside_0_to_1(values: list[float]) -> None:
    with pytest.raises(ConfigError, match=r"one number in \[0, 1\] per problem"):
        wilson(values)


@given(
    st.dictionaries(
        st.text(max_size=3), st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 0.5, 1.0])), min_size=1
    )
)
def test_paired_difference_is_antisymmetric_and_its_interval_contains_the_mean(
    pairs: dict[str, tuple[float, float]],
) -> None:
    a = {key: left for key, (left, _) in pairs.items()}
    b = {key: right for key, (_, right) in pairs.items()}
    there, back = paired_difference(a, b), paired_difference(b, a)
    assert (there.mean, there.low, there.high) == pytest.approx((-back.mean, -back.high, -back.low))
    assert -1 <= there.low <= there.mean + 1e-12
    assert there.mean - 1e-12 <= there.high <= 1
    assert there.high > there.low
    assert there.problems == len(pairs)


def test_pairing_removes_the_variance_between_problems() -> None:
    # Half of the problems are hard for both; b is right on one in ten more.
    a = {str(i): float(i % 2 == 0) for i in range(200)}
    b = {key: 1.0 if int(key) % 10 == 1 else value for key, value in a.items()}
    gap = paired_difference(b, a)
    assert gap.mean == pytest.approx(0.1)
    assert gap.significant
    assert wilson(list(b.values())).low < wilson(list(a.values())).high


def simulated(problems: int, seeds: int, *rates: float, runs: int = 1000) -> list[Difference]:
    """Return the differences of two planners with these rates of right answers, in repeated runs."""
    rng = np.random.default_rng(0)

    def answers(rate: float) -> Any:
        return rng.binomial(seeds, rate, problems) / seeds

    gaps = [answers(rates[0]) - answers(rates[1]) for _ in range(runs)]
    return [Difference(gap.mean(), *mean_interval(gap, -1.0, 1.0), problems) for gap in gaps]


@pytest.mark.parametrize("problems", [2, 5, 10, 20, 100])
@pytest.mark.parametrize("seeds", [1, 3])
def test_identical_planners_are_rarely_reported_as_different_for_any_number_of_problems(
    problems: int, seeds: int
) -> None:
    found = [simulated(problems, seeds, p, p) for p in (0.05, 0.5, 0.95)]
    assert max(sum(gap.significant for gap in gaps) / len(gaps) for gaps in found) <= 0.06


@pytest.mark.parametrize("problems", [5, 20, 100])
@pytest.mark.parametrize("pair", [(1.0, 0.95), (1.0, 0.8), (0.05, 0.0), (0.98, 0.02)])
def test_interval_of_the_paired_difference_covers_the_true_value_for_accuracies_near_0_and_1(
    problems: int, pair: tuple[float, float]
) -> None:
    gaps, true = simulated(problems, 1, *pair), pair[0] - pair[1]
    assert sum(gap.low <= true + 1e-12 and gap.high >= true - 1e-12 for gap in gaps) / len(gaps) >= 0.93


def test_paired_difference_reports_too_few_problems() -> None:
    better, worse = ({str(i): share for i in range(FEWEST_PROBLEMS)} for share in (1.0, 0.0))
    assert paired_difference(better, worse).verdict == "excludes 0"
    del better["0"]
    assert paired_difference(better, worse).verdict == "too few problems"
    assert paired_difference(better, worse).low < 0 < paired_difference(better, worse).high


@pytest.mark.parametrize(("problems", "student"), [(5, 2.7764), (6, 2.5706), (10, 2.2622), (100, 1.9842)])
def test_mean_interval_of_equal_values_uses_student_t_quantiles(problems: int, student: float) -> None:
    half = student * math.sqrt(2) / (problems + 2)
    assert mean_interval(np.zeros(problems), -1, 1) == pytest.approx((-half, half), rel=2e-3)


def test_paired_difference_compares_only_common_problems() -> None:
    gap = paired_difference({"a": 1.0, "b": 1.0}, {"b": 0.0, "c": 1.0})
    assert (gap.mean, gap.problems) == (1.0, 1)
    with pytest.raises(ConfigError, match="none in common"):
        paired_difference({"a": 1.0}, {"b": 1.0})


def trained(level: float, spread: float, rng: np.random.Generator, count: int = 3) -> list[dict[str, float]]:
    """Return the results of several trainings, whose true accuracies differ."""
    levels = np.clip(level + spread * rng.standard_normal(count), 0, 1)
    return [{str(i): float(hit) for i, hit in enumerate(rng.random(120) < one)} for one in levels]


def test_interval_over_training_runs_is_wider_if_the_runs_differ() -> None:
    rng = np.random.default_rng(3)
    for spread, ratio in ((0.0, 1.6), (0.15, math.inf)):
        a, b = trained(0.7, spread, rng), trained(0.6, spread, rng)
        means = [{key: sum(one[key] for one in side) / 3 for key in side[0]} for side in (a, b)]
        nested, plain = nested_bootstrap(a, b), paired_difference(*means)
        assert nested.mean == pytest.approx(plain.mean)
        width = (nested.high - nested.low) / (plain.high - plain.low)
        assert 1 <= width < ratio and (spread == 0.0 or width > 1.6)


def test_nested_bootstrap_covers_training_variance() -> None:
    rng = np.random.default_rng(11)
    covered = {"nested": 0, "plain": 0}
    for trial in range(100):
        a, b = trained(0.7, 0.06, rng), trained(0.6, 0.06, rng)
        gaps = {"nested": nested_bootstrap(a, b, resamples=400, seed=trial)}
        means = [{key: sum(one[key] for one in side) / 3 for key in side[0]} for side in (a, b)]
        gaps["plain"] = paired_difference(*means)
        for name, gap in gaps.items():
            covered[name] += gap.low <= 0.1 <= gap.high
    assert covered["nested"] >= 85 > covered["plain"]


def test_nested_bootstrap_of_one_training_run_equals_the_paired_difference() -> None:
    [a], [b] = trained(0.7, 0.0, np.random.default_rng(1), 1), trained(0.6, 0.0, np.random.default_rng(2), 1)
    assert nested_bootstrap([a], [b])[:3] == pytest.approx(paired_difference(a, b)[:3], abs=0.01)
    back = nested_bootstrap([b], [a])
    assert back.mean == -nested_bootstrap([a], [b]).mean


def test_nested_bootstrap_rejects_invalid_data() -> None:
    with pytest.raises(ConfigError, match="at least one training run on each side, got 0 and 1"):
        nested_bootstrap([], [{"a": 1.0}])
    with pytest.raises(ConfigError, match="none in common"):
        nested_bootstrap([{"a": 1.0}, {"b": 1.0}], [{"a": 1.0}])


def test_mean_and_std_are_computed_over_seeds() -> None:
    assert mean_std([1.0, 2.0, 3.0]) == (2.0, 1.0)
    assert mean_std([4.0]) == (4.0, None)
    assert math.isnan(mean_std([])[0])


# Rows and tables


def outcomes() -> list[Outcome]:
    made = []
    for seed in (14, 24, 42):
        for i in range(10):
            made.append(Outcome("single", "", seed, f"p{i}", i < 4, 1 if i < 4 else None, 1, 100 + seed, 4, 0))
            rank = 1 if i < 6 else 3 if i < 8 else None
            error = "PolicyError: timed out" if i == 9 else None
            made.append(
                Outcome("mcts:10,3", "masprm", seed, f"p{i}", i < 6, rank, 9, 2000 * (error is None), 69, 69, error)
            )
    return made


def test_rows_average_over_seeds_and_count_failures() -> None:
    single, mcts = summarize(outcomes())
    assert single.hits == {1: (pytest.approx(0.4), pytest.approx(0.0))}
    assert single.tokens == (pytest.approx(100 + 80 / 3), pytest.approx(np.std([14, 24, 42], ddof=1)))
    assert {k: spread.mean for k, spread in mcts.hits.items()} == pytest.approx({1: 0.6, 3: 0.8, 5: 0.8})
    assert mcts.tokens.mean == 2000
    assert mcts.failures == {"PolicyError: timed out": 3}
    assert (mcts.problems, mcts.searches, mcts.seeds) == (10, 30, (14, 24, 42))


def test_one_seed_has_no_standard_deviation() -> None:
    [row] = summarize([Outcome("single", "", 42, "p", True, 1, 1, 10, 4, 0)])
    assert row.hits[1] == (1.0, None)
    assert row.interval.low < 1


def test_hit_at_k_does_not_decrease_with_k() -> None:
    outcome = Outcome("mcts:10,3", "", 0, "p", correct=True, hit_rank=7, candidates=9)
    assert [outcome.hit(k) for k in (1, 3, 5)] == [True, True, True]


def test_curve_contains_the_accuracy_at_smaller_budgets() -> None:
    # Answers that turn right at 60 tokens for one problem, and wrong at 80 for the other.
    one = Outcome("mcts:10,3", "", 0, "p", True, 1, 4, 100, anytime=((20, False), (60, True)))
    two = Outcome("mcts:10,3", "", 0, "q", False, 2, 4, 200, anytime=((30, True), (80, False)))
    [row] = summarize([one, two])
    hits = {point.tokens: point.hit for point in row.curve}
    assert [hit for spent, hit in hits.items() if spent < 50] == [0.5] * sum(spent < 50 for spent in hits)
    assert max(hits.values()) == 1.0
    assert row.curve[-1][:2] == (row.tokens.mean, row.hits[1].mean) == (150, 0.5)
    assert list(hits) == sorted(hits)


class TwoTries(search.Planner):
    """Sample two messages of a system with one agent; return the second one."""

    needs_critic = False

    def plan(self, model: Any, root: Any, rng: Any) -> Any:
        curve = []
        for calls in (1, 2):
            [[one]] = yield [search.Propose(root, n=1)]
            state = model.transition(root, one.action)
            spent = one.tokens + (curve[-1].generated_tokens if curve else 0)
            curve.append(search.AnytimePoint(calls, spent, state))
        return search.Plan((search.Candidate(state),), anytime=tuple(curve))


def test_own_planner_that_states_its_answers_has_a_curve_in_the_plot() -> None:
    task = ProblemTask.of([Problem(f"p{i}", f"What is {i}?", "1") for i in range(4)])
    policy = ScriptedPolicy(lambda request, seed: f"Final Answer: {seed % 2}")
    table = search.compare([TwoTries()], task, mas="single", policy=policy, seeds=[1])
    [row] = table.rows
    assert len(row.curve) > 1
    lines = tradeoff_figure(table.rows).axes[0].lines
    assert any(len(line.get_xdata()) == len(row.curve) for line in lines)  # type: ignore[arg-type]


def test_constant_answers_give_no_curve() -> None:
    steady = Outcome("sc:5", "", 0, "p", True, 1, 5, 100, anytime=((20, True),))
    unknown = [Outcome("sbs:5,1", "", 0, f"p{i}", True, 1, 1, 100) for i in range(3)]
    assert [row.curve for row in summarize([steady, *unknown])] == [(), ()]


def rendered(rows: list[ResultRow], width: int) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(Comparison(tuple(rows), title="Arithmetic").show(width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [30, 40, 60, 80, 100, 160])
def test_table_fits_any_terminal_width(width: int) -> None:
    text = rendered(summarize(outcomes()), width)
    assert max(map(len, text.splitlines())) <= width
    for needed in ("mcts:10,3", "60.0", "40.0", "Failed", "timed"):
        assert needed in text


def test_caption_explains_only_the_columns_shown() -> None:
    rows = summarize(outcomes())
    described = {width: "reward calls" in " ".join(rendered(rows, width).split()) for width in range(50, 161)}
    assert set(described.values()) == {True, False}
    for width, explained in described.items():
        body = rendered(rows, width).partition("Hit in %")[0]
        assert (re.search(r"\bRC\b", body) is not None) == explained, width


def test_report_without_outcomes_shows_that_no_search_has_ended() -> None:
    assert "No search has ended" in rendered([], 80)


def test_row_with_only_failed_searches_is_shown() -> None:
    rows = summarize([Outcome("single", "", 1, "p", error="PolicyError: gone")])
    assert "PolicyError: gone" in rendered(rows, 100)
    assert json.loads(Comparison(tuple(rows)).to_json())["rows"][0]["tokens"] is None


def test_markup_in_names_and_reasons_is_escaped() -> None:
    rows = summarize([Outcome("x[red]", "[/]", 1, "p", error="[bold]boom[/bold] [link=x]")])
    text = rendered(rows, 120)
    assert "x[red]" in text
    assert "[bold]boom[/bold] [link=x]" in text


def test_csv_json_and_markdown_contain_the_same_numbers() -> None:
    rows = summarize(outcomes())
    lines = list(csv.DictReader(io.StringIO(Comparison(tuple(rows)).to_csv())))
    document = json.loads(Comparison(tuple(rows), meta={"task": "arithmetic"}).to_json())
    assert [line["planner"] for line in lines] == ["single", "mcts:10,3"]
    assert float(lines[1]["hit@1"]) == document["rows"][1]["hit@1"] == pytest.approx(0.6)
    assert document["meta"] == {"task": "arithmetic"}
    assert document["rows"][0]["shares"]["p0"] == 1.0
    assert document["differences"][0]["mean"] == pytest.approx(0.2)
    assert "| mcts:10,3 | masprm | 60.0 ± 0.0 |" in to_markdown(rows)


# The picture


def test_plot_format_follows_the_file_extension(tmp_path: Path) -> None:
    rows = summarize(outcomes())
    assert save_tradeoff(rows, tmp_path / "deep" / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in save_tradeoff(rows, tmp_path / "plot.svg").read_text(encoding="utf-8")


def texts_of(figure: Any) -> list[str]:
    [axes] = figure.axes
    return [text.get_text() for text in axes.texts if text.get_text()]


def test_plot_of_few_rows_names_each_beside_its_point_and_has_no_legend() -> None:
    rows = summarize([Outcome(f"bon:{n}", "orm", 1, "p", correct=True, tokens=50 * n) for n in range(1, 9)])
    figure = tradeoff_figure(rows)
    assert set(texts_of(figure)) >= {row.label for row in rows} and not figure.legends


def test_plot_of_many_rows_names_each_search_and_has_a_legend_of_critics() -> None:
    rows = summarize(
        [
            Outcome(f"bon:{n}", critic, 1, "p", n % 2 > 0, tokens=50 * n)
            for n in range(1, 17)
            for critic in ("orm", "prm")
        ]
    )
    figure = tradeoff_figure(rows)
    [axes], [legend] = figure.axes, figure.legends
    said = texts_of(figure)
    assert all(said.count(row.planner) == 2 for row in rows)
    assert {text.get_text() for text in legend.get_texts()} == {"no critic", "orm", "prm"}
    assert legend.get_window_extent().height < axes.get_window_extent().height / 3


def test_plot_has_one_color_per_search_and_one_marker_per_critic() -> None:
    rows = summarize([Outcome(f"bon:{n}", critic, 1, "p", True, tokens=n) for n in (1, 2) for critic in ("a", "b")])
    [axes] = tradeoff_figure(rows).axes
    drawn = [(line.get_color(), line.get_marker()) for line in axes.lines if line.get_marker() != "None"]
    assert len(set(drawn)) == 4 and len({color for color, _ in drawn}) == len({marker for _, marker in drawn}) == 2


def test_plot_moves_intervals_that_cover_each_other_apart() -> None:
    rows = summarize(Outcome("mcts:4", critic, 1, "p", True, tokens=100) for critic in ("a", "b", "c"))
    figure = tradeoff_figure(rows)
    points = [line for line in figure.axes[0].lines if line.get_marker() != "None"]
    drawn = sorted(float(line.get_transform().transform(line.get_xydata())[0][0]) for line in points)
    assert min(b - a for a, b in pairwise(drawn)) > 4 * figure.dpi / 72


def test_plot_explains_its_lines() -> None:
    [row] = summarize([Outcome("mcts:4", "orm", 1, "p", True, tokens=100, anytime=((20, False), (60, True)))])
    assert "bars: 95% intervals; lines: if stopped earlier" in texts_of(tradeoff_figure([row]))
    assert "bars: 95% intervals" in texts_of(tradeoff_figure([row], cost="agent_calls"))


@pytest.mark.parametrize("name", ["$", "a$b$", "$\\frac{1$", "_hidden", "x" * 300, "two\nlines", "\\$5$"])
def test_plot_shows_any_name_as_text(name: str, tmp_path: Path) -> None:
    rows = summarize([Outcome(name, name, 1, "p", correct=True, tokens=50)])
    figure = tradeoff_figure(rows, title=name)
    figure.savefig(tmp_path / "plot.svg")
    drawn = [text._preprocess_math(text.get_text()) for text in figure.axes[0].texts]
    assert not any(math for _, math in drawn)
    assert any(text.startswith(one_line(name)[:20]) for text, _ in drawn)


def uneven_rows() -> list[ResultRow]:
    """Return a row over 4 problems, one over 2 of them, and one whose seeds ended 4 and 2."""
    made = [Outcome("single", "", 1, f"p{i}", i > 0, tokens=9) for i in range(4)]
    made += [Outcome("sc:2", "", 1, f"p{i}", True, tokens=9) for i in range(2)]
    made += [
        Outcome("bon:2", "", seed, f"p{i}", True, tokens=9) for seed in (1, 2) for i in range(4 if seed == 1 else 2)
    ]
    return summarize(made)


def test_rows_with_different_problem_sets_are_marked_in_every_format() -> None:
    rows, note = uneven_rows(), "ran on different sets of problems"
    table = Comparison(tuple(rows), baseline="single")
    for text in (rendered(rows, 160), rendered(rows, 40), table.to_markdown(), table.to_latex(), table._repr_html_()):
        assert all(mark in text for mark in ("4 S1", "2 S2", "4 S1*", "Problems"))
        assert note in " ".join(text.split())
    lines = list(csv.DictReader(io.StringIO(table.to_csv())))
    for found in (lines, json.loads(table.to_json())["rows"]):
        sets = [row["problem_set"] for row in found]
        assert sets[0] == sets[2] != sets[1]
        assert [str(row["uneven_seeds"]) for row in found] == ["False", "False", "True"]
    assert any("rows of different problems" in text for text in texts_of(tradeoff_figure(rows)))
    assert "too few problems, 2 common problems" in rendered(rows, 160)


def test_rows_over_the_same_problems_have_no_problem_set_label() -> None:
    rows = summarize(outcomes())
    for text in (rendered(rows, 160), to_markdown(rows), Comparison(tuple(rows)).to_latex()):
        assert "S1" not in text and "Problems" not in text


def test_plot_rejects_unknown_formats_and_empty_runs(tmp_path: Path) -> None:
    rows = summarize(outcomes())
    with pytest.raises(ConfigError, match=r"plot\.xyz: expected a name that ends in one of"):
        save_tradeoff(rows, tmp_path / "plot.xyz")
    with pytest.raises(ConfigError, match="nothing to plot"):
        save_tradeoff(summarize([Outcome("single", "", 1, "p", error="boom")]), tmp_path / "plot.png")


# The page

HOSTILE = [
    "</script><script>document.title='OWNED'</script>",
    "<!--<script>",
    "<img src=x onerror=\"document.title='OWNED'\">",
    "\u202eright to left",
    "lone \ud800 surrogate",
    "\x1b[31m\x00 control",
    "$data ${script} $$",
    "x" * 1_000_000,
    " \n ",
]


def planned(question: str, agents: Sequence[str], texts: Sequence[str], chain: bool = False) -> search.Plan:
    """A plan with a tree of messages, all replies to the question or each a reply to the one before."""
    parts = [{"name": name, "system_prompt": "-"} for name in agents]
    mas = load_mas({"name": "toy", "agents": parts, "edges": [], "external": True, "max_turns": 10_000})
    dynamics = Dynamics(mas)
    tree = Tree(dynamics.initial_state(question, 0))
    for node, text in enumerate(texts):
        parent = node if chain else 0
        end = mas.sink if node == len(texts) - 1 or not chain else 0
        tree.add(parent, dynamics.transition(tree.states[parent], Action(text, end)), terminal=end == mas.sink)
    last = search.Candidate(tree.states[-1], node=len(tree) - 1, answer="1")
    return search.Plan((last,), tree, answer="1", mas=mas)


def hostile_plan() -> search.Plan:
    plan, evil = planned(HOSTILE[0], [HOSTILE[0], "B"], HOSTILE), HOSTILE[0]
    tree = plan.tree
    assert tree is not None
    tree.visits[:] = [0] + [1] * len(HOSTILE)
    tree.totals[:] = [0.0, math.nan, math.inf] + [0.5] * (len(HOSTILE) - 2)
    ends = [search.Candidate(tree.states[node], None, node, evil, node == 1) for node in (2, 1)]
    return replace(plan, candidates=tuple(ends), answer=evil, correct=False)


def hostile_page() -> str:
    return tree_page(hostile_plan(), {HOSTILE[2]: HOSTILE[0], "problem": HOSTILE[0]}, HOSTILE[2])


def page_data(page: str) -> dict[str, object]:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found
    data: dict[str, object] = json.loads(found[1])
    return data


def test_page_contains_every_message_escaped_in_its_script() -> None:
    page = hostile_page()
    data = page_data(page)
    texts, nodes = data["texts"], data["nodes"]
    assert isinstance(texts, list)
    assert isinstance(nodes, dict)
    assert [texts[i] for i in nodes["text"]] == ["", *(text.replace("\ud800", "\ufffd") for text in HOSTILE)]
    assert nodes["q"][:4] == [None, None, None, 0.5]
    assert page.count("<script") == page.count("</script>") == 2
    assert "<title>&lt;/script&gt;" in page


def test_page_loads_no_resources_and_allows_its_script_by_hash() -> None:
    page = hostile_page()
    script = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)[-1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src &#39;sha256-{digest}&#39;" in page
    assert "default-src &#39;none&#39;" in page
    assert not re.search(r'(src|href)="', page.split("<script id=")[0])
    assert "http" not in script.replace("http-equiv", "")


BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize(
    ("made", "title"),
    [
        pytest.param(hostile_plan, HOSTILE[0], id="hostile"),
        pytest.param(
            partial(planned, "q", ["A"], [f"message {i}" for i in range(9_999)], chain=True),
            "deep",
            id="deep",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_browser_renders_the_page_and_executes_no_message(
    made: Callable[[], search.Plan], title: str, tmp_path: Path
) -> None:
    page = write_tree_page(made(), tmp_path / "tree.html", {"problem": title}, HOSTILE[2])
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-sync",
    ]
    command = [str(BROWSER), *flags, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    shown = title.replace("<", "&lt;").replace(">", "&gt;")
    assert f"<title>{shown}</title>" in dom
    assert 'role="treeitem"' in dom
    assert re.search(r">([\d,]+) of \1 messages<", dom)
