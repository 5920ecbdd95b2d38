"""Ordering: correct answers; test_arithmetic.py tests what all generated tasks share."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mas_gym.tasks import load_task
from mas_gym.tasks.base import Problem, Task
from mas_gym.tasks.procedural import ordering
from mas_gym.tasks.procedural.ordering import LETTERS, LEVELS, ORDINALS, Ordering


def rules_of(problem: Problem) -> list[ordering.Rule]:
    return [tuple(rule) for rule in problem.metadata["rules"]]


def test_ordering_passes_the_task_check() -> None:
    task = load_task("ordering", split="train")
    assert isinstance(task, Task)
    problem = task[2]
    assert problem.kind == "choice"
    assert task.problem(problem.id) == problem
    for letter in LETTERS:
        assert task.grade(problem, f"Final Answer: {letter}").correct == (letter == problem.answer)


@pytest.mark.parametrize("level", LEVELS)
def test_answer_follows_only_from_the_correct_reading(level: int) -> None:
    for problem in Ordering("train", difficulty=level)[:150]:
        states = ordering.states_of(rules_of(problem))
        assert states is not None
        order, place = states[-1], problem.metadata["place"]
        assert len(set(order)) == len(order) == LEVELS[level].people
        asked = re.search(r"Who is (\w+) in the queue\?", problem.question)
        assert asked is not None
        assert place == (len(order) - 1 if asked[1] == "last" else ORDINALS.index(asked[1]))
        options = dict(re.findall(r"([A-D])\) (\w+)", problem.question))
        assert list(options.values()) == problem.metadata["options"]
        assert options[problem.answer] == order[place]
        for misread in ordering.misread_states(rules_of(problem), problem.metadata["phrases"]):
            assert misread is not None
            assert misread[place] != order[place]


def test_every_letter_and_place_occurs() -> None:
    problems = Ordering("train")[:400]
    for letter in LETTERS:
        assert 60 < sum(problem.answer == letter for problem in problems) < 140
    assert {problem.metadata["place"] for problem in problems} == {0, 1, 2, 3}


@given(st.permutations(["Ann", "Ben", "Kim"]), st.sampled_from(["after", "before"]), st.integers(0, 2))
def test_insertion_keeps_the_order_of_the_other_people(names: list[str], kind: str, beside: int) -> None:
    state = ordering.follow((kind, "Tom", names[beside]), tuple(names))
    assert state is not None
    assert [name for name in state if name != "Tom"] == names
    assert state.index("Tom") - state.index(names[beside]) == (1 if kind == "after" else -1)


@pytest.mark.parametrize(
    "rule", [("after", "Ann", "Ben"), ("first", "Ann"), ("before", "Kim", "Tom"), ("swap", "Ann", "Tom")]
)
def test_rules_about_absent_people_are_invalid(rule: ordering.Rule) -> None:
    assert ordering.follow(rule, ("Ann", "Ben")) is None


def test_swapping_twice_restores_the_order() -> None:
    state = ("Ann", "Ben", "Kim")
    once = ordering.follow(("swap", "Ann", "Kim"), state)
    assert once == ("Kim", "Ben", "Ann")
    assert ordering.follow(("swap", "Ann", "Kim"), once) == state
