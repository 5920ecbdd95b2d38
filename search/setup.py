"""The settings of a search. Together with the problem and the policy, they determine its result.

`make_setup` loads components that are given by name and checks that they are compatible.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from mas_gym.errors import ConfigError
from mas_gym.policies.base import AsyncPolicy, Policy
from mas_gym.policies.batch_queue import as_policy
from mas_gym.programs import Program, load_program
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.graph import MAS
from mas_gym.tasks.base import Problem, Task
from search.budget import Budget
from search.plan import Plan
from search.planners.registry import load_planner
from search.prices import Prices, Rate
from search.protocol import Critic, Planner, as_critic, as_planner, planner_name
from search.recorded_world import Recording
from search.sampling import Sampling

logger = logging.getLogger("search")

ProgramSource = Program | str | Callable[..., Any]
"""Argument types of `mas_gym.programs.load_program`."""


@dataclass(frozen=True)
class Setup:
    """The settings of a search.

    Attributes:
        planner: The algorithm, bound to the critic.
        dynamics: The system's transition model.
        critic: Scores states; None for a search without a critic.
        seed: Together with the problem's id, determines every sample and every choice.
        sampling: The sampling parameters of the agents.
        budget: Limits of one search.
        training: Whether `search.Reward` requests are answered.
        program: The agent program behind the system; None for a MAS.
        rate: The prices of the models; None if not given.
        recording: The recorded run to draw messages from; None if a policy writes the messages.
    """

    planner: Planner
    dynamics: Dynamics
    critic: Critic | None
    seed: int
    sampling: Sampling
    budget: Budget
    training: bool
    program: Program | None = None
    rate: Rate | None = None
    recording: Recording | None = None

    def with_cost(self, plan: Plan) -> Plan:
        """Return a plan with its cost in USD, if the run has prices."""
        return plan if self.rate is None else replace(plan, usd=self.rate.usd(plan.usage))


def make_setup(
    planner: Planner | str,
    mas: MAS | str | None,
    critic: Critic | None,
    *,
    program: ProgramSource | None = None,
    seed: int = 42,
    sampling: Sampling | None = None,
    budget: Budget | None = None,
    training: bool = False,
    recording: Recording | None = None,
) -> Setup:
    """Load components given by name, bind the planner to the critic, and fill in defaults.

    Raises:
        ConfigError: The planner or the critic does not implement its protocol, or the two are incompatible.
    """
    if isinstance(planner, str):
        planner = load_planner(planner)
    planner = as_planner(planner)
    critic = None if critic is None else as_critic(critic)
    system, loaded = read_system(mas, program) if recording is None else (recording.mas, None)
    if critic is not None:
        critic.check_graph(system)
    bound = as_planner(planner.for_run(critic, training))
    settings = ((sampling or Sampling()).for_system(system), budget or Budget(), training, loaded)
    return Setup(bound, Dynamics(system), critic, seed, *settings, recording=recording)


def priced_setup(setup: Setup, policy: str, prices: Prices | None) -> Setup:
    """Return a setup with the prices of its models; ``policy`` is the policy's name.

    Raises:
        UnknownNameError: A model has no price.
        ConfigError: There are no prices, although the budget limits USD or the planner chooses by price; or the prices
            are invalid for the models (see `Prices.rate`).
    """
    if prices is None and setup.planner.needs_prices:
        raise ConfigError(f"{planner_name(setup.planner)} needs prices: pass prices=, or --prices prices.yaml")
    rate = None if prices is None else prices.rate(policy, charged_critic(setup.planner, setup.critic))
    return replace(setup, rate=rate, budget=setup.budget.priced(rate))


def charged_critic(planner: Planner, critic: Critic | None) -> str | None:
    """Return the name of the critic to charge for; None if the search uses no critic or a free one."""
    return None if critic is None or critic.free or not planner.needs_critic else critic.name


def read_system(mas: MAS | str | None, program: ProgramSource | None) -> tuple[MAS, Program | None]:
    """Load a system, or a program and the system that represents it in search; ``mas`` may describe the program.

    Raises:
        ConfigError: Neither a system nor a program is given, or the program already has a description.
    """
    from mas_gym.systems.loading import load_mas

    if program is not None:
        loaded = load_program(program) if mas is None else load_program(program, mas=mas)
        return loaded.mas, loaded
    if mas is None:
        raise ConfigError("expected mas= or program=, got neither: pass mas='rpsv', or program='my_agents.py:solve'")
    return load_mas(mas), None


_warned: set[str] = set()


def check_training(problems: Iterable[Problem], training: bool) -> None:
    """Reject the true reward on a test split; plain lists of problems have no split.

    Raises:
        ConfigError: ``training`` is set and the task is a test split.
    """
    if training and isinstance(problems, Task) and problems.split == "test":
        raise ConfigError(
            f"training=True gives searches the true reward, and {problems.name} is a test split, whose answers would "
            "leak; load it with split='train' or 'dev'"
        )


def check_problems(problems: Iterable[Problem], setup: Setup, policy: AsyncPolicy) -> None:
    """Check the split (`check_training`); log a warning if the policy or the critic was trained for something else.

    Raises:
        ConfigError: As for `check_training`.
    """
    check_training(problems, setup.training)
    critic, purpose, mas = setup.critic, policy.made_for, setup.dynamics.mas
    if critic is not None and critic.made_for and critic.made_for not in re.split(r"\W+", policy.name):
        agents = f"the agents of policy {critic.made_for}"
        _warn_once(f"critic {critic.name} was trained on {agents}; its values of other agents' messages mean little")
    # A program's name does not reveal its prompts.
    if purpose is not None and not mas.program and isinstance(problems, Task):
        misuse = purpose.misuse(problems.name, mas.name)
        if misuse is not None:
            _warn_once(f"policy {policy.name} was {misuse}")


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        logger.warning(text)


FromConfig = Literal["from-config"]
FROM_CONFIG: FromConfig = "from-config"
"""In place of a policy: the policies that the MAS config names. A config alone cannot make a run use them."""


def resolve_policy(mas: MAS, policy: Policy | AsyncPolicy | FromConfig | None) -> AsyncPolicy:
    """Return the given policy, or load the policies in the MAS's config for `FROM_CONFIG`.

    Raises:
        ConfigError: As for `config_policies` without a policy, or the given object is not a policy.
    """
    if policy is None or policy == FROM_CONFIG:
        from mas_gym.policies import load_policy

        policy = load_policy(config_policies(mas, policy))
    return as_policy(policy)


def config_policies(mas: MAS, policy: FromConfig | None) -> dict[str, str]:
    """Return the policies in a MAS's config, by agent.

    Raises:
        ConfigError: The config has no policies, or ``policy`` is None: the user has not allowed them.
    """
    if not mas.policies:
        raise ConfigError(
            f"expected a policy, but the MAS {mas.name!r} names none: pass policy=load_policy('tiny'), or add "
            f"policies: to its config and pass {FROM_CONFIG!r}"
        )
    if policy is None:
        raise ConfigError(
            f"expected a policy, got none; the config of the MAS {mas.name!r} names policies, which may run code, read "
            f"environment variables and open connections: to use them, pass --policy {FROM_CONFIG} (in Python, "
            f"policy={FROM_CONFIG!r}); mas-gym check lists them"
        )
    return dict(mas.policies)
