"""The settings of a run: a `RunSpec` as given, and a `Setup` with all parts adapted to each other."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mas_gym.errors import ConfigError
from mas_gym.policies.base import AsyncPolicy, Policy, Sampling
from mas_gym.policies.batch_queue import as_policy
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.graph import MAS
from mas_gym.tasks.base import Task
from search.costs import Budget
from search.planners.single_pass import SinglePass
from search.progress import Progress
from search.protocol import Critic, Planner, as_critic, as_planner, planner_name

logger = logging.getLogger("search")


@dataclass(frozen=True)
class RunSpec:
    """The settings of a run.

    `search.run` creates it from its arguments, which may also be names, as described for each setting.

    Attributes:
        problems: A task, a slice of a task, or any iterable of problems with distinct ids; read as searches start. By
            default, those of ``source``.
        mas: The system, or a name or path for `mas_gym.load_mas`.
        policy: Writes the messages; ``"from-config"`` loads the policies in the config of ``mas``. None in a spec:
            other processes load it.
        planner: The algorithm, or its short form such as ``"mcts:10,3"``.
        critic: Scores states; not needed by planners that request no values.
        source: What is searched in place of the system played by the policy, such as an agent program or a recorded run
            (`search.models.base.SearchSource`); None for the system.
        seed: Together with the problem's id, determines every sample and every choice of a search.
        sampling: Temperature, top-p and token limit; the paper's settings by default.
        budget: Limits of each search. A search that reaches a limit returns its best plan so far, or fails.
        run_budget: Limits of the whole run, including the cost of earlier calls with the same store. A search starts
            only if the remaining budget covers its expected cost, which is the cost of the most expensive search
            so far. The time limit ends open searches.
        training: Answer `search.Reward` requests with the true reward, for data generation; rejected for a test split.
        concurrency: Maximum number of open searches; memory grows with it, but results do not depend on it.
        store: A file (or an open `search.Store`) to which each finished search is written immediately. Searches that
            are already stored are not repeated; their plans are read back. Failed searches are retried.
        run_name: A name for this run in the store. Resuming a named run with different settings raises an error.
        progress: True for a bar on standard error; or a function called with a `search.Progress` when a search ends,
            and a few times per second in between.
        raise_errors: Raise the exception that ended a search, with its traceback, instead of returning a plan with an
            ``error``.
    """

    problems: Any
    mas: MAS
    policy: Policy | AsyncPolicy | None
    planner: Planner = field(default_factory=SinglePass)
    critic: Critic | None = None
    source: Any = None
    seed: int = 42
    sampling: Sampling = field(default_factory=Sampling)
    budget: Budget = field(default_factory=Budget)
    run_budget: Budget = field(default_factory=Budget)
    training: bool = False
    concurrency: int = 64
    store: str | os.PathLike[str] | None = None
    run_name: str | None = None
    progress: bool | Callable[[Progress], None] = False
    raise_errors: bool = False

    def __post_init__(self) -> None:
        """Check the concurrency, and reject the true reward on a test split; lists of problems have no split."""
        if self.concurrency < 1:
            raise ConfigError(f"expected concurrency >= 1, got {self.concurrency}")
        if self.training and isinstance(self.problems, Task) and self.problems.split == "test":
            raise ConfigError(
                f"training=True gives searches the true reward, and {self.problems.name} is a test split; its "
                "answers would leak: load it with split='train' or 'dev'"
            )


@dataclass(frozen=True, kw_only=True)
class Setup(RunSpec):
    """A run's settings: the planner is adapted to the critic, the sampling to the system, the budgets to the models.

    Attributes:
        dynamics: The system's transition model.
    """

    policy: AsyncPolicy
    dynamics: Dynamics


def make_setup(spec: RunSpec) -> Setup:
    """Adapt the parts of a run to each other.

    Raises:
        ConfigError: A part does not implement its protocol, the planner and the critic are incompatible, or a budget or
            the planner needs prices, and there are none or invalid ones (see `search.costs.Budget.priced`).
        UnknownNameError: A model has no price.
    """
    policy, critic = as_policy(spec.policy), None if spec.critic is None else as_critic(spec.critic)
    if critic is not None:
        critic.check_graph(spec.mas)
    planner = as_planner(as_planner(spec.planner).for_run(critic, spec.training))
    charged = policy.name, charged_critic(planner, critic)
    budget = spec.budget.priced(*charged)
    if planner.needs_costs and budget.rate is None:
        raise ConfigError(f"{planner_name(planner)} needs prices: pass prices=, or --prices prices.yaml")
    adapted = {
        "policy": policy,
        "critic": critic,
        "planner": planner,
        "sampling": spec.sampling.for_system(spec.mas),
        "budget": budget,
        "run_budget": spec.run_budget.priced(*charged),
    }
    return Setup(**vars(spec) | adapted, dynamics=Dynamics(spec.mas))


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
