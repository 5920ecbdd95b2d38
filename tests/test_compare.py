"""`search.compare`: rows, paired differences, table formats, equal cost, and rejected arguments."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from search_worlds import HashCritic, chain, problems, talk, talker

import search
from mas_gym.errors import ConfigError, MASGymError
from mas_gym.policies import ScriptedPolicy
from search import Comparison, compare
from search.compare.comparison_runs import named_planners
from search.compare.cost_matching import Match, _next_size
from search.results.intervals import paired_difference
from search.results.outcomes import Outcome
from search.results.plots import frontier
from search.results.summary import summarize
from search.results.table_formats import gap_cells


def table(planners: Any = ("single", "sc:3", "mcts:4,2"), **options: Any) -> Comparison:
    settings: dict[str, Any] = {"mas": chain(3), "policy": talker(), "critics": [HashCritic()], "seeds": [1, 2]}
    return compare(planners, problems(12), **(settings | options))


def test_rows_equal_the_results_of_separate_runs() -> None:
    found = table()
    assert [row.label for row in found.rows] == ["single", "sc:3", "mcts:4,2 + hash"]
    plans = [
        plan for seed in (1, 2) for plan in search.run("sc:3", problems(12), mas=chain(3), policy=talker(), seed=seed)
    ]
    row = found["sc:3"]
    assert row.hits[1].mean == pytest.approx(sum(bool(plan.correct) for plan in plans) / 24)
    assert row.tokens.mean == pytest.approx(sum(plan.usage.generated_tokens for plan in plans) / 24)
    assert row.agent_calls.mean == 9 and row.seconds.mean > 0
    assert row.interval.low < row.hits[1].mean < row.interval.high


def test_differences_are_paired_with_the_baseline() -> None:
    found = table(baseline="mcts:4,2")
    assert found.baseline == "mcts:4,2 + hash"
    gaps = found.differences()
    assert list(gaps) == ["single", "sc:3"]
    assert gaps["sc:3"] == paired_difference(found["sc:3"].shares, found["mcts:4,2"].shares)
    assert gaps["single"].problems == 12


def test_repeated_call_gives_the_same_table_from_the_store(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    first, again = table(store=store), table(store=str(store))
    assert first.to_markdown() == again.to_markdown() == table().to_markdown()
    with search.open_store(store) as opened:
        assert len(opened.runs()) == 6


def test_table_has_every_output_format(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    found = table()
    assert sum(line.startswith("|") for line in found.to_markdown().splitlines()) == 5 + 4
    latex = found.to_latex()
    assert (
        latex.count(r"\\") == 4 + 3 and r"\toprule" in latex and r"$\pm$" in latex and r"\caption{12 problems" in latex
    )
    assert found.to_csv().splitlines()[0].startswith("planner,critic,seeds")
    document = json.loads(found.to_json())
    assert [entry["to"] for entry in document["differences"]] == ["single", "single"]
    frame = found.to_pandas()
    assert isinstance(frame, pandas.DataFrame) and list(frame["planner"]) == ["single", "sc:3", "mcts:4,2"]
    assert frame["difference"].isna().tolist() == [True, False, False]
    text = str(found)
    assert "Hit@1 against single" in text and "mcts:4,2" in text and "\x1b" not in text
    assert repr(found).startswith("<Comparison of 3 rows: single ") and "\n" not in repr(found)
    assert "<table>" in found._repr_html_()
    assert found.plot(tmp_path / "frontier.png").stat().st_size > 1000
    with pytest.raises(ConfigError, match="expected a name that ends in one of"):
        found.plot(tmp_path / "frontier.xyz")


@pytest.mark.parametrize("baseline", ["single", "sc:3"])
def test_files_have_the_paired_differences_from_the_chosen_row(baseline: str) -> None:
    found = table(baseline=baseline)
    tex, markdown = found.to_latex(), found.to_markdown()
    assert tex.count(r"\label{tab:") == 2
    assert f"Hit@1 against {baseline}, in points" in tex and f"Hit@1 against {baseline}, in points" in markdown
    for label, gap in found.differences().items():
        cells = (label, *gap_cells(gap), gap.verdict)
        assert " & ".join(cells) in tex and "| " + " | ".join(cells) + " |" in markdown


def test_names_are_escaped_in_every_format() -> None:
    found = table({"a_b & <i>\x1b[1m|[x](http://x)": "single", "other": "sc:2"})
    assert r"a\_b \& " in found.to_latex() and "<i>" not in found._repr_html_()
    assert (
        r"\<i>\x1b[1m\|[x\](http" in found.to_markdown() and "\x1b" not in str(found) + repr(found) + found.to_latex()
    )


@pytest.mark.parametrize(("match", "unit"), [("calls=24", "agent_calls"), ("tokens=150", "tokens")])
def test_match_resizes_planners_to_equal_cost(match: str, unit: str) -> None:
    planners = ["single", "sc:1", "bon:30", "mcts:3,5", "sbs:2,1", "rebase:4"]
    found = table(planners, match=match, seeds=[1])
    amount = Match.read(match).amount
    assert [part.label for part in found.calibrated] == [row.label for row in found.rows]
    assert found.calibrated[0].setting == ""
    for row, part in list(zip(found.rows, found.calibrated, strict=True))[1:]:
        assert getattr(row, unit).mean == pytest.approx(part.spent)
        # A step of one pass or one more message per state is three to nine calls here.
        assert part.spent == pytest.approx(amount, rel=0.25), part
    assert "in calibration" in str(found)


class Counting(ScriptedPolicy):
    """Remembers the last message of each request."""

    def __init__(self) -> None:
        super().__init__(talk, "counting", 8)
        self.asked: list[str] = []

    def sample(self, requests: Any) -> Any:
        self.asked += [request.messages[-1].content for request in requests for _ in request.seeds]
        return super().sample(requests)

    def identity(self) -> str:
        return "counting"


def test_repeated_match_makes_no_new_calls(tmp_path: Path) -> None:
    policy, store = Counting(), tmp_path / "runs.db"
    options: dict[str, Any] = {"mas": chain(1), "policy": policy, "match": "calls=5", "dev": problems(40)[30:]}
    first = compare(["sc:2", "single"], problems(3), store=store, **options)
    made = len(policy.asked)
    again = compare(["sc:2", "single"], problems(3), store=store, **options)
    assert len(policy.asked) == made > 0
    assert again.calibrated == first.calibrated and again.to_markdown() == first.to_markdown()
    # Calibration searches are in a separate file, so tables of the store do not mix them with others.
    with search.open_store(store) as opened:
        assert sorted(run.searches for run in opened.runs()) == [3, 3]
    assert (tmp_path / "runs.calibration.db").exists()


def test_too_few_calibration_problems_are_reported() -> None:
    few = compare(["sc:2"], problems(3), mas=chain(1), policy=talker(), match="calls=5")
    assert few.calibrated[0].problems == 3
    assert "sizes chosen on 3 problems; with fewer than 30 the costs are uncertain" in str(few)
    enough = compare(["sc:2"], problems(3), mas=chain(1), policy=talker(), match="calls=5", dev=problems(30))
    assert "sizes chosen on 30 problems\n" in str(enough)


class NeedsSteps:
    """Scores its first message, which no outcome critic does; `passes` scales nothing unless it is declared."""

    passes = 1

    def plan(self, model: Any, root: Any, rng: Any) -> Any:
        state = root
        while not model.is_terminal(state):
            [proposals] = yield [search.Propose(state, self.passes)]
            state = model.transition(state, proposals[0].action)
            yield [search.Evaluate([state])]
        return search.Plan.single(state)


class Declared(NeedsSteps):
    size_setting = "passes"


class Choosy(NeedsSteps):
    def for_run(self, critic: Any, training: bool) -> Any:
        if critic is None or critic.terminal_only:
            raise ValueError("it scores steps")
        return self


def test_match_skips_incompatible_pairs() -> None:
    options: dict[str, Any] = {"mas": chain(2), "policy": talker(), "match": "calls=8"}
    critics = {"orm": HashCritic(terminal_only=True), "prm": HashCritic()}
    with pytest.warns(UserWarning, match=r"Declared \+ orm.*every calibration search failed: CriticError"):
        found = compare([Declared(), "sc:1"], problems(3), critics=critics, **options)
    assert [row.label for row in found.rows] == ["Declared 4 + prm", "sc:4"]
    assert [part.setting for part in found.calibrated] == ["passes", "k"]
    found = compare([Choosy()], problems(3), critics=critics, **options)
    assert [(row.label, part.setting) for row, part in zip(found.rows, found.calibrated, strict=True)] == [
        ("Choosy + prm", "")
    ]
    with pytest.raises(ConfigError, match=r"NeedsSteps \+ orm.*every calibration search failed"):
        compare([NeedsSteps()], problems(3), critics={"orm": critics["orm"]}, **options)


def test_match_uses_the_given_calibration_problems() -> None:
    policy = Counting()
    compare(["sc:2"], problems(3), mas=chain(1), policy=policy, match="calls=5", dev=problems(20)[12:])
    assert any("Question 15:" in text for text in policy.asked)
    assert not any("Question 5:" in text for text in policy.asked)


@given(cost=st.floats(0.5, 200), fixed=st.floats(0, 50), amount=st.floats(1, 5000), size=st.integers(1, 50))
def test_size_search_ends_next_to_the_best_size(cost: float, fixed: float, amount: float, size: int) -> None:
    tried: dict[int, float] = {}
    for _ in range(8):
        tried[size] = fixed + cost * size
        size = _next_size(tried, amount)
        assert size >= 1
        if size in tried:
            break
    best = min(tried, key=lambda n: abs(tried[n] - amount))
    possible = min(range(1, 4097), key=lambda n: abs(fixed + cost * n - amount))
    assert abs(tried[best] - amount) <= abs(fixed + cost * possible - amount) + cost


def test_frontier_contains_rows_that_outperform_all_cheaper_rows() -> None:
    costs = {"a": (10, 0.3), "b": (20, 0.3), "c": (20, 0.5), "d": (30, 0.4), "e": (40, 0.9)}
    outcomes = [
        Outcome(name, "", 0, str(i), correct=i < 10 * hit, tokens=cost, agent_calls=1)
        for name, (cost, hit) in costs.items()
        for i in range(10)
    ]
    assert [row.planner for row in frontier(summarize(outcomes))] == ["a", "c", "e"]


def test_planner_with_outcome_values_accepts_an_outcome_critic() -> None:
    found = table(["bon:3,values=outcome"], critics=[HashCritic(terminal_only=True)])
    assert found.rows[0].critic == "hash" and not found.rows[0].failures


def test_planners_that_differ_only_in_values_have_unique_names() -> None:
    specs = ["sc:3,weights=critic", "sc:3,weights=critic,values=outcome"]
    assert list(named_planners(specs)) == specs and list(named_planners(specs[::-1])) == specs[::-1]
    assert list(named_planners([specs[0], specs[0], "bon:3,values=outcome"])) == [specs[0], "bon:3"]


def test_size_settings_of_planners_are_found() -> None:
    loaded = named_planners(["single", "sc:3", "bon:3", "sbs:3,2", "mcts:3", "halving:3", "dvts:2", "rebase:4"])
    sizes = [planner.size_setting for planner in loaded.values()]
    assert sizes == ["", "k", "n", "b2", "n_simulations", "n_simulations", "trees", "width"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"match": "tokens"}, "expected tokens=N, calls=N or usd=X"),
        ({"match": "seconds=3"}, "expected tokens=N, calls=N or usd=X"),
        ({"match": "calls=nan"}, "expected tokens=N, calls=N or usd=X"),
        ({"baseline": "sbs"}, "expected the label of one row"),
        ({"planners": ["mcts:3,2"], "critics": []}, "needs a critic"),
        ({"planners": []}, "at least one planner"),
        ({"planners": [3]}, "plan method"),
        ({"seeds": []}, "at least one seed"),
        ({"critics": [HashCritic(), HashCritic()]}, "distinct critic names"),
        ({"planners": ["nonsense"]}, "nonsense"),
    ],
)
def test_invalid_comparisons_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MASGymError, match=message):
        table(**options)


def test_failed_searches_count_as_wrong_and_are_shown() -> None:
    found = table(["single", "sc:3"], budget=search.Budget(calls=2))
    assert [row.hits[1].mean for row in found.rows] == [0.0, 0.0]
    assert "budget of 2 calls spent" in str(found)


def test_caption_explains_deviations_only_if_shown() -> None:
    from rich.console import Console

    found = table(["single", "sc:3"], seeds=[1, 2])
    for width in (45, 60, 80, 100, 120, 160):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(found.show(width))
        shown = console.export_text()
        assert ("± std" in " ".join(shown.split())) == (len(re.findall(r"\d ± \d", shown)) > 0), shown


def test_matched_baseline_is_found_by_its_name_before_resizing() -> None:
    table = search.compare(
        ["single", "sc:1"], problems(3), mas="single", policy=talker(), match="calls=3", baseline="sc:1"
    )
    assert (table.baseline, list(table.differences())) == ("sc:3", ["single"])
