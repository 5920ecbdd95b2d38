"""Slow graders block no search and change no result; a judge's cost is stored with each search."""

from __future__ import annotations

import pickle
import sqlite3
import threading
import time
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from search_worlds import by_problem, problems, talker, verdict

import search
from mas_gym.errors import BudgetError, PolicyError, StoreError
from mas_gym.policies import SamplingReply, SamplingRequest, ScriptedPolicy
from mas_gym.tasks import Grade, Problem, ProblemTask
from mas_gym.tasks.grading.answers import KindGrader
from mas_gym.tasks.grading.graders import make_grader
from mas_gym.tasks.grading.judge import Judge
from search.engine import one_search
from search.grading import grading_threads

SECONDS = 20.0


def graded_by(grader: Any, count: int = 4, kind: Any = "text") -> ProblemTask:
    items = [Problem(f"p{i}", f"question {i}", f"answer {i}", kind) for i in range(count)]
    return ProblemTask.of(items, grader=grader)


def import_file(path: Path) -> ModuleType:
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answer(request: SamplingRequest, seed: int) -> str:
    return f"Final Answer: {seed % 3}"


def test_other_searches_continue_while_one_is_graded() -> None:
    on = threading.Event()

    def write(request: SamplingRequest, seed: int) -> str:
        if "question 3" in request.messages[-1].content:
            on.set()
        return "Final Answer: 1"

    # Each grade waits for an agent of the last problem, which a blocked loop would never ask.
    task = graded_by(lambda problem, text: on.wait(SECONDS))
    plans = list(search.run("single", task, mas="single", policy=ScriptedPolicy(write, max_batch=1), concurrency=4))
    assert [(plan.correct, plan.error) for plan in plans] == [(True, None)] * 4


def test_plans_are_equal_with_slow_and_fast_grading(tmp_path: Path) -> None:
    def plans(task: Any, **more: Any) -> dict[str, Any]:
        return by_problem(search.run("mcts:6,2", task, mas="rpsv", policy=talker(), **more))

    quick, critic = KindGrader(), search.ConstantCritic(0.1)

    def slow(problem: Problem, text: str) -> Grade:
        return quick.grade(problem, text)

    items = problems(5)
    expected = plans(ProblemTask.of(items), critic=critic)
    assert plans(ProblemTask.of(items, grader=slow), critic=critic) == expected
    assert plans(ProblemTask.of(items, grader=slow), critic=critic, concurrency=1) == expected
    # In training, the true reward is requested during the search.
    assert plans(ProblemTask.of(items, split="train", grader=slow), training=True) == plans(
        ProblemTask.of(items, split="train"), training=True
    )


def test_grader_that_raises_fails_only_its_search() -> None:
    def grade(problem: Problem, text: str) -> bool:
        if problem.id == "p1":
            raise ZeroDivisionError("by zero")
        return True

    plans = {plan.problem_id: plan for plan in search.run("single", graded_by(grade), mas="single", policy=talker())}
    assert "by zero" in (plans["p1"].error or "")
    assert plans["p1"].usage.agent_calls == 1
    assert [plans[f"p{i}"].correct for i in (0, 2, 3)] == [True] * 3


