"""Critics that others recorded, and combinations of critics."""

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from search_worlds import HashCritic, chain, command, problems, said, talker
from test_recorded import imported

import search
from mas_gym.errors import ConfigError, CriticError, DataError, UnknownNameError
from mas_gym.logs import read_transcripts
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.state import Action
from rewardmodels import load_critic
from search.calibrated_critics import Calibrated, read_model
from search.compare.critic_fitting import calibrate_critics, write_calibrated
from search.compare.first_errors import bench_critic
from search.compare.transcripts import read_labeled
from search.critics import Ensemble, Vote
from search.protocol import ScoringContext
from search.store import RecordedCritic, RecordedState


def judged(path: Path, *samples: list[dict[str, Any]], question: str = "Why?") -> Path:
    """Import samples of one question; each message has a text and may have a label, a value and verdicts."""
    rows = [{"question": question, "correct": True, "messages": [
        {"role": "assistant", "name": f"agent{place % 2}", "content": one.pop("text"), **one}
        for place, one in enumerate(sample)]} for sample in samples]  # fmt: skip
    log = path / f"{len(list(path.iterdir()))}.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    search.import_transcripts(log, path / "runs.db")
    return path / "runs.db"


def values_on(store: Path, critic: search.Critic) -> dict[str, float]:
    """Return the critic's value of each state of a recorded run, by its texts."""
    [plan] = search.run("bon:9", recorded=store, critic=critic, raise_errors=True)
    return {"/".join(turn.text for turn in node.state.turns): node.value for node in plan.tree if node.id}


STEPS: list[dict[str, Any]] = [
    {"text": "a", "value": 0.5, "verdicts": {"strict": -1, "kind": 1}, "label": 1},
    {"text": "tool", "verdicts": {"kind": None}},
    {"text": "b", "value": -0.25, "verdicts": {"strict": 1}},
]


def test_recorded_value_applies_until_the_next_value(tmp_path: Path) -> None:
    store = judged(tmp_path, [dict(one) for one in STEPS])
    assert values_on(store, load_critic(f"recorded:{store}")) == {"a": 0.5, "a/tool": 0.5, "a/tool/b": -0.25}
    assert values_on(store, load_critic(f"recorded:{store}#judge=strict")) == {"a": -1, "a/tool": -1, "a/tool/b": 1}
    assert values_on(store, RecordedCritic(store, judge="kind")) == {"a": 1, "a/tool": 1, "a/tool/b": 1}
    assert values_on(store, RecordedCritic(store, judge="labels")) == {"a": 1, "a/tool": 1, "a/tool/b": 1}


def test_recorded_values_of_a_shared_prefix_are_averaged(tmp_path: Path) -> None:
    both = [[{"text": "a", "verdicts": {"j": verdict}}, {"text": str(verdict), "verdicts": {"j": verdict}}]
            for verdict in (1, -1, -1)]  # fmt: skip
    found = values_on(judged(tmp_path, *both), load_critic(f"recorded:{tmp_path}/runs.db#judge=j"))
    assert found == {"a": pytest.approx(-1 / 3), "a/1": 1, "a/-1": -1}


