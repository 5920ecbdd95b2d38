"""Critics that others recorded, and combinations of critics."""

import json
from pathlib import Path
from typing import Any

import pytest
from search_worlds import HashCritic, chain, command, problems, said, talker
from test_recorded import imported

import search
from mas_gym.errors import ConfigError, CriticError, DataError, UnknownNameError
from mas_gym.logs import read_transcripts
from rewardmodels import load_critic
from search.compare.first_errors import bench_critic
from search.compare.imported import read_labelled
from search.critics import Ensemble, Vote
from search.store import RecordedCritic


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


def test_recorded_values_hold_until_the_next(tmp_path: Path) -> None:
    store = judged(tmp_path, [dict(one) for one in STEPS])
    assert values_on(store, load_critic(f"recorded:{store}")) == {"a": 0.5, "a/tool": 0.5, "a/tool/b": -0.25}
    assert values_on(store, load_critic(f"recorded:{store}#judge=strict")) == {"a": -1, "a/tool": -1, "a/tool/b": 1}
    assert values_on(store, RecordedCritic(store, judge="kind")) == {"a": 1, "a/tool": 1, "a/tool/b": 1}
    assert values_on(store, RecordedCritic(store, judge="labels")) == {"a": 1, "a/tool": 1, "a/tool/b": 1}


def test_recorded_values_of_a_shared_beginning_are_averaged(tmp_path: Path) -> None:
    both = [[{"text": "a", "verdicts": {"j": verdict}}, {"text": str(verdict), "verdicts": {"j": verdict}}]
            for verdict in (1, -1, -1)]  # fmt: skip
    found = values_on(judged(tmp_path, *both), load_critic(f"recorded:{tmp_path}/runs.db#judge=j"))
    assert found == {"a": pytest.approx(-1 / 3), "a/1": 1, "a/-1": -1}


def test_values_of_an_earlier_search_serve_a_recorded_run(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    first = list(search.run("bon:4", problems(3), mas=chain(2), policy=talker(), critic=HashCritic(), store=path))
    again = list(search.run("bon:4", recorded=path, critic=RecordedCritic(path)))
    chosen = {plan.problem_id: (plan.answer, plan.best.score) for plan in first}
    assert {plan.problem_id: (plan.answer, plan.best.score) for plan in again} == chosen


def test_recorded_critic_states_what_is_missing(tmp_path: Path) -> None:
    store = judged(tmp_path, [{"text": "a", "verdicts": {"j": 1}}])
    with pytest.raises(DataError, match="its judges are j"):
        load_critic(f"recorded:{store}")
    with pytest.raises(UnknownNameError, match="'k'"):
        load_critic(f"recorded:{store}#judge=k")
    with pytest.raises(ConfigError, match="got no file"):
        load_critic("recorded")
    other = imported(tmp_path / "other" if (tmp_path / "other").mkdir() is None else tmp_path, [("x", "yes")])
    [plan] = search.run("bon:1", recorded=other, critic=RecordedCritic(store, judge="j"))
    assert plan.error is not None and "no value is recorded" in plan.error


def test_recorded_calls_are_counted(tmp_path: Path) -> None:
    store = judged(tmp_path, [{"text": "a", "value": 1}, {"text": "b", "value": 1}])
    [one] = search.run("bon:1", recorded=store, critic=load_critic(f"recorded:{store}"))
    [three] = search.run("bon:1", recorded=store, critic=load_critic(f"recorded:{store}#calls=3"))
    both = Ensemble([RecordedCritic(store, calls=3), HashCritic(), search.ConstantCritic(0)])
    [mixed] = search.run("bon:1", recorded=store, critic=both)
    assert [plan.usage.reward_calls for plan in (one, three, mixed)] == [2, 6, 8]


def test_vote_abstains_and_needs_a_quorum(tmp_path: Path) -> None:
    first = [{"text": "a", "verdicts": {"x": 1, "y": -1, "z": 0}}, {"text": "b", "verdicts": {"y": 1}}]
    store = judged(tmp_path, first, [{"text": "c", "verdicts": {"x": 1}}])
    spec = ",".join(f"recorded:{store}#judge={name}" for name in "xyz")
    vote = load_critic(f"vote:{spec}")
    assert values_on(store, vote) == {"a": 0, "a/b": 1, "c": 1} and vote.calls == 3
    with pytest.raises(CriticError, match="no value is recorded"):
        values_on(store, Vote(vote.members, quorum=2))


@pytest.mark.parametrize(
    "verdicts", [{"j": float("nan")}, {"j": "right"}, {"": 1}, [1], {str(i): 1 for i in range(101)}]
)
def test_broken_verdicts_are_counted_lines(verdicts: Any, tmp_path: Path) -> None:
    rows = [{"question": "q", "messages": [{"role": "assistant", "content": "a", "verdicts": one}]}
            for one in (verdicts, {"j": 1})]  # fmt: skip
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    found = search.import_transcripts(tmp_path / "log.jsonl", tmp_path / "runs.db")
    assert (found.transcripts, found.broken) == (1, 1)


def test_verdicts_of_agent_processbench_judge_the_benchmark(shared_data: Path, tmp_path: Path) -> None:
    log = shared_data / "real" / "agent_processbench_hotpotqa.jsonl.gz"
    first = next(read_transcripts(log))
    assert len({judge for message in first.messages for judge in message.verdicts}) == 20
    search.import_transcripts(log, tmp_path / "runs.db")
    found = bench_critic(RecordedCritic(tmp_path / "runs.db", judge="labels"), read_labelled(tmp_path / "runs.db"))
    assert found.f1 == 100.0


def test_bench_critic_command_takes_recorded_judges(tmp_path: Path) -> None:
    for question in range(12):
        wrong = question % 2
        steps = [{"text": f"step {question}", "label": 1, "verdicts": {"j": 1}},
                 {"text": "end", "label": -1 if wrong else 1, "verdicts": {"j": -1 if wrong else 1}}]  # fmt: skip
        store = judged(tmp_path, steps, question=f"Question {question}?")
    result = command("bench-critic", "--critic", f"recorded:{store}#judge=j", "--data", store)
    assert result.exit_code == 0 and "100.0" in said(result), result.output
