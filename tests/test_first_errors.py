"""Critics on transcripts whose first wrong step is known: prediction, F1, AUC, pairs, and the command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import mas_gym
import search
from benchmarks.tiny.truth import first_error
from mas_gym.cli import app
from mas_gym.errors import ConfigError, CriticError, DataError
from mas_gym.policies import load_policy
from search import ConstantCritic, PolicyLikelihood, ScoringContext
from search.compare import bench_critic
from search.compare.blame import falls, largest_fall
from search.compare.first_errors import Predictor, Threshold, choose_threshold, f1_score
from search.compare.transcripts import NOBODY, LabeledTranscript, Scored, divide, read_labeled


class Marks:
    """Reads a state's value from the end of its last message, as in ``"... =0.5"``."""

    name, free = "marks", False

    def __init__(self, terminal_only: bool = False) -> None:
        self.terminal_only = terminal_only

    def score(self, contexts: Sequence[ScoringContext]) -> list[float]:
        return [float(context.state.text.rpartition("=")[2]) for context in contexts]


def marked(problem: str, label: int, *values: float, agents: Sequence[str] = ()) -> dict[str, Any]:
    steps = [f"step ={value}" for value in values]
    row: dict[str, Any] = {"problem": problem, "steps": steps, "label": label}
    return row | ({"agents": list(agents)} if agents else {})


