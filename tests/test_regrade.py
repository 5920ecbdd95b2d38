"""Grading stored searches again: no model call, the old grades stay, damage is reported."""

import json
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from search_worlds import execute
from typer.testing import CliRunner

import search
from mas_gym.cli import app
from mas_gym.cli.view import Pages
from mas_gym.errors import StoreError
from mas_gym.policies.scripted import ScriptedPolicy
from mas_gym.tasks import Grade, Problem, ProblemTask
from mas_gym.tasks.grading.answers import KindGrader
from mas_gym.tasks.grading.graders import FunctionGrader
from search.critics import ConstantCritic
from search.report.report import write_report
from search.store import regrade

PROBLEMS = [Problem(f"p{n}", f"What is {n}?", str(n)) for n in range(6)]


def write(request: Any, seed: int) -> str:
    return f"I say {seed % 3}. Final Answer: {seed % 3}.0"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "runs.db"
    policy, critic = ScriptedPolicy(write), ConstantCritic(0.5)
    list(search.run("mcts:6,3", ProblemTask.of(PROBLEMS), mas="single", policy=policy, critic=critic, store=path))
    return path


def run_of(path: Path) -> Any:
    with search.open_store(path) as opened:
        return opened.find()


def plans(path: Path, **options: Any) -> list[Any]:
    with search.open_store(path) as opened:
        return [replace(plan, tree=None) for plan in opened.plans(**options)]


def odd(problem: Problem, text: str) -> Grade:
    return Grade(problem.id in ("p1", "p3"), text.rpartition(" ")[2], "equal")


def test_message_without_a_legal_recipient_is_no_answer(tmp_path: Path) -> None:
    agents = [{"name": name, "system_prompt": f"You are {name}."} for name in ("Solver", "Critic")]
    edges = [["q", "Solver"], ["Solver", "Critic"], ["Critic", "Solver"], ["Critic", "sink"]]
    mas = {"name": "pair", "agents": agents, "edges": edges, "max_turns": 4, "route": "message"}
    policy = ScriptedPolicy(lambda request, seed: "Final Answer: 0 -> Planner")
    [plan] = search.run("single", PROBLEMS[:1], mas=mas, policy=policy, store=tmp_path / "runs.db")
    assert plan.answer is None and not plan.correct
    result = regrade(tmp_path / "runs.db", run_of(tmp_path / "runs.db"), KindGrader(), "again")
    assert (result.after, result.changes) == (0, ())


def test_new_grades_are_stored_next_to_old_grades(store: Path) -> None:
    before = plans(store)
    result = regrade(store, run_of(store), FunctionGrader(odd, KindGrader()), "odd")
    assert (result.searches, result.before, result.after) == (6, sum(bool(p.correct) for p in before), 2)
    assert [(change.problem_id, change.new_correct) for change in result.changes] == [
        (p.problem_id, p.problem_id in ("p1", "p3")) for p in before
    ]
    assert plans(store) == before
    assert plans(store, grading=result.grading) == plans(store, grading="odd") != before
    for trees in (True, False):
        after = plans(store, grading="odd", trees=trees)
        assert [plan.correct for plan in after] == [plan.problem_id in ("p1", "p3") for plan in after]
        assert all(plan.answer.endswith(".0") for plan in after)
    for plan in plans(store, grading="odd"):
        assert {c.correct for c in plan.candidates} == {m.correct for m in plan.anytime} == {plan.correct}
    with search.open_store(store) as opened:
        [line] = opened.regraded()
        assert (line.label, line.searches) == ("odd", 6)
        with pytest.raises(StoreError, match=r"'even'.*odd"):
            list(opened.plans(grading="even"))


def test_regrading_with_the_same_grader_changes_nothing(store: Path) -> None:
    result = regrade(store, run_of(store), KindGrader(), "again")
    assert result.changes == () and result.before == result.after
    assert plans(store, grading="again") == plans(store)


def test_corrected_references_are_used(store: Path) -> None:
    best = {plan.problem_id: plan.answer for plan in plans(store)}
    fixed = {p.id: Problem(p.id, p.question, best[p.id]) for p in PROBLEMS[:4]}
    result = regrade(store, run_of(store), KindGrader(), "fixed", problem_of=lambda problem: fixed.get(problem.id))
    assert (result.searches, result.after) == (4, 4)


