"""Planners, critics and policies from a file of the user: in Python, on the command line, and when they are broken."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from search_worlds import command, said

import mas_gym
import search
from mas_gym.errors import ConfigError, DataNotFoundError, MASGymError, UnknownNameError, UserCodeError
from mas_gym.internal.identity import identity_of
from mas_gym.plugins import Spec
from mas_gym.policies import load_policy
from rewardmodels import load_critic

MINE = '''
import helper
import search
from mas_gym.policies import ScriptedPolicy

class Lookahead:
    """Takes the best of some proposals at every turn."""

    def __init__(self, width=2, depth=1, *, greedy=True):
        self.width, self.depth, self.greedy = width, depth, greedy

    def plan(self, model, root, rng):
        state = root
        while not model.is_terminal(state):
            [proposals] = yield [search.Propose(state, n=self.width)]
            states = [model.transition(state, p.action) for p in proposals]
            [values] = yield [search.Evaluate(states)]
            state = states[max(range(len(values)), key=values.__getitem__)]
        return search.Plan.single(state)

class Judge:
    name, terminal_only, free = "judge", False, False

    def __init__(self, weight=1.0):
        self.weight = weight

    def score(self, contexts):
        return [self.weight * helper.value(context.state.text) for context in contexts]

def make(answer=7):
    return ScriptedPolicy(lambda request, seed: f"{request.agent} {seed % 5}. Final Answer: {answer}", name="mine")

def broken(n=1):
    return [][n]

def raises_ours():
    search.load_planner("mcts:0,0")

number = 3
'''


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("def value(text):\n    return len(text) % 7 / 7\n", encoding="utf-8")
    file = tmp_path / "my.py"
    file.write_text(MINE, encoding="utf-8")
    return file


def test_settings_are_accepted_by_position_and_name(mine: Path) -> None:
    planner: Any = search.load_planner(f"{mine}:Lookahead:3,depth=2,greedy=false")
    assert (planner.width, planner.depth, planner.greedy) == (3, 2, False)
    assert load_critic(f"{mine}:Judge:0.5").weight == 0.5  # type: ignore[attr-defined]
    assert load_policy(f"{mine}:make").name == "mine"


def test_specs_work_in_search_run_and_on_the_command_line(mine: Path, tmp_path: Path) -> None:
    task = mas_gym.load_task("arithmetic", limit=2)
    policy, critic = load_policy(f"{mine}:make:answer=7"), load_critic(f"{mine}:Judge")
    plans = list(search.run(f"{mine}:Lookahead:2", task, mas="rpsv", policy=policy, critic=critic))
    assert [plan.answer for plan in plans] == ["7", "7"] and plans[0].usage.reward_calls > 0
    options = ("--planner", f"{mine}:Lookahead:2", "--critic", f"{mine}:Judge", "--policy", f"{mine}:make:7")
    shown = command("eval", "-n", 2, *options, "--json", tmp_path / "out.json")
    assert shown.exit_code == 0, shown.output
    [row] = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert row["critic"] == "judge" and row["failed"] == 0 and row["agent_calls"] == 8
    solved = command("solve", "How many?", *options)
    assert solved.exit_code == 0 and "Answer: 7" in solved.stdout


def test_file_is_imported_once_until_it_changes(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    written = mine.stat().st_mtime_ns
    first, again = (type(search.load_planner(f"{mine}:Lookahead").identical_to) for _ in range(2))
    assert first is again
    before = identity_of(search.load_planner(f"{mine}:Lookahead"))
    # Its cached bytecode is identified only by size and time in seconds.
    mine.write_text(MINE.replace("width=2, depth", "width=4, depth"), encoding="utf-8")
    os.utime(mine, ns=(written, written))
    planner: Any = search.load_planner(f"{mine}:Lookahead")
    assert planner.width == 4 and type(planner.identical_to) is not first
    assert identity_of(planner) != before


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        ("{none}:X", DataNotFoundError, "expected a Python file"),
        ("{folder}:X", DataNotFoundError, "expected a Python file"),
        ("{mine}:Lookahaed", UnknownNameError, "did you mean 'Lookahead'?"),
        ("{mine}:", UnknownNameError, "Lookahead"),
        ("{mine}:number", UnknownNameError, "Judge"),
        ("{mine}:Lookahead:1,2,3", ConfigError, "expected Lookahead(width=2, depth=1, *, greedy=True)"),
        ("{mine}:Lookahead:widht=3", ConfigError, "widht"),
        ("{mine}:Lookahead:width=1,2", ConfigError, "comes after a named setting"),
        ("{mine}:Lookahead:width=1,width=2", ConfigError, "set twice"),
        ("{mine}:make", ConfigError, "expected an object with a plan method, got ScriptedPolicy"),
        ("{mine}:broken", UserCodeError, "my.py, line 34: IndexError"),
        ("{mine}:raises_ours", ConfigError, "n_simulations"),
    ],
)
def test_invalid_user_code_is_reported(mine: Path, spec: str, error: type[MASGymError], words: str) -> None:
    folder = mine.parent / "folder.py"
    folder.mkdir()
    with pytest.raises(error, match=re.escape(words)):
        search.load_planner(spec.format(mine=mine, none=mine.parent / "none.py", folder=folder))


def test_each_kind_is_checked_for_its_required_methods(mine: Path) -> None:
    with pytest.raises(ConfigError, match=r"score\(contexts\), got Lookahead"):
        load_critic(f"{mine}:Lookahead")
    with pytest.raises(ConfigError, match=r"sample\(requests\).* got Judge"):
        load_policy(f"{mine}:Judge")
    ensemble = load_critic(f"ensemble:{mine}:Judge,constant:0.5")
    assert ensemble.name == "judge+constant(0.5)"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("x = 1\ndef f(:\n", "line 2: SyntaxError: "),
        ("import nothing_of_this_name\n", "line 1: ModuleNotFoundError"),
        ("x = 1\n\nraise ValueError('\x1b[31mno')\n", "line 3: ValueError"),
        ("\x00", "source code"),
        ("def f(n):\n    return f(n)\nf(1)\n", "RecursionError"),
    ],
)
def test_import_error_names_file_and_line(tmp_path: Path, source: str, words: str) -> None:
    file = tmp_path / "bad.py"
    file.write_text(source, encoding="utf-8")
    with pytest.raises(UserCodeError, match=re.escape(words)) as caught:
        search.load_planner(f"{file}:f")
    assert str(file) in str(caught.value) and caught.value.__cause__ is not None
    shown = command("eval", "--planner", f"{file}:f")
    assert shown.exit_code == 2 and "bad.py" in said(shown).replace(" ", "") and "\x1b" not in shown.stderr
    file.write_text("class f:\n    def plan(self, model, root, rng): ...\n", encoding="utf-8")
    assert search.load_planner(f"{file}:f") is not None


def test_debug_option_keeps_the_cause_of_a_user_code_error(mine: Path) -> None:
    error = command("--debug", "eval", "--planner", f"{mine}:broken").exception
    assert isinstance(error, UserCodeError) and isinstance(error.__cause__, IndexError)


def test_spec_has_a_file_only_with_a_python_file_and_a_name() -> None:
    assert not any(
        Spec.parse(text).file for text in ["mcts:10,3", "my.py", "recorded:FILE", "models/x.python:1", "", ":", ".py:x"]
    )


@pytest.mark.parametrize(
    ("listing", "names", "words"),
    [
        ("planners", search.planners.registry.planner_names(), "n_simulations=10, max_children=3"),
        ("critics", ["policy-likelihood", "tiny-masprm"], "value=0.0"),
        ("policies", ["tiny", "openai"], "max_batch=128"),
        ("tasks", ["gsm8k", "arithmetic"], "difficulty=3"),
    ],
)
def test_listings_contain_every_component_with_its_settings(listing: str, names: list[str], words: str) -> None:
    shown = command(listing)
    assert shown.exit_code == 0 and words in said(shown)
    assert max(map(len, shown.stdout.splitlines())) <= 80
    entries = {entry["name"]: entry for entry in json.loads(command(listing, "--json").stdout)}
    assert set(names) <= set(entries) and all(entry["summary"] for entry in entries.values())


def test_eval_rejects_an_unused_critic() -> None:
    shown = command("eval", "--critic", "policy-likelihood")
    assert shown.exit_code == 2 and "none of the planners uses a critic" in said(shown)
    shown = command("serve", "--planner", "sc:3", "--critic", "policy-likelihood")
    assert shown.exit_code == 2 and "none of the planners uses a critic" in said(shown)
    shown = command("solve", "How many?", "--planner", "sc:3", "--policy", "recorded:none")
    assert "uses a critic" not in said(shown)


@pytest.mark.parametrize("name", ["out.xyz", "out", ".png/"])
def test_plot_name_is_validated_before_the_run(name: str, tmp_path: Path) -> None:
    shown = command("eval", "--policy", "recorded:none", "--plot", tmp_path / name)
    assert shown.exit_code == 2 and "expected a name that ends in" in said(shown)
