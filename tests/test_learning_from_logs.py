"""Critics from logs: targets of shared prefixes, their continuations, and the baseline on features."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from search_worlds import chain, command, problems, said, talker
from test_recorded import imported, write_samples

import rewardmodels
import search
from mas_gym.errors import ConfigError, DataError
from mas_gym.tasks.base import question_digest
from rewardmodels import LabeledTree, collect, load_critic, stored_trees
from rewardmodels.model.feature_critic import FEATURES, features_of
from rewardmodels.model.training_questions import trained_questions
from rewardmodels.training.train_feature_critic import train_features
from search.store import recorded_states

SHARED = [("a", "b", "yes"), ("a", "b", "no 1"), ("a", "c", "no 2"), ("d", "e", "yes 3")]
ALONE = [("a", "yes"), ("b", "no"), ("c", "no")]


def trees(store: Path) -> list[LabeledTree]:
    return list(stored_trees(store))


def test_targets_are_means_over_samples_with_a_shared_prefix(tmp_path: Path) -> None:
    data = collect(trees(imported(tmp_path, SHARED)), "points", min_continuations=1)
    found = {example.chosen[2:]: example.chosen_target for example in data.examples}
    assert [round(target, 3) for parts, target in found.items() if len(parts) == 1] == [-0.333, 1.0]
    assert [round(target, 3) for parts, target in found.items() if len(parts) == 2] == [0.0, -1.0, 1.0]
    # a: 3, a/b: 2, a/c: 1, d: 1, d/e: 1.
    assert data.continuations == {1: 3, 2: 1, 3: 1}


def test_states_with_too_few_continuations_are_excluded(tmp_path: Path) -> None:
    source = trees(imported(tmp_path, SHARED))
    data = collect(source, "points", min_continuations=2)
    assert data.continuations == {2: 1, 3: 1}
    assert len([example for example in data.examples if example.depth < 2]) == 2
    # Ends are exact, however many samples reach them.
    assert len([example for example in data.examples if example.depth == 2]) == 4


def test_single_continuations_are_rejected_unless_allowed(tmp_path: Path) -> None:
    source = trees(imported(tmp_path, ALONE))
    with pytest.raises(DataError, match="min_continuations=1"):
        collect(source, "pairs")
    assert len(collect(source, "pairs", min_continuations=1)) > 0
    assert len(collect(source, "outcomes")) == 3


def test_logs_with_equal_agents_have_one_graph(tmp_path: Path) -> None:
    store = imported(tmp_path, SHARED)
    write_samples(tmp_path / "longer.jsonl", [("a", "b", "c", "d", "yes"), ("a", "b", "c", "d", "no")], "longer")
    search.import_transcripts(tmp_path / "longer.jsonl", store)
    data = collect(trees(store), "points")
    assert len(data.graphs) == 1 and data.trees == 2 and {example.task for example in data.examples} == {"recorded"}


def test_searched_runs_have_no_continuation_counts(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    list(search.run("mcts:8,3", problems(3), mas=chain(2), policy=talker(), training=True, store=path))
    data = collect(trees(path), "points")
    assert len(data) > 0 and data.continuations == {}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 questions with 6 samples each; samples with a short answer that others give are right more often."""
    folder, rng = tmp_path_factory.mktemp("log"), random.Random(0)
    rows = []
    for question in range(40):
        for _ in range(6):
            right = rng.random() < 0.5
            answer = question if right else rng.randint(100, 999)
            text = f"Final Answer: {answer}" if right or rng.random() < 0.3 else f"Perhaps. Final Answer: {answer}"
            messages = [{"role": "assistant", "name": "A", "content": f"step {rng.randint(0, 1)}"},
                        {"role": "assistant", "name": "B", "content": text}]  # fmt: skip
            rows.append({"question": f"What is {question}?", "messages": messages, "answer": str(question)})
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    search.import_transcripts(folder / "log.jsonl", folder / "runs.db")
    return folder / "runs.db"


@pytest.mark.parametrize("kind", ["orm", "masprm"])
def test_feature_critic_is_trained_and_loaded(kind: Any, log: Path, tmp_path: Path) -> None:
    recorded = search.Recorded(log)
    model = train_features(list(recorded_states(recorded, kind == "orm")), tmp_path / "features", kind)
    critic = load_critic(str(tmp_path / "features"))
    assert critic.name == "features" and critic.free and critic.terminal_only == (kind == "orm")
    assert critic.model == model and model.metrics["auc"] > (0.8 if kind == "orm" else 0.6)
    table = search.compare(["sc:6", "bon:6"], recorded=recorded, critics=critic)
    assert table.rows[1].hits[1].mean > 0.9


def test_training_rows_are_weighted_by_episode(tmp_path: Path) -> None:
    rows = list(recorded_states(search.Recorded(imported(tmp_path, [*SHARED, SHARED[0]])), False))
    counts = {"/".join(turn.text for turn in row.context.state.turns): (row.right, row.total) for row in rows}
    assert counts["a"] == (2, 4) and counts["a/b"] == (2, 3) and counts["a/b/yes"] == (2, 2) and counts["d"] == (1, 1)
    assert all(len(row.context.peers.answers) == 5 for row in rows)
    assert all(math.isfinite(value) for row in rows for value in features_of(row.context))
    assert len(features_of(rows[0].context)) == len(FEATURES)


