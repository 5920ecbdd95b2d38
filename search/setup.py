"""`Setup`: a run's settings with all parts adapted to each other. With a problem, they determine a search's result."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace

from mas_gym.errors import ConfigError
from mas_gym.policies.base import AsyncPolicy
from mas_gym.policies.batch_queue import as_policy
from mas_gym.systems.dynamics import Dynamics
from mas_gym.tasks.base import Task
from search.plan import Plan
from search.prices import Rate
from search.protocol import Critic, Planner, as_critic, as_planner, planner_name
from search.run_spec import RunSpec

logger = logging.getLogger("search")


@dataclass(frozen=True, kw_only=True)
class Setup(RunSpec):
    """A run's settings: the planner is adapted to the critic, the sampling to the system, the budgets to the prices.

    Attributes:
        dynamics: The system's transition model.
        rate: The prices of the run's models; None if not given.
    """

    policy: AsyncPolicy
    dynamics: Dynamics
    rate: Rate | None

    def with_cost(self, plan: Plan) -> Plan:
        """Return a plan with its cost in USD, if the run has prices."""
        return plan if self.rate is None else replace(plan, usd=self.rate.usd(plan.usage))


def make_setup(spec: RunSpec) -> Setup:
    """Adapt the parts of a run to each other.

    Raises:
        ConfigError: A part does not implement its protocol, the planner and the critic are incompatible, or there are
            no prices, although a budget limits USD or the planner chooses by price; or the prices are invalid for the
            models (see `Prices.rate`).
        UnknownNameError: A model has no price.
    """
    policy, critic = as_policy(spec.policy), None if spec.critic is None else as_critic(spec.critic)
    if critic is not None:
        critic.check_graph(spec.mas)
    planner = as_planner(as_planner(spec.planner).for_run(critic, spec.training))
    if spec.prices is None and planner.needs_costs:
        raise ConfigError(f"{planner_name(planner)} needs prices: pass prices=, or --prices prices.yaml")
    rate = None if spec.prices is None else spec.prices.rate(policy.name, charged_critic(planner, critic))
    adapted = {
        "policy": policy,
        "critic": critic,
        "planner": planner,
        "sampling": spec.sampling.for_system(spec.mas),
        "budget": spec.budget.priced(rate),
        "run_budget": spec.run_budget.priced(rate),
    }
    return Setup(**vars(spec) | adapted, dynamics=Dynamics(spec.mas), rate=rate)


def charged_critic(planner: Planner, critic: Critic | None) -> str | None:
    """Return the name of the critic to charge for; None if the search uses no critic or a free one."""
    return None if critic is None or critic.free or not planner.needs_critic else critic.name


_warned: set[str] = set()


def warn_of_misuse(setup: Setup) -> None:
    """Log a warning if the policy or the critic was trained for something else."""
    critic, policy, purpose = setup.critic, setup.policy, setup.policy.made_for
    if critic is not None and critic.made_for and critic.made_for not in re.split(r"\W+", policy.name):
        agents = f"the agents of policy {critic.made_for}"
        _warn_once(f"critic {critic.name} was trained on {agents}; its values of other agents' messages mean little")
    # A program's name does not reveal its prompts.
    if purpose is not None and not setup.mas.external and isinstance(setup.problems, Task):
        misuse = purpose.misuse(setup.problems.name, setup.mas.name)
        if misuse is not None:
            _warn_once(f"policy {policy.name} was {misuse}")


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        logger.warning(text)
