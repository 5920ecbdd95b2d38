"""The game of 24: formulas, truth, task, system, the policy of random moves, and the recorded trees."""

from fractions import Fraction
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mas_gym
import search
from benchmarks.paper.page import Page
from benchmarks.real.common import Source, write_recorded
from benchmarks.real.game24 import Measured as Critic
from benchmarks.real.game24 import rank, ranking
from benchmarks.real.game24_critic import Labeled, Table, training_task
from benchmarks.real.game24_recorded import CALLS, read_recordings
from benchmarks.real.game24_text import combine, read_left, write_move
from benchmarks.real.random_moves import proposer
from mas_gym.errors import ConfigError, DataNotFoundError
from mas_gym.tasks import load_task
from mas_gym.tasks.base import SPLITS, Problem
from mas_gym.tasks.grading.answers import grade
from mas_gym.tasks.grading.formulas import compare_formulas, read_formula
from mas_gym.tasks.procedural import game24
from mas_gym.tasks.procedural.game24 import Game24, can_make, moves, puzzle

PUZZLE = Problem("p", "Make 24: 1 2 4 7", "4 * (1 + 7 - 2)", "formula")


# ----------------------------------------------------------------- formulas


@pytest.mark.parametrize(
    ("text", "formula"),
    [
        ("4 * (1 + 7 - 2) = 24", "4*(1+7-2)"),
        ("24 = (7 + 1 \u2212 2) \u00d7 4.", "(7+1-2)*4"),
        (r"$8 \div (3 - \frac{8}{3})$", "8/(3-(8)/(3))"),
        (r"\left(7+1-2\right)\cdot 4 = 6*4 = 24", "(7+1-2)*4"),
        ("-(1 - 7) * 4", "-(1-7)*4"),
        ("24", None),
        ("4 * (1 + 7", None),
        ("4 7", None),
        ("() + 1", None),
        ("four + 3", None),
        ("1 +* 2", None),
        ("", None),
    ],
)
def test_read_formula_returns_first_side_with_an_operator(text: str, formula: str | None) -> None:
    assert read_formula(text) == formula


@pytest.mark.parametrize(
    ("formula", "verdict"),
    [
        ("(7+1-2)*4", "equal"),
        ("4*(1+7-2)", "equal"),
        ("4*(1+7)-2", "different"),
        ("4*6", "other numbers"),
        ("(7-1)*4*(4-2)", "other numbers"),
        ("1/(7-7)+2+4", "other numbers"),
        ("-(2-7-1)*4", "equal"),
    ],
)
def test_compare_formulas_checks_numbers_and_value(formula: str, verdict: str) -> None:
    assert compare_formulas("4 * (1 + 7 - 2)", formula) == verdict


def test_compare_formulas_rejects_division_by_zero() -> None:
    assert compare_formulas("4*6*1*1", "4*6/(1-1)") == "different"
    assert compare_formulas("1+1+4+6", "4/(6-1)/(1-1)") == "other numbers"


def test_compare_formulas_is_exact_where_floats_are_not() -> None:
    assert compare_formulas("3 * 8 + 3 - 3 + 8 - 8", "8/(3-8/3)+3-3+8-8") == "other numbers"
    assert compare_formulas("8/(3-8/3)", "8/(3-8/3)") == "equal"


@given(st.text(alphabet="0123456789+-*/()=. x\\frac{}$\u00d7", max_size=60))
def test_grade_accepts_any_text(text: str) -> None:
    found = grade(PUZZLE, text)
    assert isinstance(found.correct, bool)
    assert grade(PUZZLE, f"Answer: {text}").correct in (True, False)


def test_grade_uses_the_last_formula_and_ignores_a_bare_target() -> None:
    assert grade(PUZZLE, "Answer: 4 * (1 + 7) - 2 = 30\nAnswer: 4 * (1 + 7 - 2) = 24").correct
    assert not grade(PUZZLE, "Answer: 24").correct
    assert grade(PUZZLE, "so\n(7 + 1 - 2) * 4 = 24", "paper").correct
    assert grade(PUZZLE, "no idea").reason == "no answer found"


