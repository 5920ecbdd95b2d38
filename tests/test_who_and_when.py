"""Who failed, and at which step: the rules, the features, and the cross-validation of the page."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.real import who_and_when
from benchmarks.real.who_and_when import (
    GENERATED,
    HAND_CRAFTED,
    POSITION,
    SPEAKER,
    TEXT,
    TRUTH,
    FailedRun,
    Setting,
    blame,
    chances,
    features,
    fit,
    folds,
    read_runs,
    scores,
)

RUN = FailedRun("r", "How many?", GENERATED, ("A", "B", "A"), ("I assume 3.", "error: x", "It is 3."), "4", "B", 1)


def made(count: int) -> list[FailedRun]:
    """Return runs in which the message with "assume" is the mistake."""
    runs = []
    for number in range(count):
        step = number % 4
        texts = tuple("I assume so." if place == step else "The page says so." for place in range(4))
        names = ("A", "B", "C", "D")
        runs.append(FailedRun(f"r{number}", f"q{number // 2}", GENERATED, names, texts, "4", names[step], step))
    return runs


def test_rules_blame_the_message_and_its_agent() -> None:
    found = {name: rule(RUN) for name, rule in who_and_when.RULES.items()}
    assert found["random"].agents == {"A": 0.5, "B": 0.5}
    assert found["random"].steps[2] == pytest.approx(1 / 3)
    assert (found["last message"].agents, found["last message"].steps) == ({"A": 1.0}, {2: 1.0})
    assert (found["most frequent agent"].agents, found["most frequent agent"].steps) == ({"A": 1.0}, {0: 1.0})
    agents, steps = scores([RUN], [found["random"]])
    assert (agents.tolist(), steps.tolist()) == ([0.5], [pytest.approx(1 / 3)])


def test_blame_names_the_agent_with_the_largest_total_probability_and_the_most_likely_step() -> None:
    found = blame(RUN, np.array([0.3, 0.4, 0.3]))
    assert (found.agents, found.steps) == ({"A": 1.0}, {1: 1.0})


def test_features_have_a_row_per_message_and_only_truth_features_use_the_answer() -> None:
    other = RUN._replace(truth="3")
    blind, informed = (POSITION, SPEAKER, TEXT), (TRUTH,)
    assert features(RUN, blind).shape[0] == len(RUN.texts)
    assert np.array_equal(features(RUN, blind), features(other, blind))
    assert not np.array_equal(features(RUN, informed), features(other, informed))
    for groups in (blind, informed):
        moved = RUN._replace(agent="A", step=0)
        assert np.array_equal(features(RUN, groups), features(moved, groups))


def test_folds_keep_the_runs_of_a_question_together() -> None:
    runs = made(20)
    places = folds(runs, 5, 1)
    assert {len(set(places[i : i + 2])) for i in range(0, 20, 2)} == {1}
    assert len(set(places)) == 5


def test_model_finds_marked_mistakes() -> None:
    runs = made(24)
    setting = Setting((POSITION, SPEAKER, TEXT), 0.1)
    model = fit(runs[:16], setting)
    for run in runs[16:]:
        shares = chances(model, run, setting)
        assert shares.sum() == pytest.approx(1)
        assert blame(run, shares).steps == {run.step: 1.0}


def test_recorded_runs_are_read_with_their_mistakes(shared_data: Path) -> None:
    folder = shared_data / "real"
    if not (folder / "who_and_when.jsonl.gz").is_file():
        pytest.skip(f"no recorded runs in {folder}")
    runs = read_runs(folder)
    assert {run.subset for run in runs} == {GENERATED, HAND_CRAFTED}
    assert len({run.name for run in runs}) == len(runs)
    assert all(0 <= run.step < len(run.texts) == len(run.speakers) for run in runs)
    # Two runs name an agent that did not write the message with the mistake.
    assert np.mean([run.speakers[run.step] == run.agent for run in runs]) > 0.95
