"""Searches of recorded runs: draws without replacement, exhausted recordings, outcomes, identity."""

import itertools
import json
import pickle
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_worlds import HashCritic, by_problem, chain, command, execute, problems, said, talker, way

import search
from mas_gym.errors import ConfigError, DataError, ExhaustedError, StoreError
from search.compare import select
from search.planners.voting import vote
from search.results.accuracy_at_k import any_right, best_right, majority_right, selection_curve

PLANNERS = [
    *("single", "sc:5", "sc:8,stop=0.9", "sc:5,weights=critic", "bon:20", "sbs:5,3", "mcts:10,3"),
    *("mcts:10,3,leaf=bootstrap", "mcts:10,3,parallel=4", "puct:10,3", "halving:8,3", "dvts:3,4", "rebase:9"),
    *("adaptive:20", "siblings:3", "bon:20,stop=0.6", "mcts:10,3,stop=0.6", "sbs:5,3,stop=0.6"),
    f"{__file__}:Greedy",
]


class Greedy(search.Planner):
    """The planner of the design's example: it has no idea of recorded runs."""

    def plan(self, model: Any, root: Any, rng: random.Random) -> Any:
        state = root
        while not model.is_terminal(state):
            [proposals] = yield [search.Propose(state, n=4)]
            states = [model.transition(state, proposal.action) for proposal in proposals]
            [values] = yield [search.Evaluate(states)]
            state = states[max(range(len(values)), key=values.__getitem__)]
        return search.Plan.single(state)


def write_samples(path: Path, samples: list[tuple[str, ...]], name: str = "q", **more: Any) -> None:
    """Append samples of one question: the texts of two agents, by turns; it is right if the last one is 'yes'."""
    with path.open("a", encoding="utf-8") as file:
        for texts in samples:
            turns = [{"role": "assistant", "name": f"agent{i % 2}", "content": text} for i, text in enumerate(texts)]
            row = {"question": f"Question {name}?", "messages": turns, "correct": "yes" in texts[-1], **more}
            file.write(json.dumps(row) + "\n")


def imported(folder: Path, *questions: list[tuple[str, ...]]) -> Path:
    for place, samples in enumerate(questions):
        write_samples(folder / "log.jsonl", samples, str(place))
    search.import_transcripts(folder / "log.jsonl", folder / "runs.db")
    return folder / "runs.db"