def test_rerunning_a_search_deletes_its_grades(store: Path) -> None:
    regrade(store, run_of(store), FunctionGrader(odd, KindGrader()), "odd")
    connection = sqlite3.connect(store)
    connection.execute("UPDATE searches SET correct = 7 WHERE problem = 'p1'")
    connection.commit()
    policy, critic = ScriptedPolicy(write), ConstantCritic(0.5)
    list(search.run("mcts:6,3", ProblemTask.of(PROBLEMS), mas="single", policy=policy, critic=critic, store=store))
    assert connection.execute("SELECT count(*) FROM grades").fetchone() == (5,)
    connection.close()


def test_damaged_searches_and_grades_are_reported(store: Path) -> None:
    regrade(store, run_of(store), KindGrader(), "whole")
    connection = sqlite3.connect(store)
    connection.execute(
        "UPDATE grades SET nodes = '[[0, null, 1, \"\"]]' WHERE search = (SELECT min(search) FROM grades)"
    )
    connection.commit()
    with pytest.raises(StoreError, match="grades"):
        plans(store, grading="whole")
    connection.execute("UPDATE searches SET answer = NULL WHERE problem = 'p2'")
    connection.commit()
    connection.close()
    with pytest.raises(StoreError, match=r"damaged.*'p2'.* 5 searches"):
        regrade(store, run_of(store), KindGrader(), "part")


def test_grader_error_affects_only_its_search(store: Path) -> None:
    def picky(problem: Problem, text: str) -> bool:
        return 1 / int(problem.answer) > 0

    result = regrade(store, run_of(store), FunctionGrader(picky, KindGrader()), "picky")
    assert result.searches == 5 and list(result.failed) == ["'p0'"] and "ZeroDivisionError" in result.failed["'p0'"]


def test_regrade_command_lists_the_differences(store: Path, tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text("def grade(problem, text):\n    return problem.id != 'p0'\n")
    (tmp_path / "new.csv").write_text("id,question,answer\np0,What is 0?,2\np1,What is 1?,2\n")
    run = CliRunner().invoke
    done = run(
        app, ["regrade", str(store), "--grader", f"{tmp_path}/my.py:grade", "--json", str(tmp_path / "out.json")]
    )
    assert done.exit_code == 0, done.output
    [found] = json.loads((tmp_path / "out.json").read_text())
    assert (found["searches"], found["correct"]) == (6, 5)
    assert "newly right" in done.output and "p0" in done.output
    done = run(app, ["regrade", str(store), "--task", f"{tmp_path}/new.csv", "--kind", "number"])
    assert done.exit_code == 0 and "2 searches" in done.output
    for arguments, complaint in (
        (["--kind", "essay"], "expected one of 'number'"),
        (["--option", "decimal=';'"], "decimal"),
        (["--option", "difficulty=3"], "-o difficulty: expected --task"),
        (["--columns", "question=q"], "--columns: expected --task"),
        (["--data", "problems.csv"], "--data: expected --task"),
        (["--run", "nobody"], "expected one run 'nobody', found 0"),
    ):
        done = run(app, ["regrade", str(store), *arguments])
        assert done.exit_code == 2 and complaint in " ".join(done.output.replace("│", " ").split())


def test_regrade_reads_numbers_with_the_given_decimal_sign(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    policy = ScriptedPolicy(lambda request, seed: "Final Answer: 1.234")
    task = ProblemTask.of([Problem("p", "What is 1200 + 34?", "1234")])
    list(search.run("single", task, mas="single", policy=policy, store=path))
    done = CliRunner().invoke(app, ["regrade", str(path), "--option", "decimal=','"])
    assert done.exit_code == 0, done.output
    assert "1 newly right" in done.output
    with search.open_store(path) as opened:
        [plan] = opened.plans(grading="grading=strict, decimal=','")
    assert plan.correct


def test_pages_show_old_and_new_grades(store: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pages = Pages(store)
    assert "Graded again by" not in pages.page("/", {})
    done = regrade(store, run_of(store), FunctionGrader(odd, KindGrader()), "<b>odd</b>")
    with search.open_store(store) as opened:
        [line] = opened.regraded()
        assert (line.searches, line.before, line.after) == (6, done.before, 2)
        write_report(opened, tmp_path / "report.html")
    for page in (pages.page("/", {}), (tmp_path / "report.html").read_text(encoding="utf-8")):
        assert "Graded again by" in page and "&lt;b&gt;odd&lt;/b&gt;" in page
        assert "<td>33.3</td></tr>" in page
    execute(store, "UPDATE grades SET nodes = '[]'")
    assert "damaged" in pages.page("/", {})