def test_features_of_another_version_are_rejected(log: Path, tmp_path: Path) -> None:
    train_features(list(recorded_states(search.Recorded(log), True)), tmp_path / "f", "orm")
    file = tmp_path / "f" / "features.json"
    written = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(written | {"schema": 99}), encoding="utf-8")
    with pytest.raises(DataError, match="train the critic again"):
        load_critic(str(tmp_path / "f"))


def test_train_features_requires_both_outcomes_and_an_empty_folder(log: Path, tmp_path: Path) -> None:
    rows = list(recorded_states(search.Recorded(imported(tmp_path, [("a", "yes")], [("b", "yes")])), True))
    with pytest.raises(DataError, match=r"0 wrong \(questions: 2\)"):
        train_features(rows, tmp_path / "out", "orm")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("dear", encoding="utf-8")
    with pytest.raises(ConfigError, match="expected an empty folder"):
        train_features(rows, tmp_path / "mine", "orm")


def test_train_command_accepts_a_log(log: Path, tmp_path: Path) -> None:
    result = command("train", "orm", "--store", log, "--base", "features", "--out", tmp_path / "features")
    assert result.exit_code == 0 and "auc" in result.output, result.output
    assert "eval --recorded" in " ".join(result.output.split())
    result = command("train", "masprm", "--store", log, "--base", "features", "--out", tmp_path / "process")
    assert "mas-gym blame LATER.db" in " ".join(result.output.split()), result.output
    assert "cannot be combined" in said(
        command("train", "orm", "--store", log, "--base", "features", "--set", "seed=1")
    )


def test_feature_critic_of_single_continuations_is_an_error(tmp_path: Path) -> None:
    rows = [[(f"a{n}", "yes")] for n in range(4)] + [[(f"b{n}", "no")] for n in range(4)]
    store = imported(tmp_path, *rows)
    words = ("train", "masprm", "--store", store, "--base", "features", "--out", tmp_path / "features")
    assert "--min-continuations 1" in said(command(*words))
    done = command(*words, "--min-continuations", 1)
    assert done.exit_code == 0 and "does not read the text" in done.output, done.output


def test_evaluation_on_training_questions_is_rejected_with_the_remedy(log: Path, tmp_path: Path) -> None:
    def evaluated(folder: str, *words: object) -> Any:
        return command("eval", "--recorded", log, "--planner", "bon:4", "--critic", tmp_path / folder, *words)

    words = ("train", "orm", "--store", log, "--base", "features", "--out")
    assert command(*words, tmp_path / "all").exit_code == 0
    assert "--split held-out" in said(evaluated("all"))
    assert "--split train" in said(evaluated("all", "--split", "held-out"))
    assert command(*words, tmp_path / "part", "--split", "train").exit_code == 0
    assert "--split held-out" in said(evaluated("part"))
    done = evaluated("part", "--split", "held-out")
    assert done.exit_code == 0, done.output


def test_blame_with_a_critic_on_its_training_questions_is_rejected_with_the_remedy(log: Path, tmp_path: Path) -> None:
    def blamed(folder: str, *words: object) -> Any:
        return command("blame", log, "--critic", tmp_path / folder, *words)

    words = ("train", "masprm", "--store", log, "--base", "features", "--out")
    assert command(*words, tmp_path / "all").exit_code == 0
    assert "--split held-out" in said(blamed("all"))
    assert "--split train" in said(blamed("all", "--split", "held-out"))
    assert "--critic" in said(command("blame", log, "--split", "held-out"))
    trained = command(*words, tmp_path / "part", "--split", "train")
    # Long paths wrap the line.
    advised = f"mas-gym blame {log} --split held-out"
    assert "".join(advised.split()) in "".join(trained.output.split()), trained.output
    done = blamed("part", "--split", "held-out")
    assert done.exit_code == 0, done.output


def test_critics_trained_in_python_record_their_questions(log: Path, tmp_path: Path) -> None:
    asked = {question_digest(one.tree.states[0].question) for one in trees(log)}
    data = collect(trees(log), "outcomes")
    assert data.questions == asked
    trained = rewardmodels.train(data, tmp_path / "orm", kind="orm", head="bce", epochs=1)
    assert trained_questions(str(trained.folder)) == asked
    rows = list(recorded_states(search.Recorded(log), True))
    train_features(rows, tmp_path / "features", "orm")
    assert trained_questions(f"{tmp_path}/features") == asked
    assert trained_questions(f"ensemble:{tmp_path}/features#force=true,tiny-orm") == asked


@pytest.mark.slow
def test_language_model_critic_is_trained_from_a_log(log: Path, tmp_path: Path) -> None:
    result = command("train", "masprm", "--store", log, "--head", "mse", "--out", tmp_path / "m", "--set", "epochs=1")
    assert result.exit_code == 0, result.output
    critic = load_critic(str(tmp_path / "m"))
    assert isinstance(critic, rewardmodels.LearnedCritic)
    card = (tmp_path / "m" / "README.md").read_text(encoding="utf-8")
    assert "states by recorded continuations behind the target, 4" in card and "recorded transcripts" in card
    assert "one continuation" in result.output or 1 not in critic.info.data