def test_time_budget_excludes_grading(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = 0.0
    monkeypatch.setattr(one_search, "perf_counter", lambda: time.perf_counter() + ahead)

    class Late:
        """Requests a second message, which never arrives."""

        def plan(self, model: Any, root: Any, rng: Any) -> Any:
            [[first]] = yield [search.Propose(root)]
            plan = search.Plan.single(model.transition(root, first.action))
            nonlocal ahead
            ahead = 599.8
            try:
                yield [search.Propose(root)]
            except BudgetError:
                return plan

    class Once(ScriptedPolicy):
        asked = 0

        async def sample_async(self, request: SamplingRequest) -> SamplingReply:
            self.asked += 1
            if self.asked > 1:
                import asyncio

                await asyncio.sleep(SECONDS)
            [reply] = self.sample([request])
            return reply

        max_concurrency = 4

    def grade(problem: Problem, text: str) -> bool:
        nonlocal ahead
        ahead += 3600
        return True

    [plan] = search.run(
        Late(), graded_by(grade, 1), mas="single", policy=Once(answer), budget=search.Budget(seconds=600)
    )
    assert (plan.correct, plan.error) == (True, None)
    assert plan.usage.seconds < 3600


def test_close_does_not_wait_for_a_grader() -> None:
    let, begun = threading.Event(), threading.Event()

    def grade(problem: Problem, text: str) -> bool:
        begun.set()
        return let.wait(SECONDS)

    run = search.run("single", graded_by(grade, 2), mas="single", policy=talker())
    stopper = threading.Thread(target=lambda: begun.wait(SECONDS) and run.stop())
    stopper.start()
    assert list(run) == [] and run.stopped == "stopped"
    stopper.join(SECONDS)
    let.set()


@pytest.mark.parametrize(
    "task, kind, threads",
    [
        (graded_by(None), "text", 0),
        (graded_by(None), "number", 0),
        (graded_by(None), "code", 8),
        (graded_by(None), "expression", 8),
        ([], "choice", 0),
        (graded_by(lambda problem, text: True), "number", 1),
        (graded_by(make_grader(None, KindGrader(judge=Judge(talker())))), "judge", 8),
    ],
    ids=["text", "number", "code", "expression", "list", "function", "judge"],
)
def test_grading_threads_depend_on_the_grader_and_the_problem_kind(task: Any, kind: str, threads: int) -> None:
    assert grading_threads(task, kind) == threads


BAD_GRADES = [
    ("Grade(True, tokens=math.nan)", "expected tokens to be an int from 0 to 1,000,000,000,000, got nan"),
    ("Grade(True, tokens='3')", "expected tokens to be an int from 0 to 1,000,000,000,000, got '3'"),
    ("Grade(True, tokens=10**30)", "expected tokens to be an int from 0 to 1,000,000,000,000, got 1000"),
    ("Grade(True, prompt_tokens=-1)", "expected prompt_tokens to be an int from 0 to 1,000,000,000,000, got -1"),
    ("Grade(0.7)", "expected correct to be True or False, got 0.7; compare a score with a threshold"),
    ("Grade(True, 5)", "Grade.extracted: expected a str or None, got 5"),
    ("Grade(True, '5', None)", "expected reason to be a str, got None"),
    ("None", "Grade, got None"),
]
BAD_GRADER = """
import math
from mas_gym.tasks import Grade
BAD = [{grades}]
def grade(problem, text):
    place = int(problem.id[1:])
    return BAD[place]() if place < len(BAD) else Grade(True)
grade.revision = 1
class Grader:
    def identity(self):
        return "bad"
    def extract(self, problem, text):
        return text
    def grade(self, problem, text):
        return grade(problem, text)
"""


@pytest.mark.parametrize("kind", ["file", "function", "object"])
def test_invalid_grades_fail_only_their_searches(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text(BAD_GRADER.format(grades=", ".join(f"lambda: {grade}" for grade, _ in BAD_GRADES)))
    module = vars(import_file(file))
    grader = {"file": f"{file}:grade", "function": module["grade"], "object": module["Grader"]()}[kind]
    task = graded_by(grader, len(BAD_GRADES) + 1)
    found = search.run("single", task, mas="single", policy=talker(), store=tmp_path / "runs.db")
    plans = {plan.problem_id: plan for plan in found}
    for place, (grade, complaint) in enumerate(BAD_GRADES):
        assert complaint in str(plans.pop(f"p{place}").error), grade
    assert [(plan.correct, plan.error) for plan in plans.values()] == [(True, None)]


def test_grades_accept_numpy_values() -> None:
    grade = Grade(np.bool_(True), tokens=np.int64(5))  # type: ignore[arg-type]
    assert grade == (True, None, "", 5, 0) and [type(grade.correct), type(grade.tokens)] == [bool, int]
    assert pickle.loads(pickle.dumps(grade)) == grade == grade._replace(tokens=5)


# ----------------------------------------------------------------- the cost of a judge


def agrees(request: SamplingRequest, seed: int) -> str:
    return verdict(request, "correct")


def judged(said: Callable[[SamplingRequest, int], str] = agrees) -> tuple[Any, Judge]:
    judge = Judge(ScriptedPolicy(said, name="judge"))
    return graded_by(KindGrader(judge=judge), kind="judge"), judge


def test_judge_tokens_are_stored_with_each_search(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    task, judge = judged()
    common: dict[str, Any] = {"mas": "single", "policy": ScriptedPolicy(answer, name="writer"), "store": store}
    plans = {plan.problem_id: plan for plan in search.run("sc:5", task, **common)}
    for plan in plans.values():
        answers = {candidate.text for candidate in plan.candidates}
        # Three tokens a verdict, one verdict for each answer.
        assert plan.usage.grader_tokens == 3 * len(answers) > 0
        assert plan.usage.grader_prompt_tokens > 10 * len(answers)
        assert plan.usage.generated_tokens == 15
    total = sum(plan.usage.grader_tokens for plan in plans.values())
    assert judge.spent.generated_tokens == total
    # After reading back, no verdict is requested again.
    silent, _ = judged()
    again = {plan.problem_id: plan for plan in search.run("sc:5", silent, **common)}
    assert {key: plan.usage for key, plan in again.items()} == {key: plan.usage for key, plan in plans.items()}
    with search.open_store(store) as opened:
        assert opened.runs()[0].spent.grader_tokens == total
        table = opened.compare()
    assert table.rows[0].grader_tokens.mean == total / 4
    assert "| Judge TOK |" in table.to_markdown()
    assert "Judge TOK" in str(table) and "Judge TOK" in table._repr_html_()
    assert "grader_tokens" in table.to_csv().splitlines()[0]
    with sqlite3.connect(store) as connection:
        connection.execute("UPDATE searches SET grader_tokens = 1")
    with search.open_store(store) as opened, pytest.raises(StoreError, match="damaged"):
        list(opened.plans())


def test_compare_shows_judge_tokens() -> None:
    task, _ = judged()
    table = search.compare(["single", "sc:2"], task, mas="single", policy=ScriptedPolicy(answer, name="writer"))
    assert [row.grader_tokens.mean > 0 for row in table.rows] == [True, True]
    assert "Judge TOK: tokens of the judge" in str(table)


def test_unreadable_verdicts_fail_the_search_and_are_counted() -> None:
    task, judge = judged(lambda request, seed: "I cannot say.")
    plans = list(search.run("single", task[:1], mas="single", policy=talker()))
    assert "to end with the line 'Verdict " in (plans[0].error or "")
    assert judge.spent.faults == {"no verdict": 3}


def test_equal_answers_are_judged_once() -> None:
    asked: list[int] = []
    both = threading.Barrier(3)

    def said(request: SamplingRequest, seed: int) -> str:
        asked.append(seed)
        threading.Event().wait(0.05)
        return verdict(request, "incorrect")

    task, _ = judged(said)
    grades: list[Grade] = []

    def grade() -> None:
        both.wait(SECONDS)
        grades.append(task.grade(task[0], "Final Answer: 1"))

    threads = [threading.Thread(target=grade) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(asked), {grade.correct for grade in grades}, len({*grades})) == (1, {False}, 1)


def test_failing_judge_is_retried() -> None:
    down = [True]

    def said(request: SamplingRequest, seed: int) -> str:
        if down:
            down.clear()
            raise PolicyError("down")
        return verdict(request, "correct")

    task, _ = judged(said)
    with pytest.raises(PolicyError, match="down"):
        task.grade(task[0], "Final Answer: 1")
    assert task.grade(task[0], "Final Answer: 1").correct
