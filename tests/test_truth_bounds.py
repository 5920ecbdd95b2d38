"""Upper bounds of stopping early, from rules with access to the truth."""

from benchmarks.truth_bounds import Check, Run, fewest, first_right, kept_right, scored, separation

LUCKY = Run("a", (Check(1, False, 0.2), Check(2, True, 0.9), Check(5, False)))
STEADY = Run("b", (Check(1, False, 0.1), Check(2, False, 0.3), Check(5, True)))
NEVER = Run("c", (Check(1, False, 0.4), Check(2, False, 0.5), Check(5, False)))
RUNS = [LUCKY, STEADY, NEVER]


def test_first_right_rule_stops_at_the_first_correct_answer() -> None:
    assert [first_right(run.checks).cost for run in RUNS] == [2, 5, 5]


def test_kept_right_rule_never_changes_the_correctness_of_the_last_answer() -> None:
    assert [kept_right(run.checks) for run in RUNS] == [run.checks[-1] for run in RUNS]


def test_fewest_function_returns_the_smallest_number_of_checks_that_reaches_an_accuracy() -> None:
    assert fewest(RUNS, 1 / 3)[0] == 2
    assert fewest(RUNS, 2 / 3)[0] == 3
    assert fewest(RUNS, 1.0)[0] == 3


def test_scores_of_a_problem_are_means_over_its_runs() -> None:
    twice = [LUCKY, LUCKY._replace(checks=STEADY.checks)]
    found = scored(twice, [LUCKY.checks[1], STEADY.checks[0]])
    assert found.hits == {"a": 0.5} and found.tokens == {"a": 1.5}


def test_auc_ignores_the_last_check_of_each_run() -> None:
    assert separation(RUNS) == 1.0