def written(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def scored(label: int, *values: float, problem: str = "q") -> Scored:
    return Scored(LabeledTranscript("id", problem, ("step",) * max(1, len(values)), label), values)


def test_f1_is_the_harmonic_mean_in_percent() -> None:
    labels = np.array([0, 1, 2, 3, NOBODY, NOBODY])
    predicted = np.array([0, 1, 2, 0, NOBODY, 4])
    assert f1_score(predicted, labels) == pytest.approx(100 * 2 * 0.75 * 0.5 / 1.25)
    assert f1_score(np.full(6, NOBODY), labels) == 0


def test_threshold_rule_finds_the_first_value_below_the_threshold() -> None:
    predictor = Predictor([scored(1, 0.9, 0.2, 0.1), scored(NOBODY, 0.9, 0.5), scored(0)])
    assert predictor.predict(Threshold("value", 0.5)).tolist() == [1, NOBODY, -2]
    assert predictor.predict(Threshold("value", 0.95)).tolist() == [0, 0, -2]


def test_fall_rule_finds_the_largest_fall() -> None:
    # The value before the first step is the mean of the first values, 0.4.
    predictor = Predictor([scored(2, 0.8, 0.7, -0.3), scored(0, 0.0, 0.1)])
    assert predictor.predict(Threshold("fall", 0.2)).tolist() == [2, 0]
    assert predictor.predict(Threshold("fall", 0.3)).tolist() == [2, NOBODY]
    assert falls([0.8, 0.7, -0.3], 0.4) == pytest.approx([-0.4, 0.1, 1.0])
    assert largest_fall([0.6, 0.65], 0.4) == (1, 0.0)


def test_chosen_threshold_separates_transcripts_with_and_without_errors() -> None:
    dev = [scored(1, 0.9, 0.1), scored(0, 0.2, 0.3), scored(NOBODY, 0.8, 0.7), scored(NOBODY, 0.9, 0.6)]
    threshold, f1 = choose_threshold(dev, ["value"])
    assert f1 == 100
    assert 0.3 <= threshold.at <= 0.6
    with pytest.raises(ConfigError, match="with and without an error"):
        choose_threshold(dev[:2])


def test_metrics_equal_a_hand_computation(tmp_path: Path) -> None:
    rows = [
        marked("a", 1, 0.9, -0.8, agents=("Reader", "Solver")),
        marked("a", NOBODY, 0.8, 0.7, agents=("Reader", "Solver")),
        marked("b", 0, 0.6, -0.5, agents=("Reader", "Solver")),
        marked("b", NOBODY, -0.4, 0.5, agents=("Reader", "Solver")),
    ]
    found = bench_critic(Marks(), written(tmp_path / "t.jsonl", rows), threshold=0.0)
    assert (found.transcripts, found.wrong, found.failed) == (4, 2, {})
    assert (found.first_error, found.no_error, found.f1, found.agent) == (0.5, 0.5, 50, 0.5)
    # Of one question and length: 0.7 over -0.8; -0.4 under 0.6; 0.5 over -0.5.
    assert (found.pairwise, found.pairs) == (pytest.approx(2 / 3), 3)
    # Without an error: 0.9, 0.8, 0.7, -0.4, 0.5; with one: -0.8, 0.6, -0.5.
    assert found.auc == pytest.approx((3 + 3 + 3 + 2 + 2) / 15)
    assert found.by_depth[1].auc == pytest.approx(2 / 3)
    assert found.by_depth[2].right == 0.5
    assert found.cost.reward_calls == 8
    assert json.loads(json.dumps(found.to_dict()))["threshold"] == {"rule": "value", "at": 0.0}


def test_outcome_critic_has_no_first_error_metrics(tmp_path: Path) -> None:
    rows = [marked("a", 1, -1.0, -0.8), marked("b", NOBODY, -1.0, 0.7)]
    found = bench_critic(Marks(terminal_only=True), written(tmp_path / "t.jsonl", rows), threshold=0.0)
    assert (found.first_error, found.no_error, found.f1, found.threshold) == (None, None, None, None)
    assert (found.auc, list(found.by_depth), found.cost.reward_calls) == (1.0, [2], 2)


def test_threshold_is_chosen_on_separate_transcripts(tmp_path: Path) -> None:
    rows = [marked(f"question {i}", NOBODY if i % 2 else 1, 0.5, 0.5 if i % 2 else -0.5) for i in range(60)]
    transcripts = read_labeled(written(tmp_path / "t.jsonl", rows))
    dev, rest, how = divide(transcripts)
    assert 4 < len(dev) < 25
    assert {one.problem for one in dev}.isdisjoint(one.problem for one in rest)
    assert "hash" in how
    found = bench_critic(Marks(), transcripts)
    assert (found.transcripts, found.f1, found.dev_f1) == (len(rest), 100, 100)
    marked_rows = [row | {"split": "dev" if i < 4 else "test"} for i, row in enumerate(rows)]
    assert len(divide(read_labeled(written(tmp_path / "s.jsonl", marked_rows)))[0]) == 4


def test_file_with_only_dev_transcripts_is_rejected(tmp_path: Path) -> None:
    rows = [marked(f"question {i}", NOBODY if i else 1, 0.5, -0.5) | {"split": "dev"} for i in range(2)]
    with pytest.raises(ConfigError, match="only dev transcripts"):
        bench_critic(Marks(), written(tmp_path / "t.jsonl", rows))


def test_policy_likelihood_requires_log_probabilities(tmp_path: Path) -> None:
    row = marked("a", 1, 0.9, -0.8)
    with pytest.raises(CriticError, match="policy-likelihood"):
        bench_critic(PolicyLikelihood(), written(tmp_path / "t.jsonl", [row]), threshold=0.0)
    known = [row | {"tokens": [1, 1], "logprobs": [-0.1, -9.0]}, marked("b", NOBODY, 0, 0)]
    known[1] |= {"tokens": [1, 1], "logprobs": [-0.1, -0.1]}
    found = bench_critic(PolicyLikelihood(), written(tmp_path / "k.jsonl", known), threshold=0.3)
    assert (found.f1, found.cost.reward_calls) == (100, 0)


def test_steps_in_an_illegal_order_are_rejected(tmp_path: Path) -> None:
    row = marked("a", 1, 0.9, -0.8, agents=("Reader", "Solver")) | {"mas": "rpsv"}
    with pytest.raises(DataError, match=r"a step of Planner.*a step of 'Solver'"):
        bench_critic(Marks(), written(tmp_path / "t.jsonl", [row]), threshold=0.0)


def labeled_passes(number: int) -> list[dict[str, Any]]:
    """Return single passes of the bundled agents over Ordering, with their first errors."""
    task, mas = mas_gym.load_task("ordering", split="test", limit=number), mas_gym.load_mas("logic")
    rows = []
    for plan in search.run("single", task, mas=mas, policy=load_policy("tiny"), seed=14):
        problem, nodes = task.problem(plan.problem_id), [plan.tree[node] for node in plan.tree.path(plan.best.node)[1:]]
        spoken = [(mas.agents[node.state.speaker].name, node.state.text) for node in nodes]
        error = first_error(problem, spoken)
        rows.append(
            {
                "problem": problem.question,
                "steps": [text for _, text in spoken],
                "label": NOBODY if error is None else error.place,
                "agents": [agent for agent, _ in spoken],
                "mas": mas.name,
                "tokens": [node.tokens for node in nodes],
                "logprobs": [node.logprob for node in nodes],
            }
        )
    return rows


def test_bench_critic_command_evaluates_a_data_set(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    data, out = tmp_path / "test.parquet", tmp_path / "b.json"
    parquet.write_table(pyarrow.Table.from_pylist(labeled_passes(6)), data)
    rows = read_labeled(data)
    assert len(rows) == 6
    assert {one.mas for one in rows} == {"logic"}
    command = ["bench-critic", "--critic", "constant:0", "--critic", "policy-likelihood", "--threshold", "0.48"]
    done = CliRunner().invoke(app, [*command, "--data", str(data), "--json", str(out)])
    assert done.exit_code == 0, done.output
    assert "6 transcripts measured" in done.output
    first, second = json.loads(out.read_text(encoding="utf-8"))["critics"]
    # Every value of the constant is below the threshold, so the first message is always named.
    assert first["first_error"] == pytest.approx(sum(one.label == 0 for one in rows) / first["wrong"])
    assert (first["no_error"] or 0, first["auc"], second["critic"]) == (0, 0.5, "policy-likelihood")


@pytest.mark.parametrize(
    "options, said",
    [
        (["--rule", "fal"], "did you mean 'fall'"),
        (["--threshold", "0", "--dev", "t.jsonl"], "leave out one of them"),
        (["--mas", "rpvs"], "did you mean 'rpsv'"),
    ],
    ids=["rule", "dev", "mas"],
)
def test_mistyped_options_are_rejected(options: list[str], said: str, tmp_path: Path) -> None:
    file = written(tmp_path / "t.jsonl", [marked("a", 1, 0.9, -0.8)])
    done = CliRunner().invoke(app, ["bench-critic", "--critic", "constant:0", "--data", str(file), *options])
    assert done.exit_code == 2
    assert said in " ".join(done.output.replace("│", " ").split())


def test_f1_without_wrong_transcripts_is_undefined() -> None:
    found = bench_critic(ConstantCritic(), [LabeledTranscript("a", "q", ("s",), NOBODY)], threshold=-1.0)
    assert (found.first_error, found.no_error, found.f1, found.auc) == (None, 1.0, None, 0.5)
