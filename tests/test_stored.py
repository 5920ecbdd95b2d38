"""Comparisons, pages and notebook views of stored plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from search_worlds import HashCritic, chain, problems, talker

import search
from mas_gym.errors import ConfigError, SearchError, StoreError, UnknownNameError
from mas_gym.policies import SamplingRequest, ScriptedPolicy
from mas_gym.systems.prompts import chat_messages
from mas_gym.tasks import ProblemTask
from search import open_store
from search.pages import write_tree_page
from search.planners import MCTS
from search.results.run_info import settings
from search.results.table_formats import count

LOGS = Path(__file__).parents[1] / "examples" / "logs"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "runs.db"


def compared(store: Path | None, **options: Any) -> search.compare.Comparison:
    planners = options.pop("planners", ["single", "sc:3", "mcts:4,2"])
    options = {"mas": chain(3), "policy": talker(), "critics": {"hash": HashCritic()}, "seeds": (1, 2), **options}
    return search.compare(planners, problems(6), store=store, **options)


def test_stored_comparison_equals_the_original(store: Path) -> None:
    run = compared(store)
    with open_store(store) as opened:
        read = opened.compare()
        assert {row.label for row in read.rows} == {"single", "sc:3", "mcts:4,2 + hash"} == {r.label for r in run.rows}
        for row in run.rows:
            other = read[row.label]
            assert (other.hits, other.interval, other.shares, other.curve) == (
                row.hits,
                row.interval,
                row.shares,
                row.curve,
            )
            assert (other.tokens, other.agent_calls, other.reward_calls, other.failures) == (
                row.tokens,
                row.agent_calls,
                row.reward_calls,
                row.failures,
            )
        assert opened.compare(baseline="sc:3").baseline == "sc:3"
        some = [run.run for run in opened.runs() if run.facts["planner"] != "single"]
        assert {row.label for row in opened.compare(some).rows} == {"sc:3", "mcts:4,2 + hash"}


def test_runs_with_different_settings_are_not_combined(store: Path) -> None:
    compared(store, planners=["single"])
    compared(store, planners=["single"], mas=chain(2))
    with open_store(store) as opened:
        assert [len(setting.runs) for setting in settings(opened.runs())] == [2, 2]
        with pytest.raises(ConfigError, match=r"got runs of 2 settings .*runs=\["):
            opened.compare()
        one = [run.run for run in settings(opened.runs())[0].runs]
        assert [row.seeds for row in opened.compare(one).rows] == [(1, 2)]


def test_comparison_of_a_missing_run_is_rejected(store: Path) -> None:
    compared(store, planners=["single"])
    with open_store(store) as opened, pytest.raises(StoreError, match="found 0"):
        opened.compare(["nothing"])


def test_compare_with_one_name_returns_the_table_of_that_run(tmp_path: Path) -> None:
    store = tmp_path / "logs.db"
    for name in ("team", "solo"):
        search.import_transcripts(LOGS / f"{name}.jsonl", store)
    with open_store(store) as opened:
        assert [row.label for row in opened.compare("solo").rows] == ["recorded:solo"]


def test_compare_of_logs_without_tokens_shows_a_dash(tmp_path: Path) -> None:
    store = tmp_path / "logs.db"
    search.import_transcripts(LOGS / "team.jsonl", store)
    with open_store(store) as opened:
        [row] = opened.compare().rows
    assert [count(spread) for spread in (row.tokens, row.agent_calls, row.reward_calls)] == ["\N{EN DASH}", "6", "0"]


def test_planners_with_equal_names_have_distinct_labels(store: Path) -> None:
    compared(store, planners={"a": MCTS(4, 2, c_uct=1.0), "b": MCTS(4, 2, c_uct=3.0)}, seeds=(1,))
    with open_store(store) as opened:
        labels = [row.planner for row in opened.compare().rows]
        assert len(set(labels)) == 2 and all(label.startswith("mcts:4,2") for label in labels)


def test_plan_writes_its_page_and_displays_in_notebooks(store: Path, tmp_path: Path) -> None:
    compared(store, seeds=(1,))
    with open_store(store) as opened:
        run = next(run.run for run in opened.runs() if run.facts["planner"] == "mcts:4,2")
        plan = next(opened.plans(run))
        bare = next(opened.plans(run, trees=False))
    page = write_tree_page(plan, tmp_path / "tree.html")
    text = page.read_text()
    assert plan.tree is not None and plan.tree[1].state.text in text and '"correct": true' not in text
    assert plan.outcome in ("right", "wrong")
    assert plan.answer in plan._repr_html_() and plan.outcome in plan._repr_html_()
    with pytest.raises(SearchError, match="without"):
        write_tree_page(bare, tmp_path / "none.html")


def test_outcomes_are_computed_from_plans() -> None:
    made = {"answer": "3", "correct": True}
    assert search.Plan(**made).outcome == "right"
    assert search.Plan(answer="3", correct=False).outcome == "wrong"
    assert search.Plan(answer="3").outcome == "answered"
    assert search.Plan(correct=False).outcome == "no answer"
    assert search.Plan(error="X: y").outcome == "failed"
    assert "&lt;b&gt;" in search.Plan(problem_id="<b>")._repr_html_()


def test_preferences_exclude_pairs_that_the_tasks_rule_treats_as_equal(store: Path) -> None:
    def say(request: SamplingRequest, seed: int) -> str:
        if request.agent == "agent0":
            return f"{('Plan', 'Steps', 'Path')[seed % 3]}: add them."
        return f"Final Answer: {seed % 4}"

    task = ProblemTask.of(problems(12), name="arithmetic", split="train")
    list(search.run(MCTS(12, 3), task, mas=chain(2), policy=ScriptedPolicy(say), training=True, store=store))
    with open_store(store) as opened:
        agents = {
            rule: {row["agent"] for row in opened.preferences(least=0.1, same=rule)}
            for rule in (None, "opening", "text")
        }
        assert agents[None] == agents["opening"]
        assert "agent0" in agents["text"] and "agent0" not in agents[None]
        assert opened.preferences(same=lambda a, b: True) == []
        with pytest.raises(UnknownNameError, match="no rule 'words'"):
            opened.preferences(same="words")


def test_preferences_are_the_best_and_the_worst_message_of_a_state(store: Path) -> None:
    mas = chain(3)
    run = dict(mas=mas, policy=talker(), store=store)
    plans = {p.problem_id: p for p in search.run(MCTS(12, 3), problems(6), training=True, **run)}  # type: ignore[arg-type]
    list(search.run("single", problems(2), **run))  # type: ignore[arg-type]
    with open_store(store) as opened:
        trained, other = sorted(
            (info.run for info in opened.runs()), key=lambda r: not opened.find(r).config["training"]
        )
        rows = opened.preferences(trained, least=1.0)
        assert rows and {row["agent"] for row in rows} <= {agent.name for agent in mas.agents}
        assert len(opened.preferences(trained, least=0.1)) > len(rows) > len(opened.preferences(trained, least=2))
        for row in rows:
            assert set(row) == {"agent", "prompt", "chosen", "rejected", "margin", "problem"}
            nodes = list(plans[row["problem"]].tree)
            asked = [n.id for n in nodes if [m._asdict() for m in chat_messages(mas, n.state)] == row["prompt"]]
            families = [{n.state.text: n.q for n in nodes if n.parent == parent and n.visits} for parent in asked]
            [chosen], [rejected] = row["chosen"], row["rejected"]
            assert chosen["role"] == rejected["role"] == "assistant"
            ends = (chosen["content"], rejected["content"])
            [said] = [said for said in families if all(text in said for text in ends)]
            assert [said[text] for text in ends] == [max(said.values()), min(said.values())]
            assert row["margin"] == said[ends[0]] - said[ends[1]] >= 1
        with pytest.raises(StoreError, match="expected a training run"):
            opened.preferences(other)
        for wrong in (0, -1, 3, float("nan"), "1", True):
            with pytest.raises(ConfigError, match="least"):
                opened.preferences(trained, least=wrong)  # type: ignore[arg-type]
        with pytest.raises(StoreError, match="found 2"):
            opened.preferences()
