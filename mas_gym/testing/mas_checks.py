"""Checks of MAS configs."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Sequence

from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.graph import MAS
from mas_gym.systems.loading import MASSource, load_mas
from mas_gym.systems.state import MASState
from mas_gym.tasks import Problem, ProblemTask
from mas_gym.testing.shared_checks import HOSTILE, ORDINARY, QUESTION, Findings, walk


def check_mas(source: MASSource, *, texts: Sequence[str] = (), episodes: int = 50) -> MAS:
    """Check a MAS config: it is valid, its episodes end, every agent can act, and its environment works.

    Args:
        source: An argument of `mas_gym.load_mas`.
        texts: Messages that meet the conditions of your edges; patterns of ``contains:`` are tried automatically.
        episodes: Number of random episodes to play.

    Returns:
        The system.

    Raises:
        ConfigError: The config is not valid.
        ComplianceError: The config is valid but violates a contract.
    """
    mas = load_mas(source)
    findings = Findings(f"MAS {mas.name!r}")
    findings.expect(
        load_mas(json.loads(json.dumps(mas.to_dict()))) == mas, "its dict form does not load back as an equal object"
    )
    model = Dynamics(mas)
    patterns = [e.condition.pattern for e in mas.edges if e.condition and e.condition.kind.endswith("contains")]
    rng = random.Random(0)
    says = [*ORDINARY, *HOSTILE, *patterns, *texts]
    acted: set[int] = set()
    for _ in range(episodes):
        states = walk(model, QUESTION, says, rng)
        acted.update(turn.speaker for turn in states[-1].turns)
        for state in states:
            _check_state(findings, model, state)
    for i, agent in enumerate(mas.agents):
        findings.expect(
            i in acted,
            f"agents[{i}] {agent.name!r} acted in none of {episodes} episodes: its conditions may exclude each other, "
            "or need a message that you should pass in texts=",
        )
    _check_env(findings, mas)
    findings.settle()
    return mas


def _check_state(findings: Findings, model: Dynamics, state: MASState) -> None:
    findings.expect(state.depth <= model.max_depth, f"an episode is longer than {model.max_depth} turns")
    again = model.state_from_dict(json.loads(json.dumps(state.to_dict())))
    findings.expect(again == state, "a state does not survive its JSON form")
    if not model.is_terminal(state):
        name = model.mas.agents[state.acting].name
        findings.expect(model.mas.ALL in model.legal_recipients(state), f"{name} cannot send to ALL")


def _check_env(findings: Findings, mas: MAS) -> None:
    from gymnasium.utils.env_checker import check_env

    from mas_gym.envs.env import MASEnv

    env = MASEnv(ProblemTask.of([Problem("check/0", QUESTION, "7"), Problem("check/1", "1 + 1?", "2")]), mas)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_env(env, skip_render_check=True)
    for warning in caught:
        findings.expect(False, f"gymnasium's checker warns: {warning.message}")