@given(st.lists(st.integers(1, 13), min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_formula_of_random_moves_evaluates_to_their_result(numbers: list[int], rng) -> None:  # type: ignore[no-untyped-def]
    left = tuple(sorted(map(Fraction, numbers)))
    steps = []
    while len(left) > 1:
        move = rng.choice(moves(left))
        steps.append(write_move(left, move))
        left = game24.after(left, move)
        assert read_left(steps[-1]) == left
    formula = combine(sorted(map(Fraction, numbers)), steps)
    assert formula is not None
    assert read_formula(formula) is not None
    assert (compare_formulas(game24.solve(sorted(map(Fraction, numbers))) or formula, formula) == "equal") == (
        left == (24,) or not can_make(numbers)
    )


# -------------------------------------------------------------------- truth


def brute_force(numbers: list[Fraction]) -> bool:
    if len(numbers) == 1:
        return numbers[0] == 24
    for a, b, *rest in permutations(numbers):
        results = [a + b, a - b, a * b] + ([a / b] if b else [])
        if any(brute_force([result, *rest]) for result in results):
            return True
    return False


@given(st.lists(st.fractions(-30, 30, max_denominator=4), min_size=1, max_size=3))
def test_can_make_agrees_with_brute_force(numbers: list[Fraction]) -> None:
    assert can_make(numbers) == brute_force(numbers)


def test_can_make_solves_puzzles_that_need_fractions() -> None:
    assert can_make([3, 3, 8, 8])
    assert can_make([1, 5, 5, 5])
    assert not can_make([1, 1, 1, 1])


# --------------------------------------------------------------------- task


def test_splits_contain_each_solvable_puzzle_once() -> None:
    found = {split: [tuple(p.metadata["numbers"]) for p in Game24(split, difficulty=1)] for split in SPLITS}
    every = [numbers for part in found.values() for numbers in part]
    assert len(every) == len(set(every)) > 60
    assert all(can_make(numbers) and max(numbers) <= 6 for numbers in every)
    assert len(found["train"]) > len(found["dev"]) > 0


def test_task_is_reproducible_and_its_references_are_correct() -> None:
    task = load_task("game24", "test", difficulty=2, seed=3)
    assert list(task) == list(Game24("test", difficulty=2, seed=3))
    assert [p.id for p in task[:2]] == ["game24/test/3/2/0", "game24/test/3/2/1"]
    assert task.problem(task[1].id) == task[1]
    for problem in task:
        assert task.grade(problem, f"Answer: {problem.answer} = 24").correct
    assert len(load_task("game24", "test", difficulty=2, limit=3)) == 3


def test_size_above_the_number_of_puzzles_is_rejected() -> None:
    with pytest.raises(ConfigError, match="every puzzle of the split"):
        Game24("dev", difficulty=1, size=5000)
    assert len(Game24("dev", difficulty=1, size=2)) == 2


def test_puzzle_without_a_solution_is_rejected() -> None:
    with pytest.raises(ConfigError, match="1 1 1 1"):
        puzzle("p", [1, 1, 1, 1])


# ---------------------------------------------------------- system, policy


def test_proposer_plays_only_legal_moves_and_is_reproducible() -> None:
    task = Game24("dev", difficulty=1)[:5]
    runs = [search.run("sc:4", task, mas="game24", policy=proposer(), seed=7) for _ in range(2)]
    # Plans arrive as searches finish, which may be in another order.
    plans, again = ({plan.problem_id: plan for plan in run} for run in runs)
    for problem_id, plan in plans.items():
        assert plan.error is None
        assert [c.state for c in plan.candidates] == [c.state for c in again[problem_id].candidates]
        for candidate in plan.candidates:
            left = tuple(map(Fraction, task.problem(problem_id).metadata["numbers"]))
            *steps, answer = [turn.text for turn in candidate.state.turns]
            for step in steps:
                assert step in [write_move(left, move) for move in moves(left)]
                left = read_left(step) or ()
            assert candidate.correct == (left == (24,))
            assert answer.startswith("Answer: ")


def test_training_search_values_exceed_the_minimum_only_for_solvable_states() -> None:
    task = Game24("dev", difficulty=1)[:2]
    for plan in search.run("mcts:60,8", task, mas="game24", policy=proposer(), seed=1, training=True):
        tree = plan.tree
        assert tree is not None
        for node in range(1, len(tree)):
            left = read_left(tree.states[node].text)
            if left is not None and tree.totals[node] > -tree.visits[node]:
                assert can_make(left)


def test_policy_without_a_legal_move_gives_a_wrong_answer() -> None:
    [plan] = search.run("single", [PUZZLE], mas="rpsv", policy=proposer())
    assert plan.correct is False


# ---------------------------------------------------------------- recording


def test_missing_recording_error_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match=r"game24\.jsonl\.gz"):
        read_recordings(tmp_path)


def test_page_contains_its_source_and_command(tmp_path: Path) -> None:
    page = Page("x", "Title", "It works.")
    page.table(("a", "b"), [("one", 1)])
    path = write_recorded(page, Source("x.gz", "owner/name", "MIT"), tmp_path, "python -m x", ["43 puzzles"])
    text = path.read_text(encoding="utf-8")
    assert "owner/name (MIT)" in text
    assert text.index("It works.") < text.index("python -m x") < text.index("| one | 1 |")


def test_auc_agrees_with_scikit_learn() -> None:
    from sklearn.metrics import roc_auc_score

    rng = np.random.default_rng(0)
    truth = [rng.random(7) < 0.4 for _ in range(9)]
    values = [rng.integers(0, 4, 7).astype(float) for _ in range(9)]
    counts = rng.integers(0, 3, 9)
    flat = [np.repeat(np.concatenate(part), np.repeat(counts, 7)) for part in (truth, values)]
    assert rank(truth, [values]).auc(counts.astype(float)) == pytest.approx(roc_auc_score(*flat))
    assert rank([np.array([True])], [[np.zeros(1)]]).auc(np.ones(1)) == 0.5


@pytest.fixture(scope="module")
def recordings(shared_data: Path) -> list:  # type: ignore[type-arg]
    folder = shared_data / "real"
    if not (folder / "game24.jsonl.gz").is_file():
        pytest.skip(f"no recorded trees in {folder}")
    return read_recordings(folder)


def test_recorded_answers_are_graded_as_recorded(recordings: list) -> None:  # type: ignore[type-arg]
    for one in recordings:
        answers = [lines[-1] for lines in one.levels[3].selected]
        assert one.solved == any(grade(one.problem, answer).correct for answer in answers), one.problem.id


def test_recorded_values_have_higher_auc_for_second_moves_than_for_first_moves(recordings: list) -> None:  # type: ignore[type-arg]
    gpt4 = Critic((), CALLS)
    first, second = (ranking(recordings, gpt4, depth).auc(np.ones(len(recordings))) for depth in (0, 1))
    assert 0.6 < first < 0.9 < second


def test_training_excludes_recorded_puzzles(recordings: list) -> None:  # type: ignore[type-arg]
    recorded = {one.numbers for one in recordings}
    assert not recorded & {tuple(problem.metadata["numbers"]) for problem in training_task(recorded)}


def test_table_returns_the_solved_share_of_seen_numbers_and_the_mean_otherwise() -> None:
    four, six = (Fraction(4), Fraction(6)), (Fraction(6), Fraction(6))
    table = Table([Labeled(four, True), Labeled(four, False), Labeled(six, False), Labeled(six, False)])
    assert table([four, six, (Fraction(1), Fraction(1))]).tolist() == [0.5, 0.0, 0.25]


def test_environment_rewards_a_correct_formula() -> None:
    env = mas_gym.MASEnv("game24", split="dev")
    env.reset(seed=0)
    numbers = env.task.problem(env.problem_id).metadata["numbers"]
    formula = puzzle("p", numbers).answer
    for text in ("a", "b", "c", f"Answer: {formula} = 24"):
        _, reward, terminated, _, _ = env.step((text, env.ALL))
    assert terminated
    assert reward == 1