def test_values_of_an_earlier_search_score_a_recorded_run(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    first = list(search.run("bon:4", problems(3), mas=chain(2), policy=talker(), critic=HashCritic(), store=path))
    again = list(search.run("bon:4", recorded=path, critic=RecordedCritic(path)))
    chosen = {plan.problem_id: (plan.answer, plan.best.score) for plan in first}
    assert {plan.problem_id: (plan.answer, plan.best.score) for plan in again} == chosen


def test_recorded_critic_error_names_the_missing_value(tmp_path: Path) -> None:
    store = judged(tmp_path, [{"text": "a", "verdicts": {"j": 1}}])
    with pytest.raises(DataError, match=r"for the values of a judge \(j\), use recorded:"):
        load_critic(f"recorded:{store}")
    with pytest.raises(UnknownNameError, match="'k'"):
        load_critic(f"recorded:{store}#judge=k")
    with pytest.raises(ConfigError, match="got no file"):
        load_critic("recorded")
    (tmp_path / "other").mkdir()
    other = imported(tmp_path / "other", [("x", "yes")])
    [plan] = search.run("bon:1", recorded=other, critic=RecordedCritic(store, judge="j"))
    assert plan.error is not None and "no value is recorded" in plan.error


def test_each_recorded_value_counts_as_the_given_number_of_calls(tmp_path: Path) -> None:
    store = judged(tmp_path, [{"text": "a", "value": 1}, {"text": "b", "value": 1}])
    [one] = search.run("bon:1", recorded=store, critic=load_critic(f"recorded:{store}"))
    [three] = search.run("bon:1", recorded=store, critic=load_critic(f"recorded:{store}#calls=3"))
    both = Ensemble([RecordedCritic(store, calls=3), HashCritic(), search.ConstantCritic(0)])
    [mixed] = search.run("bon:1", recorded=store, critic=both)
    assert [plan.usage.reward_calls for plan in (one, three, mixed)] == [2, 6, 8]


def test_vote_without_a_verdict_raises(tmp_path: Path) -> None:
    first = [{"text": "a", "verdicts": {"x": 1, "y": -1, "z": 0}}, {"text": "b", "verdicts": {"y": 1}}]
    store = judged(tmp_path, first, [{"text": "c", "verdicts": {"x": 1}}])
    spec = ",".join(f"recorded:{store}#judge={name}" for name in "xyz")
    vote = load_critic(f"vote:{spec}")
    assert values_on(store, vote) == {"a": 0, "a/b": 1, "c": 1} and vote.calls == 3
    with pytest.raises(CriticError, match="no value is recorded"):
        values_on(store, Vote(vote.members[2:]))


@pytest.mark.parametrize("verdicts", [{"j": float("nan")}, {"j": "right"}, {"": 1}, [1]])
def test_broken_verdicts_count_as_broken_lines(verdicts: Any, tmp_path: Path) -> None:
    rows = [{"question": "q", "messages": [{"role": "assistant", "content": "a", "verdicts": one}]}
            for one in (verdicts, {"j": 1})]  # fmt: skip
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    found = search.import_transcripts(tmp_path / "log.jsonl", tmp_path / "runs.db")
    assert (found.transcripts, found.broken) == (1, 1)


def test_recorded_labels_of_agent_processbench_have_f1_100(shared_data: Path, tmp_path: Path) -> None:
    log = shared_data / "real" / "agent_processbench_hotpotqa.jsonl.gz"
    first = next(read_transcripts(log))
    assert len({judge for message in first.messages for judge in message.verdicts}) == 20
    search.import_transcripts(log, tmp_path / "runs.db")
    found = bench_critic(RecordedCritic(tmp_path / "runs.db", judge="labels"), read_labeled(tmp_path / "runs.db"))
    assert found.f1 == 100.0


def test_bench_critic_command_accepts_recorded_judges(tmp_path: Path) -> None:
    for question in range(12):
        wrong = question % 2
        steps = [{"text": f"step {question}", "label": 1, "verdicts": {"j": 1}},
                 {"text": "end", "label": -1 if wrong else 1, "verdicts": {"j": -1 if wrong else 1}}]  # fmt: skip
        store = judged(tmp_path, steps, question=f"Question {question}?")
    result = command("bench-critic", "--critic", f"recorded:{store}#judge=j", "--data", store)
    assert result.exit_code == 0 and "100.0" in said(result), result.output


def examples(questions: int = 30, noise: float = 0.2) -> list[RecordedState]:
    """States of questions with two samples each; critics see whether they are right, with noise."""
    model, rng = Dynamics(chain(1)), random.Random(0)
    found = []
    for question in range(questions):
        for sample in range(2):
            right = rng.random() < 0.5
            seen = right if rng.random() > noise else not right
            text = f"{'good' if seen else 'bad'} {sample}"
            root = model.initial_state(f"Question {question}?")
            context = ScoringContext(model.transition(root, Action(text, model.mas.ALL)), model.mas, None)
            found.append(RecordedState(root.question, context, int(right), 1))
    return found


class Reads(search.Critic):
    """1 for a message with a word, else -1; no value for messages that end with a digit."""

    def __init__(self, word: str, mute: str = "") -> None:
        self.word, self.mute, self.name = word, mute, word

    def score(self, contexts: Any) -> search.Scores:
        texts = [one.state.text for one in contexts]
        mute = [bool(self.mute) and text.endswith(self.mute) for text in texts]
        values = [math.nan if m else 2.0 * (self.word in text) - 1 for m, text in zip(mute, texts, strict=True)]
        return search.Scores(values, reasons=["" if math.isfinite(value) else "mute" for value in values])


@pytest.mark.parametrize("method", ["logistic", "isotonic"])
def test_calibration_is_cross_validated_by_question(method: Any, tmp_path: Path) -> None:
    rows = examples()
    critics = {"good": Reads("good"), "mute": Reads("good", mute="1"), "useless": search.ConstantCritic(0)}
    model = calibrate_critics(critics, rows, method)
    assert len(model.folds) == 5 and len(model.questions) == 30
    combined = Calibrated(list(critics.values()), read_model(json.loads(json.dumps(model.to_dict()))))
    scores = combined.score([one.context for one in rows])
    values = {one.context.state.text: value for one, value in zip(rows, scores, strict=True)}
    assert values["good 0"] > 0.2 > -0.2 > values["bad 0"] and combined.calls == 2
    # The value of a question does not depend on its own outcomes.
    flipped = [one._replace(right=1 - one.right) if one.question == rows[0].question else one for one in rows]
    other = Calibrated(list(critics.values()), calibrate_critics(critics, flipped, method))
    assert combined.score([rows[0].context]).values == other.score([rows[0].context]).values
    fresh = ScoringContext(Dynamics(chain(1)).transition(Dynamics(chain(1)).initial_state("New?"),
                           Action("good 0", 1)), chain(1), None)  # fmt: skip
    assert combined.score([fresh]).values != other.score([fresh]).values


def test_calibrated_critic_in_a_damaged_folder_raises_data_error(tmp_path: Path) -> None:
    rows = examples()
    write_calibrated(calibrate_critics({"constant": search.ConstantCritic(0), "random": load_critic("random")}, rows),
                     tmp_path / "c")  # fmt: skip
    critic = load_critic(str(tmp_path / "c"))
    assert isinstance(critic, Calibrated) and [one.name for one in critic.members] == ["constant(0)", "random"]
    file = tmp_path / "c" / "calibrated.json"
    written = json.loads(file.read_text(encoding="utf-8"))
    for change in ({"schema": 2}, {"method": "x"}, {"members": []}, {"questions": {"a": 9}}, {"final": {"bias": "x"}}):
        file.write_text(json.dumps(written | change), encoding="utf-8")
        with pytest.raises(DataError):
            load_critic(str(tmp_path / "c"))
    file.write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match="cannot read"):
        load_critic(str(tmp_path / "c"))


