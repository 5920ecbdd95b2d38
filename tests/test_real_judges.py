"""The page about recorded judges: reading, votes and the model of the first error."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.real import first_step, process_judges
from benchmarks.real.process_judges import Judged

JUDGES = ("A", "B", "C")


def rows(question: int, sample: int, labels: dict[str, dict[str, int]]) -> list[dict[str, Any]]:
    common = {"dataset": "part", "record_id": f"{question}:{sample}", "query_index": question, "sample_index": sample}
    return [{**common, "judge": judge, "step_labels": one, "final_label": 1} for judge, one in labels.items()]


GIVEN = rows(0, 0, {"human": {"10": -1, "2": 1, "4": -1}, "A": {"2": 1, "4": -1, "10": 1}, "B ": {"2": -1}, "C": {}})


def test_read_judged_returns_steps_ordered_by_number() -> None:
    [run] = process_judges.read_judged(GIVEN)
    assert run.steps == (2, 4, 10) and run.truth == 1 and run.labels == (1, -1, -1)
    assert [run.first(judge) for judge in JUDGES] == [1, 0, 3]
    assert np.isnan(run.verdicts["B"]).tolist() == [False, True, True]


def test_votes_select_the_step_chosen_by_most_judges() -> None:
    [run] = process_judges.read_judged(GIVEN)
    assert process_judges.plurality(run, JUDGES) == 0


def test_scores_function_counts_error_free_runs() -> None:
    right = rows(1, 0, {"human": {"2": 1}, "A": {"2": 1}})
    runs = process_judges.read_judged([*GIVEN, *right])
    found = process_judges.scores(runs, [1, 1])
    assert found.accuracy == 1 and found.f1 == 100 and found.hits == {"part 0": 1, "part 1": 1}
    assert process_judges.scores(runs, [3, 1]).f1 == 0


def made_runs(number: int, seed: int) -> list[Judged]:
    """Return runs of four steps whose judge A is right, and whose others guess."""
    rng = np.random.default_rng(seed)
    found = []
    for place in range(number):
        truth = int(rng.integers(0, 5))
        guess = {judge: np.where(np.arange(4) == rng.integers(0, 5), -1.0, 1.0) for judge in JUDGES}
        guess["A"] = np.where(np.arange(4) >= truth, -1.0, 1.0)
        labels = tuple(int(label) for label in guess["A"])
        finals = dict.fromkeys(JUDGES, 1.0)
        found.append(Judged("part", f"q{place // 5}", place % 5, (2, 4, 6, 8), truth, labels, guess, finals))
    return found


def test_combination_learns_which_judge_is_reliable() -> None:
    runs = made_runs(150, 0)
    found, chosen = first_step.cross_validated(
        process_judges.combined(runs, JUDGES), 3, 2, ("logistic regression", "boosting")
    )
    shells = process_judges.combined(runs, JUDGES)
    assert first_step.accuracy(found, shells) > 0.95 and len(chosen) == 3
    assert all(one.sum() == pytest.approx(1) and one.shape == (5,) for one in found)
    votes = [process_judges.plurality(run, JUDGES) for run in runs]
    assert process_judges.scores(runs, votes).accuracy < 0.9


def test_folds_keep_the_runs_of_a_question_together() -> None:
    runs = process_judges.combined(made_runs(50, 1), JUDGES)
    part = first_step.folds(runs, 5, 0)
    assert all(len(set(part[place : place + 5])) == 1 for place in range(0, 50, 5)) and len(set(part)) == 5


def test_judge_features_ignore_human_labels() -> None:
    [run] = made_runs(1, 2)
    other = run._replace(truth=4, labels=(1, 1, 1, 1))
    tables = [process_judges.judged_features(one, JUDGES, ["part"]) for one in (run, other)]
    assert (tables[0] == tables[1]).all()


class Chances:
    def __init__(self, values: list[float]) -> None:
        self.values = np.array(values)

    def predict_proba(self, table: np.ndarray) -> np.ndarray:
        return np.stack([1 - self.values, self.values], axis=1)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_first_error_distribution_sums_to_one(chances: list[float]) -> None:
    run = first_step.Run("q", np.zeros((len(chances), 1)), 0)
    found = first_step.distribution(Chances(chances), run)
    assert len(found) == len(chances) + 1 and found.min() >= 0 and found.sum() == pytest.approx(1)
    assert found[0] == pytest.approx(chances[0])


def test_page_is_skipped_if_its_recorded_data_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process_judges.main(["--data", str(tmp_path), "--pages", str(tmp_path)])
    assert "skipped: expected the recording agent_processbench_verdicts.jsonl.gz" in capsys.readouterr().out


def test_recorded_judges_have_verdicts_on_most_steps(shared_data: Path) -> None:
    from benchmarks.real.common import read_rows

    folder = shared_data / "real"
    if not (folder / process_judges.VERDICTS.file).is_file():
        pytest.skip(f"no {process_judges.VERDICTS.file} in {folder}")
    runs = process_judges.read_judged(read_rows(folder, process_judges.VERDICTS))
    assert {*process_judges.SMALL, process_judges.RIVAL} <= set(runs[0].verdicts)
    assert np.mean([np.isnan(run.verdicts[judge]).mean() for run in runs for judge in process_judges.SMALL]) < 0.1