SAMPLES = [
    *(("plan a", "yes 1"), ("plan a", "no 2"), ("plan a", "yes 1"), ("plan b", "no 3"), ("plan c", "no 2", "yes 4")),
    *(("plan d", "yes 1"), ("plan d", "no 5"), ("plan e", "no 2")),
]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return imported(tmp_path, SAMPLES, SAMPLES[:3], SAMPLES[-1:])


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of a tree search by MAS-Gym."""
    path = tmp_path_factory.mktemp("searched") / "runs.db"
    list(search.run("mcts:6,3", problems(4), mas=chain(3), policy=talker(), critic=HashCritic(), store=path))
    return path


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory, searched: Path) -> list[search.Recorded]:
    logged = imported(tmp_path_factory.mktemp("logged"), SAMPLES, SAMPLES[:3], SAMPLES[-1:])
    return [search.Recorded(path, distinct=distinct) for path in (logged, searched) for distinct in (False, True)]


@pytest.mark.parametrize("spec", PLANNERS)
@pytest.mark.parametrize("place", range(4))
def test_every_planner_returns_answers_from_a_recorded_run(
    spec: str, place: int, recordings: list[search.Recorded]
) -> None:
    recorded = recordings[place]
    plans = list(search.run(spec, recorded=recorded, critic=HashCritic(), seed=1))
    assert len(plans) == len(recorded) and not [plan.error for plan in plans if plan.error]
    for plan in plans:
        held = recorded.tree(next(one for one in recorded if one.id == plan.problem_id))
        assert plan.usage.agent_calls <= sum(map(len, held.messages.values()))
        assert all(held.grades[c.state.digest].correct == c.correct for c in plan.candidates)


def test_ask_tell_continues_after_messages_are_exhausted(store: Path) -> None:
    class Widest:
        """Extends the root only, far more often than there are messages."""

        def init_tree(self) -> Any:
            return 0

        def ask_batch(self, state: Any, batch_size: int, actions: list[str]) -> Any:
            trial = type("Trial", (), {"trial_id": state, "parent_state": None})
            return state + 1, [trial] * batch_size

        def tell(self, state: Any, trial_id: Any, result: Any) -> Any:
            return state

    planner = search.AskTell(Widest(), n_trials=30, batch=3)
    plans = list(search.run(planner, recorded=search.Recorded(store), critic=HashCritic()))
    assert not [plan.error for plan in plans if plan.error]
    assert all(plan.usage.unrecorded > 0 for plan in plans)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("cd"), st.sampled_from(["yes", "no"])), min_size=1,
                max_size=12), st.integers(0, 5))  # fmt: skip
@settings(max_examples=10, deadline=None)
def test_passes_return_each_recorded_episode_once(
    tmp_path_factory: pytest.TempPathFactory, samples: list[tuple[str, ...]], seed: int
) -> None:
    recorded = search.Recorded(imported(tmp_path_factory.mktemp("log"), samples))
    [plan] = search.run("bon:15", recorded=recorded, critic=HashCritic(), seed=seed)
    assert Counter(way(one.state) for one in plan.candidates) == Counter("/".join(one) for one in samples)
    assert plan.usage.unrecorded == 15 - len(samples)


def test_draws_are_uniform_subsets(tmp_path: Path) -> None:
    samples = [("plan a", f"yes {i}") for i in range(3)] + [("plan b", f"no {i}") for i in range(3)]
    recorded = search.Recorded(imported(tmp_path, samples))
    drawn = Counter(
        frozenset(way(one.state) for one in plan.candidates)
        for seed in range(400)
        for plan in search.run("sc:2", recorded=recorded, seed=seed)
    )
    # 15 pairs, 27 times each on average; 6 is 4 standard deviations below.
    assert len(drawn) == 15 and min(drawn.values()) > 6


def test_distinct_messages_are_drawn_once(store: Path) -> None:
    recorded = search.Recorded(store, distinct=True)
    first = next(one for one in recorded if one.question == "Question 0?")
    world = recorded.tree(first)
    assert sorted(one.action.text for one in world.at(world.root)) == [f"plan {letter}" for letter in "abcde"]
    every = search.Recorded(store).tree(first)
    assert Counter(one.action.text for one in every.at(every.root))["plan a"] == 3


def test_states_without_terminal_descendants_are_excluded(searched: Path) -> None:
    recorded = search.Recorded(searched)
    [source, *_] = search.open_store(searched).plans()
    world = recorded.tree(recorded[0])
    assert len(world.messages) < sum(not source.tree.is_terminal(node) for node in range(len(source.tree)))
    assert all(world.messages.values())


def test_request_beyond_the_recorded_messages_raises_in_the_planner(store: Path) -> None:
    class Counting(search.Planner):
        needs_critic = False

        def plan(self, model: Any, root: Any, rng: random.Random) -> Any:
            [first] = yield [search.Propose(root, 100)]
            with pytest.raises(ExhaustedError):
                yield [search.Propose(root, 1)]
            state = model.transition(root, first[0].action)
            replies = yield [search.Propose(root, 2), search.Propose(state, 1)]
            assert [len(reply) for reply in replies] == [0, 1]
            while not model.is_terminal(state):
                state = model.transition(state, replies[1][0].action)
                if not model.is_terminal(state):
                    replies = yield [search.Propose(root, 1), search.Propose(state, 1)]
            return search.Plan.single(state)

    plans = list(search.run(Counting(), recorded=store, raise_errors=True))
    assert min(plan.usage.unrecorded for plan in plans) > 90


def test_planner_that_repeats_exhausted_requests_fails(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stubborn(search.Planner):
        needs_critic = False

        def plan(self, model: Any, root: Any, rng: random.Random) -> Any:
            while True:
                try:
                    yield [search.Propose(root, 1)]
                except ExhaustedError:
                    continue

    monkeypatch.setattr("search.engine.one_search.MAX_LOCAL_ROUNDS", 50)
    assert all("50 consecutive rounds" in str(plan.error) for plan in search.run(Stubborn(), recorded=store))


def test_recorded_outcomes_replace_grades(tmp_path: Path) -> None:
    turn = {"role": "assistant", "name": "A", "content": "The answer is 5.", "usage": {"completion_tokens": 7}}
    rows = [{"question": "2 + 3?", "messages": [turn | {"content": f"{i}: it is 5."}], "answer": "5", "correct": i > 1,
             "score": 0.5} for i in range(4)]  # fmt: skip
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    search.import_transcripts(path, tmp_path / "runs.db")
    [plan] = search.run("sc:4", recorded=tmp_path / "runs.db")
    assert sorted(bool(one.correct) for one in plan.candidates) == [False, False, True, True]
    assert {one.answer for one in plan.candidates} == {"5"}


def test_draws_depend_only_on_the_seed(store: Path) -> None:
    runs = [
        by_problem(search.run("sc:3", recorded=search.Recorded(store), seed=seed, concurrency=concurrency))
        for seed, concurrency in ((1, 1), (1, 64), (2, 1))
    ]
    assert runs[0] == runs[1] != runs[2]


def test_stored_searches_depend_on_the_recorded_content(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.db"
    first = by_problem(search.run("bon:4", recorded=store, critic=HashCritic(), store=out))
    assert first == by_problem(search.run("bon:4", recorded=store, critic=HashCritic(), store=out))
    with search.open_store(out) as opened:
        [info] = opened.runs()
        assert {outcome.problem_id: outcome.unrecorded for outcome in opened.outcomes()} == {
            key: plan["usage"]["unrecorded"] for key, plan in first.items()
        }
    list(search.run("bon:4", recorded=search.Recorded(store, distinct=True), critic=HashCritic(), store=out))
    write_samples(tmp_path / "more.jsonl", SAMPLES[:2], "0")
    search.import_transcripts(tmp_path / "more.jsonl", store)
    list(search.run("bon:4", recorded=search.Recorded(store, "more"), critic=HashCritic(), store=out))
    with search.open_store(out) as opened:
        assert len(opened.runs()) == 3 and info.run in {one.run for one in opened.runs()}


def test_search_of_a_recorded_run_can_write_to_the_same_store(store: Path) -> None:
    first = by_problem(search.run("sc:3", recorded=store, store=store))
    assert first == by_problem(search.run("sc:3", recorded=store, store=store))
    with search.open_store(store) as opened:
        assert len(opened.runs()) == 2


def test_table_reports_the_share_of_searches_that_exhausted_the_recording(store: Path) -> None:
    table = search.compare(["sc:2", "sc:8"], recorded=store, seeds=range(4))
    assert [row.bounded for row in table.rows] == [pytest.approx(1 / 3), pytest.approx(2 / 3)]
    assert "Bound" in str(table) and "Bound" in table.to_markdown() and '"bounded"' in table.to_json()


def test_options_incompatible_with_recorded_runs_are_rejected(store: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="recorded="):
        search.run("single", recorded=store, mas="rpsv")
    with pytest.raises(ConfigError, match="got neither"):
        search.run("single")
    with pytest.raises(DataError, match="expected one of the 3 problems"):
        list(search.run("single", problems(1), recorded=store))
    changed = replace(search.Recorded(store)[0], answer="another")
    with pytest.raises(DataError, match="got another question, answer or kind"):
        list(search.run("single", [changed], recorded=store))
    write_samples(tmp_path / "two.jsonl", SAMPLES[:2])
    search.import_transcripts(tmp_path / "two.jsonl", store)
    with pytest.raises(StoreError, match="expected one run"):
        search.Recorded(store)


def test_recorded_run_is_pickled_by_path(store: Path) -> None:
    recorded = search.Recorded(store, distinct=True)
    copied = pickle.loads(pickle.dumps(recorded))
    assert copied.identity() == recorded.identity() and list(copied) == list(recorded)


ANSWERED = st.lists(st.tuples(st.sampled_from([None, "a", "b", "c"]), st.booleans()), min_size=1, max_size=6)


@given(ANSWERED, st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_majority_right_function_equals_enumeration_over_all_draws(
    answered: list[tuple[str | None, bool]], k: int
) -> None:
    k = min(k, len(answered))
    votes = [
        answered[draw[vote([answered[i][0] for i in draw], [1.0] * k)]][1]
        for draw in itertools.permutations(range(len(answered)), k)
    ]
    assert majority_right(answered, k) == pytest.approx(sum(votes) / len(votes))


@given(st.lists(st.tuples(st.sampled_from([0.1, 0.5, 0.9]), st.booleans()), min_size=1, max_size=6), st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_best_right_and_any_right_functions_equal_enumeration_over_all_draws(
    scored: list[tuple[float, bool]], k: int
) -> None:
    k = min(k, len(scored))
    draws = [[scored[i] for i in draw] for draw in itertools.permutations(range(len(scored)), k)]
    best = [max(draw, key=lambda one: one[0])[1] for draw in draws]
    assert best_right(scored, k) == pytest.approx(sum(best) / len(best))
    found = [any(right for _, right in draw) for draw in draws]
    assert any_right([right for _, right in scored], k) == pytest.approx(sum(found) / len(found))


def test_selection_curves_agree_with_drawn_searches(tmp_path: Path) -> None:
    rng = random.Random(0)
    questions = [[("plan", rng.choice(["yes", "no a", "no b"])) for _ in range(9)] for _ in range(3)]
    recorded = search.Recorded(imported(tmp_path, *questions))
    found = select(recorded, HashCritic(), ks=[1, 4, 20])
    drawn = search.compare(["sc:4", "bon:4"], recorded=recorded, critics=HashCritic(), seeds=range(60))
    for row, label in zip(drawn.rows, ("majority", "best + hash"), strict=True):
        [accuracy] = [point.accuracy for point in found[label].points if point.k == 4]
        # 180 searches: the standard deviation of their mean is at most 0.037.
        assert abs(row.hits[1].mean - accuracy) < 0.11
    assert [point.bounded for point in found["any"].points] == [0, 0, 1]
    assert found["any"].points[-1].accuracy == sum("yes" in str(samples) for samples in questions) / 3
    assert found["best + hash"].difference(found["majority"], 4).problems == 3
    assert "Fewer than k" in str(found) and len(found.table().lines) == 9


def test_selection_rejects_distinct_messages_and_unscored_samples(store: Path) -> None:
    with pytest.raises(DataError, match="distinct=False"):
        select(search.Recorded(store, distinct=True))
    with pytest.raises(ConfigError, match="compares samples with one another"):
        select(store, "agreement")
    with pytest.raises(ConfigError, match="scored candidates"):
        selection_curve(search.run("sc:3", recorded=store), "best", [1])


def test_eval_recorded_prints_table_and_curves(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = command("eval", "--recorded", store, "--planner", "sc:5", "--planner", "bon:20", "--critic", "random",
                     "--seeds", "1,2", "--json", out)  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "Bound" in result.stdout and "best + random" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    written = json.loads(out.read_text(encoding="utf-8"))
    assert {one["rule"] for one in written["meta"]["selection"]} == {"majority", "best", "any"}
    assert [row["bounded"] for row in written["rows"]] == [pytest.approx(2 / 3), 1.0]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--mas", "rpsv"), "leave out --recorded, or --mas"),
        (("--program", "agents.py:solve", "--program-temperature", "1"), "--program and --program-temperature"),
        (("--workers", "2"), "or --workers"),
        (("--ray", "local", "--actors", "2"), "or --ray and --actors"),
        (("--task", "ordering"), "or --task"),
        (("-n", "9"), "at most 3"),
        (("--run", "nobody"), "expected one run 'nobody'"),
    ],
)
def test_eval_recorded_rejects_conflicting_options(options: tuple[str, ...], reason: str, store: Path) -> None:
    result = command("eval", "--recorded", store, "--planner", "single", *options)
    assert result.exit_code and reason in said(result)


def test_eval_distinct_requires_recorded() -> None:
    assert "expected --recorded" in said(command("eval", "--distinct"))


def test_equal_episodes_have_their_majority_outcome(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    turn = [{"role": "assistant", "name": "A", "content": "same"}]
    rows = [{"question": name, "messages": turn, "correct": correct}
            for name, outcomes in (("most", [1, 1, 0]), ("tie", [1, 0])) for correct in outcomes]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    search.import_transcripts(path, tmp_path / "runs.db")
    recorded = search.Recorded(tmp_path / "runs.db")
    found = {one.question: plan for one in recorded for plan in search.run("sc:5", [one], recorded=recorded)}
    assert found["most"].correct and not found["tie"].correct
    assert [len(found[name].candidates) for name in ("most", "tie")] == [3, 2]


def test_damaged_recordings_are_rejected(store: Path) -> None:
    execute(store, "UPDATE documents SET document = zeroblob(9)")
    with pytest.raises(StoreError, match="damaged"):
        list(search.run("single", recorded=store))