def combination(folder: Path, member: object) -> Path:
    """Write a combination with one member."""
    write_calibrated(calibrate_critics({"random": load_critic("random")}, examples()), folder)
    file = folder / "calibrated.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | {"members": [member]}), encoding="utf-8")
    return folder


CODE = ["evil.py:Critic", "{folder}/evil.py:Critic", "vote:random,evil.py:Critic", r'judge:{"*": "evil.p\x79:Critic"}']
CODE += ["judge:transformers:{folder}#trust_remote_code=true", "recorded:runs.db,evil.py:Critic"]
PLACES = ["judge:openai:m@http://127.0.0.1:9/v1#key_env=HOME", "http://127.0.0.1:9/pooling#model=m", "org/name", "hub"]
PLACES += ["HTTP://127.0.0.1:9/pooling#model=m", "../outside", "{outside}", "~", "link", "inside/../../outside"]
PLACES += ["recorded:../runs.db", "recorded:{outside}/runs.db", "recorded:linked.db", "recorded:inside"]
ODD = ["folder", ".", "..", "JUDGE:tiny", "constant:1", "random#seed=1", " random", "", "nul\0", "x" * 5000, None]


@pytest.mark.parametrize("member", [*CODE, *PLACES, *ODD, ["random"]])
def test_calibrated_critic_rejects_members_outside_its_folder(member: object, tmp_path: Path) -> None:
    store = imported(tmp_path, [("a", "yes"), ("b", "no")], [("a", "yes"), ("c", "no")])
    outside, folder = tmp_path / "outside", tmp_path / "c"
    combination(outside, "random")
    store.rename(outside / "runs.db")
    (tmp_path / "runs.db").symlink_to(outside / "runs.db")
    if isinstance(member, str):
        member = member.replace("{outside}", str(outside)).replace("{folder}", str(folder))
    combination(folder, member)
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Critic: ...\n", encoding="utf-8")
    combination(folder / "inside", "random")
    (folder / "link").symlink_to(outside)
    (folder / "linked.db").symlink_to(outside / "runs.db")
    with pytest.raises((ConfigError, DataError)):
        load_critic(str(folder))
    assert not (tmp_path / "ran").exists()


