"""Rules that stop searches whose answer is settled, and their calibration."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_worlds import HashCritic, World, chain, noise, problems, talker

import search
from mas_gym.errors import ConfigError, DataError, DataNotFoundError, MASGymError
from mas_gym.internal.identity import digest_of, identity_of
from mas_gym.testing import check_planner
from search import load_planner, planner_spec
from search.compare.stop_thresholds import FEATURES, Check, Checked, calibrate_stop, fit
from search.planners.ask_tell import AskTell
from search.planners.normal_posterior import expected_excess
from search.planners.stop_rules import Confident, StopMap, read_stop

AT_END = ["bon:12", "mcts:12,3", "mcts:12,3,parallel=3", "mcts:12,3,leaf=bootstrap", "puct:12,3", "adaptive:12"]
AT_END += ["halving:12,3,width=4"]
BY_TURNS = ["sbs:4,3", "dvts:3,3", "rebase:9", "rebase:9,choose=best"]
RULES = ["stop=0.7", "stop=0.0"]


def with_stop(spec: str, rule: str) -> Any:
    return load_planner(f"{spec}{',' if ':' in spec else ':'}{rule}")


@pytest.mark.parametrize("spec", AT_END + BY_TURNS)
def test_search_with_stop_1_equals_a_search_without_a_rule(spec: str) -> None:
    whole, same = World(3), World(3)
    plan, never = whole.plan(load_planner(spec)), same.plan(with_stop(spec, "stop=1"))
    assert [one.state for one in never.candidates] == [one.state for one in plan.candidates]
    assert same.calls == whole.calls and never.stopped is None and sorted(same.evaluated) == sorted(whole.evaluated)


@pytest.mark.parametrize("spec", AT_END + BY_TURNS)
def test_search_with_stop_0_ends_at_the_first_check_with_an_answer(spec: str) -> None:
    whole, early = World(3), World(3)
    whole.plan(load_planner(spec))
    plan = early.plan(with_stop(spec, "stop=0.0"))
    assert early.calls < whole.calls and str(plan.stopped).startswith("settled at check 1: probability ")
    assert plan.best is not None and early.model.is_terminal(plan.best.state)
    assert all(one.score is not None for one in plan.candidates)


@pytest.mark.parametrize("spec", [*AT_END, *BY_TURNS])
@pytest.mark.parametrize("rule", RULES)
def test_planners_with_stop_rules_pass_the_planner_check(spec: str, rule: str) -> None:
    check_planner(with_stop(spec, rule), systems=("rpsv", "dylan"))


@pytest.mark.parametrize("spec", AT_END + BY_TURNS)
def test_stopped_searches_are_independent_of_concurrency_and_batches(spec: str, tmp_path: Path) -> None:
    planner = with_stop(spec, "stop=0.55")

    def found(concurrency: int, batch: int, **options: Any) -> dict[str, Any]:
        options |= {"policy": talker(batch), "critic": HashCritic(), "concurrency": concurrency}
        plans = search.run(planner, problems(12), mas=chain(3), raise_errors=True, **options)
        return {plan.problem_id: (plan.text, plan.usage.agent_calls, plan.stopped) for plan in plans}

    first = found(1, 1, store=tmp_path / "runs.db")
    assert first == found(7, 16) == found(3, 2, store=tmp_path / "runs.db")
    assert any(stopped for *_, stopped in first.values())


@pytest.mark.parametrize("spec", AT_END + BY_TURNS)
@pytest.mark.parametrize("calls", [3, 5, 13, 24])
def test_searches_with_stop_rules_return_an_answer_within_a_budget(spec: str, calls: int) -> None:
    options: dict[str, Any] = {"policy": talker(), "critic": HashCritic(), "budget": search.Budget(calls=calls)}
    plans = search.run(with_stop(spec, "stop=0.6"), problems(6), mas=chain(3), raise_errors=True, **options)
    assert all(plan.error is None and 0 < plan.usage.agent_calls <= calls for plan in plans)


@pytest.mark.parametrize("spec", ["bon:5", "mcts:6,2", "sbs:3,2", "adaptive:6"])
def test_nan_values_do_not_stop_a_search(spec: str) -> None:
    world = World(2, value=lambda path: math.nan)
    plan = world.plan(with_stop(spec, "stop=0.0"))
    assert plan.candidates and plan.stopped is None


@given(st.floats(-2, 2), st.floats(0.01, 3), st.floats(-3, 3))
@settings(max_examples=20, deadline=None)
def test_expected_excess_agrees_with_sampling(mean: float, deviation: float, level: float) -> None:
    rng, draws = random.Random(0), 20_000
    sampled = math.fsum(max(rng.gauss(mean, deviation) - level, 0.0) for _ in range(draws)) / draws
    assert expected_excess(mean, deviation, level) == pytest.approx(sampled, abs=5 * deviation / math.sqrt(draws))


class Trials:
    """An ask/tell algorithm that always extends the last node."""

    def init_tree(self) -> list[int]:
        return []

    def ask_batch(self, state: list[int], batch_size: int, actions: list[str]) -> Any:
        from types import SimpleNamespace

        return state, [SimpleNamespace(trial_id=i, parent_state=None) for i in range(batch_size)]

    def tell(self, state: list[int], trial_id: int, result: tuple[int, float]) -> list[int]:
        return [*state, result[0]]


def test_ask_tell_stops_by_the_rule() -> None:
    world = World(1)
    plan = world.plan(AskTell(Trials(), 20, stop=0.0))
    assert plan.stopped is not None and world.calls < 20


# ---- spelling


@pytest.mark.parametrize(
    "text",
    ["stop=1.5", "stop=-0.1", "stop=nan", "stop=true", "stop=high", "stop=settled:3"],
)
@pytest.mark.parametrize("spec", ["mcts:5,3", "bon:5", "sbs:5,3"])
def test_invalid_rules_are_rejected(spec: str, text: str) -> None:
    with pytest.raises(ConfigError, match="stop: expected"):
        with_stop(spec, text)


@pytest.mark.parametrize("rule", [Confident(0.9), None])
def test_stop_rules_round_trip_through_the_planner_spec(rule: Any) -> None:
    planner = search.MCTS(10, 3, stop=rule)
    assert load_planner(planner_spec(planner)) == planner
    assert planner.resized(5).stop == rule  # type: ignore[attr-defined]


@given(st.text(max_size=20))
def test_arbitrary_text_is_read_as_a_rule_or_rejected(text: str) -> None:
    try:
        read_stop(text)
    except MASGymError as error:
        assert "expected" in str(error)


def test_single_pass_and_training_runs_reject_stop_rules() -> None:
    with pytest.raises(ConfigError, match="single"):
        load_planner("single:stop=0.9")
    with pytest.raises(ConfigError, match=r"stop=0\.9"):
        search.MCTS(5, 3, stop=0.9).for_run(None, True)


# ---- maps


MAP = StopMap("BestOfN", "hash", {"value": 2.0, "agreement": 1.0}, -0.5, threshold=0.8)


def written(folder: Path, name: str = "stop.json", stop_map: StopMap = MAP, **changed: Any) -> Path:
    path = folder / name
    path.write_text(json.dumps(stop_map.to_dict() | changed), encoding="utf-8")
    return path


def test_calibration_file_identity_depends_on_its_content_and_not_its_path(tmp_path: Path) -> None:
    one, same = written(tmp_path), written(tmp_path, "copy.json", about={"task": "other"})
    other = written(tmp_path, "other.json", bias=-0.25)
    plans = [load_planner(f"bon:5,stop={path}") for path in (one, same, other)]
    first, second, third = (digest_of(identity_of(plan)) for plan in plans)
    assert first == second != third and plans[0] == plans[1] != plans[2]
    assert planner_spec(plans[0]) == f"bon:5,stop={one}"
    strict = load_planner(f"bon:5,stop={one}@0.95")
    assert digest_of(identity_of(strict)) != first and strict == load_planner(planner_spec(strict))


def test_calibration_for_another_planner_or_critic_is_rejected(tmp_path: Path) -> None:
    path = written(tmp_path)
    load_planner(f"bon:99,stop={path}").for_run(HashCritic(), False)
    for spec, critic in ((f"mcts:5,3,stop={path}", HashCritic()), (f"bon:5,stop={path}", search.ConstantCritic())):
        with pytest.raises(ConfigError, match="was calibrated for BestOfN with critic hash"):
            load_planner(spec).for_run(critic, False)


@pytest.mark.parametrize(
    "changed",
    [
        *({"schema": 2}, {"format": "x"}, {"threshold": 1.5}, {"planner": None, "points": 3}),
        *({"weights": weights} for weights in ({"color": 1.0}, {}, {"value": None})),
        *({"bias": bias} for bias in ("x", float("nan"))),
        *({"points": points} for points in ([[0, 0.5], [0, 0.6]], [[0, 0.5], [1, 0.4]], [[0, 2.0]])),
    ],
)
def test_damaged_calibration_files_are_rejected(tmp_path: Path, changed: dict[str, Any]) -> None:
    path = written(tmp_path, **changed)
    with pytest.raises(DataError, match="expected a stop map of schema 1"):
        load_planner(f"bon:5,stop={path}")


@pytest.mark.parametrize("content", ["", "[]", "{}", "null", "[" * 5000, "\N{SNOWMAN}"])
def test_files_that_are_not_calibrations_are_rejected(tmp_path: Path, content: str) -> None:
    (tmp_path / "stop.json").write_text(content, encoding="utf-8")
    with pytest.raises(DataError):
        load_planner(f"bon:5,stop={tmp_path / 'stop.json'}")
    with pytest.raises(DataNotFoundError, match="mas-gym calibrate"):
        load_planner(f"bon:5,stop={tmp_path / 'missing.json'}")


points = st.lists(st.tuples(st.floats(-5, 5), st.floats(0, 1)), min_size=1, max_size=6, unique_by=lambda p: p[0])


@given(points, st.floats(-10, 10), st.floats(-10, 10))
def test_calibration_maps_are_monotone_probabilities(raw: list[tuple[float, float]], a: float, b: float) -> None:
    xs, ps = sorted(x for x, _ in raw), sorted(p for _, p in raw)
    curve = StopMap("P", "c", {"value": 1.0}, points=tuple(zip(xs, ps, strict=True)))
    features = dict.fromkeys(FEATURES, 0.0)
    low, high = (curve.probability({**features, "value": x}) for x in sorted((a, b)))
    assert 0 <= low <= high + 1e-12 and high <= 1


# ---- calibration


class Right(HashCritic):
    """Values that are high for right answers, with noise."""

    def score(self, contexts: Any) -> list[float]:
        return [(0.8 if self.right(c) else -0.8) * noise("sure", c.state.text, c.state.question) for c in contexts]

    @staticmethod
    def right(context: Any) -> bool:
        number = int(context.state.question.split(":")[0].split()[-1])
        return context.state.text.endswith(f"Answer: {number % 4}")


CALIBRATED = ["bon:8", "mcts:8,3", "sbs:4,2"]


@pytest.mark.parametrize("spec", CALIBRATED)
@pytest.mark.parametrize("method", ["logistic", "isotonic"])
def test_calibrated_stop_rules_keep_the_accuracy_of_whole_searches(spec: str, method: Any) -> None:
    options: dict[str, Any] = {"mas": chain(3), "policy": talker(), "critic": Right()}
    found = calibrate_stop(spec, problems(60), method=method, **options)
    assert found.map.critic == "hash" and found.chosen.hit >= found.hit and len(found.searches) == 60
    stop = Confident(found.map.threshold, found.map)
    plans = list(search.run(replace(load_planner(spec), stop=stop), problems(60), raise_errors=True, **options))  # type: ignore[type-var]
    assert sum(bool(plan.correct) for plan in plans) / 60 >= found.hit - 0.1
    if spec != "sbs:4,2" and method == "logistic":
        assert found.chosen.coverage > 0.3 and any(plan.stopped for plan in plans)


def test_calibration_labels_equal_the_correctness_of_the_stopped_answer() -> None:
    options: dict[str, Any] = {"mas": chain(3), "policy": talker(), "critic": Right(), "raise_errors": True}
    found = calibrate_stop("sbs:4,2", problems(25), **{name: options[name] for name in ("mas", "policy", "critic")})
    assert {len(one.checks) for one in found.searches} == {2}
    at_once = {plan.problem_id: plan for plan in search.run("sbs:4,2,stop=0.0", problems(25), **options)}
    assert [one.checks[0].right for one in found.searches] == [at_once[one.problem].correct for one in found.searches]


def test_calibration_of_a_constant_critic_never_stops_early() -> None:
    # All values are equal, so only the number of passes is left; half of the answers are right at any check.
    checks = tuple(Check((1.0, 1.0, 0.5, math.log1p(n), 3.0), False) for n in range(1, 5))
    right = tuple(check._replace(right=True) for check in checks)
    searches = [Checked(str(i), (right if i % 2 else checks), True) for i in range(40)]
    found = fit(searches, "BestOfN", "sure")
    assert found.map.threshold == 1.0 and found.chosen.coverage == 0.0
    assert found.map.weights["value"] == 0.0
    assert found.map.probability(dict(zip(FEATURES, checks[0].features, strict=True))) == pytest.approx(0.5, abs=0.1)


def test_calibration_requires_both_outcomes_and_enough_problems() -> None:
    options: dict[str, Any] = {"mas": chain(2), "policy": talker(), "critic": HashCritic()}
    with pytest.raises(ConfigError, match="at least 20 dev problems"):
        calibrate_stop("bon:4", problems(5), **options)
    for spec in ("single", "sc:5"):
        with pytest.raises(ConfigError, match="no stop rule to calibrate"):
            calibrate_stop(spec, problems(25), **options)
    with pytest.raises(ConfigError, match="got none"):
        calibrate_stop("bon:1", problems(25), **options)
    check = Check((0.1, 0.1, 0.5, 0.7, 3.0), True)
    with pytest.raises(ConfigError, match="20 checks, all with right answers"):
        fit([Checked(str(i), (check,), True) for i in range(25)], "BestOfN", "c")
