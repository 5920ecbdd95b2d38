"""Choosing among recorded programs: reading, executing and the rules, on small cases worked out by hand."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.real import choosing, humaneval, paired
from benchmarks.real.execution import Problem, assertions_of, calls_of, ended, execute, read_problem

BODIES = ("return x + x", "return x * 2", "return x ** 2", "return 1", "while True: pass")
PROGRAMS = tuple(f"    {body}\n" for body in BODIES)
ROW = {
    "id": "double",
    "prompt": "def double(x):\n",
    "entry_point": "double",
    "test": "def check(candidate):\n    assert candidate(3) == 6\n    assert candidate(-1) == -2\n",
    "samples": [text + "\ndef other(): pass" for text in PROGRAMS],
    "generated_tests": [
        "double(2) == 4\nassert double(3) == 6\nassert other(1) == 2",
        "double(2) == 4\nassert double(3) == 9",
        "double(2) ==",
    ],
}


def test_read_problem_truncates_programs_and_tests_as_codet_does() -> None:
    problem = read_problem(ROW)
    assert problem.programs == PROGRAMS
    assert problem.tests == (
        ("assert double(2) == 4", "assert double(3) == 6"), ("assert double(2) == 4", "assert double(3) == 9"), (),
    )  # fmt: skip
    assert problem.distinct_calls == ["double(2)", "double(3)"]
    assert ended("x = 1\n# note") == "x = 1"


def test_calls_of_function_returns_the_outermost_of_nested_calls() -> None:
    assert calls_of("assert sorted(f(g(1), f(2))) == f([1])", "f") == ["f(g(1), f(2))", "f([1])"]
    assert assertions_of("f(1) == 2 # assert", "f") == ["assert f(1) == 2 # assert"]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> choosing.Samples:
    cache = tmp_path_factory.mktemp("cache") / "results.jsonl"
    problem = read_problem(ROW)
    first = execute([problem], cache, sandbox="none", jobs=1)
    rows = cache.read_text(encoding="utf-8").splitlines(keepends=True)
    assert len(rows) == len(PROGRAMS)
    # A killed process leaves part of a line.
    cache.write_text("".join(rows[2:]) + rows[1][:20] + "\n", encoding="utf-8")
    assert execute([problem], cache, sandbox="none", jobs=1) == first
    assert len(cache.read_text(encoding="utf-8").splitlines()) == len(PROGRAMS) + 1
    return choosing.Samples(problem, first["double"])


def whole(samples: choosing.Samples) -> choosing.Draw:
    return samples.draw(np.arange(5), np.arange(3))


def test_execution_determines_correctness_and_behavior_of_programs(samples: choosing.Samples) -> None:
    assert samples.correct.tolist() == [True, True, False, False, False]
    draw = whole(samples)
    # Tests: double(2) == 4 twice, double(3) == 6, double(3) == 9.
    assert draw.tests.tolist() == [2, 1, 1]
    assert draw.passed.astype(int).tolist() == [[1, 1, 0], [1, 1, 0], [1, 0, 1], [0, 0, 0], [0, 0, 0]]
    assert draw.outputs.tolist()[:3] == [[0, 0], [0, 0], [0, 1]] and draw.outputs.tolist()[4] == [-1, -1]


def test_selection_rules_give_the_scores_computed_by_hand(samples: choosing.Samples) -> None:
    draw, two = whole(samples), np.sqrt(2)
    assert choosing.generated_tests(draw).tolist() == [3, 3, 3, 0, 0]
    assert choosing.dual_agreement(draw) == pytest.approx([3 * two, 3 * two, 3, 0, 0])
    assert choosing.dual_agreement_on_outputs(draw).tolist() == [6, 6, 3, 0, 0]
    assert choosing.same_behavior(draw).tolist() == [2, 2, 1, 1, 0]
    assert choosing.agreement(draw) == pytest.approx([two * 5, two * 5, two * 4, two * 2, 0])
    assert choosing.right(draw, choosing.dual_agreement(draw)) == 1
    assert choosing.right(draw, choosing.generated_tests(draw)) == pytest.approx(2 / 3)
    assert choosing.right(draw, choosing.at_random(draw)) == pytest.approx(2 / 5)


def test_draw_contains_only_assertions_of_drawn_test_sets(samples: choosing.Samples) -> None:
    draw = samples.draw(np.array([4, 0]), np.array([1]))
    assert draw.correct.tolist() == [False, True] and draw.tests.tolist() == [1, 1]
    empty = samples.draw(np.array([4, 0]), np.array([2]))
    assert empty.passed.shape == (2, 0)
    assert all(choosing.right(empty, rule(empty)) == 0.5 for rule in choosing.RULES.values())
    assert np.isfinite(choosing.features(empty)).all()


def test_features_do_not_depend_on_correctness(samples: choosing.Samples) -> None:
    draw = whole(samples)
    other = draw._replace(correct=~draw.correct)
    assert (choosing.features(draw) == choosing.features(other)).all()


def test_folds_are_reproducible_and_differ_in_size_by_at_most_one() -> None:
    found = paired.folds(12, 5, 0)
    assert sorted(np.bincount(found).tolist()) == [2, 2, 2, 3, 3]
    assert (found == paired.folds(12, 5, 0)).all()


def test_page_is_skipped_if_its_recorded_data_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    humaneval.main(["--data", str(tmp_path), "--cache", str(tmp_path / "c.jsonl"), "--pages", str(tmp_path)])
    assert "skipped: expected the recording humaneval_codegen.jsonl.gz" in capsys.readouterr().out


def test_recorded_data_has_generated_tests_for_most_problems(shared_data: Path) -> None:
    from benchmarks.real.common import read_rows

    folder = shared_data / "real"
    if not (folder / humaneval.SOURCE.file).is_file():
        pytest.skip(f"no {humaneval.SOURCE.file} in {folder}")
    problems = [read_problem(row) for row in read_rows(folder, humaneval.SOURCE)]
    assert all(isinstance(one, Problem) and len(one.programs) == 100 for one in problems)
    assert sum(bool(one.distinct_tests) for one in problems) > 0.9 * len(problems)