def test_calibrated_critic_loads_members_inside_its_folder_after_it_is_moved(tmp_path: Path) -> None:
    judged(tmp_path, [{"text": "a", "label": 1, "verdicts": {"j": 1}}], question="Q?")
    specs = [f"recorded:{tmp_path}/runs.db#judge=j&calls=2", str(combination(tmp_path / "random", "random")), "random"]
    model = calibrate_critics({spec: load_critic("random") for spec in specs}, examples())
    write_calibrated(model, tmp_path / "c").rename(tmp_path / "moved")
    (tmp_path / "runs.db").unlink()
    critic = load_critic(str(tmp_path / "moved"))
    assert isinstance(critic, Calibrated)
    assert critic.model.members == ("recorded:runs.db#judge=j&calls=2", "1-random", "random")
    assert [one.name for one in critic.members] == ["j", "logistic(random)", "random"] and critic.calls == 2


def test_deeply_nested_combinations_raise_data_error(tmp_path: Path) -> None:
    combination(tmp_path, "m")
    folder = tmp_path
    for _ in range(400):
        (folder / "m").mkdir()
        folder /= "m"
        shutil.copy(tmp_path / "calibrated.json", folder)
    with pytest.raises(DataError, match="nested too deeply"):
        load_critic(str(tmp_path))


def test_combination_with_a_judge_cannot_be_saved(tmp_path: Path) -> None:
    model = calibrate_critics({"judge:tiny": load_critic("random")}, examples())
    with pytest.raises(ConfigError, match="Calibrated in Python"):
        write_calibrated(model, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_calibration_requires_both_outcomes(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="wrong: 0, questions: 30"):
        calibrate_critics({"random": load_critic("random")}, [one._replace(right=1) for one in examples()])
    with pytest.raises(ConfigError, match="at least one critic"):
        calibrate_critics({}, examples())


def test_train_calibrated_accepts_labels_and_outcomes(tmp_path: Path) -> None:
    for question in range(10):
        wrong = question % 2
        verdict = {"label": -1 if wrong else 1, "verdicts": {"j": 1 - 2 * wrong}}
        steps = [{"text": "start", "label": 1, "verdicts": {"j": 1}}, {"text": "end", **verdict}]
        judged(tmp_path, steps, question=f"Question {question}?")
    store, judge = tmp_path / "runs.db", f"recorded:{tmp_path}/runs.db#judge=j"
    out = tmp_path / "labels"
    result = command("train", "calibrated", "--store", store, "--critic", judge, "--on", "labels", "--out", out)
    assert result.exit_code == 0 and "combined: auc" in result.output, result.output
    result = command("bench-critic", "--critic", out, "--data", store)
    assert result.exit_code == 0 and "100.0" in said(result), result.output
    (tmp_path / "other").mkdir()
    logged = imported(tmp_path / "other", [("a", "yes"), ("b", "no")], [("a", "yes"), ("c", "no")])
    result = command("train", "calibrated", "--store", logged, "--critic", "random", "--out", tmp_path / "outcomes")
    assert result.exit_code == 0, result.output
