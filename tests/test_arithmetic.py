"""Generated tasks: constant-time access, reproducible problems, disjoint splits; correct answers of Arithmetic."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.tiny.truth import facts_of, rival_of
from mas_gym.errors import ConfigError, UnknownNameError
from mas_gym.tasks import load_task
from mas_gym.tasks.base import SPLITS, Problem, Task
from mas_gym.tasks.procedural import arithmetic
from mas_gym.tasks.procedural.arithmetic import LEVELS, Arithmetic
from mas_gym.tasks.procedural.generated import SampledTask, split_of
from mas_gym.tasks.procedural.ordering import Ordering

KINDS = pytest.mark.parametrize("kind", [Arithmetic, Ordering])


@KINDS
@pytest.mark.parametrize("level", LEVELS)
def test_same_index_gives_the_same_problem(kind: type[SampledTask], level: int) -> None:
    one, other = kind("test", difficulty=level), kind("test", difficulty=level)
    far = len(one) - 1
    # a far index first: no problem depends on those before it
    assert other[far] == one[far]
    for index in (0, 1, 7, far):
        again = other[index]
        assert one[index] == again
        assert one[index].metadata == again.metadata
    assert one[-1] == one[far]


def test_arithmetic_passes_the_task_check() -> None:
    task = load_task("arithmetic", split="dev", difficulty=2)
    assert isinstance(task, Task)
    assert task.name == "arithmetic"
    assert len(task) >= 10**6
    assert task.problem(task[5].id) == task[5]
    assert pickle.loads(pickle.dumps(task))[3] == task[3]


def test_slices_are_tasks_with_indices_from_0() -> None:
    task = Arithmetic("train")
    part = task[10:30:5]
    assert isinstance(part, Arithmetic)
    assert [problem.id for problem in part] == [task[i].id for i in (10, 15, 20, 25)]
    assert part[1:][0] == task[15]
    assert part.problem(task[20].id) == task[20]
    with pytest.raises(UnknownNameError, match=r"arithmetic/train/0/3/10"):
        part.problem(task[11].id)
    with pytest.raises(IndexError):
        part[4]


@KINDS
@pytest.mark.parametrize("seed", [0, 1])
def test_splits_are_disjoint_by_content(kind: type[SampledTask], seed: int) -> None:
    seen: dict[str, str] = {}
    for split in SPLITS:
        for level in LEVELS:
            for problem in kind(split, seed=seed, difficulty=level)[:60]:
                assert split_of(problem.question) == split
                assert seen.setdefault(problem.question, split) == split


def test_different_seeds_and_difficulties_give_different_problems() -> None:
    questions = {task[0].question for task in (Arithmetic(seed=0), Arithmetic(seed=1), Arithmetic(difficulty=4))}
    assert len(questions) == 3


@pytest.mark.parametrize("level", LEVELS)
def test_answers_follow_only_from_the_correct_reading(level: int) -> None:
    for problem in Arithmetic("train", difficulty=level)[:150]:
        facts = facts_of(problem)
        work = arithmetic.work_of(arithmetic.plan_of(facts))
        assert work is not None
        assert [list(equation) for equation in work] == problem.metadata["values"]
        assert problem.answer == str(work[-1][3])
        for left, operator, right, result in work:
            assert arithmetic.apply(left, operator, right) == result
            assert 0 <= result <= arithmetic.LIMIT
        misread = arithmetic.misread_answers(facts, rival_of(problem))
        assert None not in misread
        assert int(problem.answer) not in misread
        for fact in facts:
            assert all(f" {number} " in f" {problem.question.replace('.', ' ')} " for number in fact[1:])


def test_higher_difficulty_has_more_events() -> None:
    lengths = [sum(len(facts_of(p)) for p in Arithmetic("train", difficulty=d)[:100]) for d in LEVELS]
    assert lengths == sorted(lengths)
    assert lengths[0] * 2 < lengths[-1]


def test_misreadings_are_possible_in_many_problems() -> None:
    problems = Arithmetic("train")[:300]
    read = sum(bool(arithmetic.reader_slips(facts_of(p), rival_of(p))) for p in problems)
    plan = sum(bool(arithmetic.planner_slips(facts_of(p))) for p in problems)
    solve = sum(bool(arithmetic.solver_slips(arithmetic.plan_of(facts_of(p)))) for p in problems)
    assert all(90 < count < 270 for count in (read, plan, solve))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "validation"}, "'train', 'dev', 'test'"),
        ({"difficulty": 0}, "1 to 5"),
        ({"difficulty": 6}, "got 6"),
        ({"size": 0}, "got 0"),
        ({"seed": "a"}, "an integer"),
        ({"grading": "lenient"}, "'strict', 'paper'"),
    ],
)
@KINDS
def test_invalid_argument_error_names_the_expected_values(
    kind: type[SampledTask], arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**arguments)  # type: ignore[arg-type]


@given(st.text(max_size=40))
def test_unknown_ids_are_rejected(problem_id: str) -> None:
    with pytest.raises(UnknownNameError):
        Arithmetic("test").problem(problem_id)


@pytest.mark.parametrize("suffix", ["-1", "01", "1000000", "٣", "1 ", ""])
def test_ids_have_one_accepted_form(suffix: str) -> None:
    with pytest.raises(UnknownNameError):
        Arithmetic("test").problem(f"arithmetic/test/0/3/{suffix}")


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6 - 1), st.integers(0, 999))
def test_grading_accepts_only_the_answer(index: int, other: int) -> None:
    task = Arithmetic("test")
    problem: Problem = task[index]
    assert task.grade(problem, f"Work: 1 + 1 = 2.\nFinal Answer: {problem.answer}").correct
    assert task.grade(problem, f"Final Answer: {other}").correct == (str(other) == problem.answer)
    assert task.extract(problem, f"Final Answer: {other}") == str(other)
