"""Sampling settings: on the command line, in a MAS config and in Python; they are part of a run's identity."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import mas_gym
import search
from mas_gym.cli.commands import app
from mas_gym.errors import ConfigError
from mas_gym.policies import Policy, Sample, SamplingReply, SamplingRequest
from mas_gym.tasks import Problem, ProblemTask

TASK = ProblemTask.of([Problem("a", "2 + 2?", "4")])
AGENTS: list[dict[str, Any]] = [
    {"name": "Hot", "system_prompt": "Guess.", "temperature": 1.5, "top_p": 0.5, "max_new_tokens": 4096},
    {"name": "Plain", "system_prompt": "Answer.", "max_new_tokens": 64},
]
CONFIG = {"agents": AGENTS, "edges": [[-1, 0], [0, 1]]}

POLICY = """
from mas_gym.policies import Policy, Sample, SamplingReply

class Echo(Policy):
    def sample(self, requests):
        said = ["{r.temperature:g} {r.top_p:g} {r.max_new_tokens}".format(r=request) for request in requests]
        return [SamplingReply(tuple(Sample(text, 1, -1.0, "stop") for _ in r.seeds)) for text, r in zip(said, requests)]

    def identity(self):
        return {}

make = Echo
"""


class Asked(Policy):
    def __init__(self) -> None:
        self.requests: list[SamplingRequest] = []

    def sample(self, requests: Sequence[SamplingRequest]) -> list[SamplingReply]:
        self.requests += requests
        return [SamplingReply(tuple(Sample("4", 1, -1.0, "stop") for _ in request.seeds)) for request in requests]

    def identity(self) -> dict[str, str]:
        return {}

    @property
    def settings(self) -> list[tuple[float, float, int]]:
        return [(one.temperature, one.top_p, one.max_new_tokens) for one in self.requests]


def test_agent_settings_in_a_config_take_precedence_over_those_of_the_run() -> None:
    policy = Asked()
    mas = mas_gym.load_mas(CONFIG)
    list(search.run("single", TASK, mas=mas, policy=policy, sampling=search.Sampling(temperature=0.2, top_p=0.9)))
    assert policy.settings == [(1.5, 0.5, 4096), (0.2, 0.9, 64)]
    assert mas_gym.load_mas(mas.to_dict()) == mas


@pytest.mark.parametrize("setting", [{"temperature": -1}, {"temperature": "warm"}, {"top_p": 0}, {"top_p": 2}])
def test_agent_settings_out_of_range_are_rejected(setting: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        mas_gym.load_mas({"agents": [AGENTS[1] | setting], "edges": [[-1, 0]]})


def test_environment_requests_have_the_settings_of_the_acting_agent() -> None:
    env = mas_gym.MASEnv(TASK, mas_gym.load_mas(CONFIG))
    env.reset(seed=0)
    request = env.request((1,))
    assert (request.temperature, request.top_p) == (1.5, 0.5)


@pytest.mark.parametrize("command", ["eval", "solve", "rollouts"])
def test_command_line_settings_replace_those_of_every_agent(command: str, tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text(POLICY)
    (tmp_path / "mas.json").write_text(json.dumps(CONFIG))
    store = tmp_path / "runs.db"
    words = [command, "--policy", f"{tmp_path}/echo.py:make", "--mas", f"{tmp_path}/mas.json", "--planner", "single"]
    words += ["--temperature", "0.3", "--top-p", "0.8", "--max-tokens", "2000"]
    words += ["1 + 1?"] if command == "solve" else ["-n", "1", "--store", str(store)]
    if command == "rollouts":
        words[words.index("single")] = "mcts:1,1"
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    if command == "solve":
        assert done.output.count("0.3 0.8 2000") == 2
        return
    with search.open_store(store) as opened:
        [run] = opened.runs()
    assert run.config["sampling"] == {"temperature": 0.3, "top_p": 0.8, "max_new_tokens": 2000}


def test_run_identity_is_that_of_the_paper_without_settings(tmp_path: Path) -> None:
    list(search.run("single", TASK, mas="rpsv", policy=Asked(), store=tmp_path / "runs.db"))
    with search.open_store(tmp_path / "runs.db") as opened:
        [run] = opened.runs()
    assert run.config["sampling"] == {"temperature": 0.7, "top_p": 0.95, "max_new_tokens": 1024}
