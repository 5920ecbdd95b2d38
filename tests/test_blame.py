"""``mas-gym blame``: the probable first error of failed samples, from sibling outcomes and from critics."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import search
from mas_gym.cli import app
from search.compare.blame import Blame, blame_failures
from search.compare.sibling_outcomes import repeated
from search.store import open_store

AGENTS = ("planner", "solver", "writer")


def row(question: str, plan: str, value: int, right: int) -> dict[str, Any]:
    """Return a chat transcript: the writer repeats the solver's result."""
    texts = (plan, f"{plan} gives {value}", f"The result is {value}.")
    messages = [{"role": "assistant", "name": n, "content": t} for n, t in zip(AGENTS, texts, strict=True)]
    return {
        "question": question, "messages": [{"role": "user", "content": question}, *messages],
        "answer": str(right), "correct": value == right,
    }  # fmt: skip


def team_log(path: Path, *, all_share: bool = False) -> Path:
    """Write 160 transcripts of 40 questions by a planner, a solver and a writer, which is never the culprit.

    The solver fails in one sample of 7 questions. The planner fails in two samples of 5 questions or, if all samples of
    a question share the plan, in all samples of 10 questions.
    """
    rows = []
    for n in range(1, 41):
        question, good, right = f"What is {n} times 3 plus 100?", f"Multiply {n} by 3, add 100", 3 * n + 100
        values, plans = [right] * 4, [good] * 4
        if all_share and n <= 10:
            plans, values = [f"Add {n}, 3"] * 4, [n + 3] * 4
        elif n <= 5:
            plans[:2], values[:2] = [f"Add {n}, 3"] * 2, [n + 3, n + 4]
        elif 10 < n <= 17:
            values[0] = right + 1
        rows += [row(question, plan, value, right) for plan, value in zip(plans, values, strict=True)]
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return path


def command(*words: object) -> Any:
    return CliRunner(env={"COLUMNS": "140"}).invoke(app, [str(word) for word in words])


def blamed(store: Path) -> tuple[list[str], list[Blame]]:
    with open_store(store) as opened:
        [run] = opened.runs()
        return [agent.name for agent in run.mas.agents], blame_failures(opened.plans(run.run))


@pytest.fixture
def team(tmp_path: Path) -> Path:
    search.import_transcripts(team_log(tmp_path / "team.jsonl"), tmp_path / "team.db")
    return tmp_path / "team.db"


def test_blame_with_four_samples_per_question_finds_the_failing_agents(team: Path) -> None:
    names, found = blamed(team)
    assert len(found) == 17
    assert Counter(names[agent] for one in found if (agent := one.agent()) is not None) == {"planner": 10, "solver": 7}
    assert {one.source for one in found} == {"siblings"}


def test_repeated_marks_messages_with_an_earlier_result() -> None:
    assert repeated(["Add 2, 3", "Add 2, 3 gives 6", "The result is 6."], "6") == (False, False, True)
    assert repeated(["Plan", "The answer is (B).", "b"], "B") == (False, False, True)
    assert repeated(["A plan", "No idea", "A"], "A") == (False, False, False)
    assert repeated(["take the train to Rome", "Take the train", "to"], None) == (False, True, False)
    assert repeated(["same", "same"], None) == (False, True)
