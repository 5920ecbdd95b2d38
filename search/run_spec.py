"""`RunSpec`: the settings of a run, which all parts that start searches share."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mas_gym.errors import ConfigError
from mas_gym.policies.base import AsyncPolicy, Policy
from mas_gym.programs import Program
from mas_gym.systems.graph import MAS
from mas_gym.tasks.base import Task
from search.budget import Budget
from search.planners.single_pass import SinglePass
from search.prices import Prices
from search.progress import Progress
from search.protocol import Critic, Planner
from search.recorded_tree import RecordedSource
from search.sampling import Sampling


@dataclass(frozen=True)
class RunSpec:
    """The settings of a run.

    `search.run` creates it from its arguments, which may also be names, as described for each setting.

    Attributes:
        problems: A task, a slice of a task, or any iterable of problems with distinct ids; read as searches start. By
            default, all problems of ``recorded``.
        mas: The system, or a name or path for `mas_gym.load_mas`.
        policy: Writes the messages; ``"from-config"`` loads the policies in the config of ``mas``. None in a spec:
            other processes load it.
        planner: The algorithm, or its short form such as ``"mcts:10,3"``.
        critic: Scores states; not needed by planners that request no values.
        program: An agent program in place of the system: a function, ``FILE.py:NAME``, a command, the URL of a service,
            or a `mas_gym.programs.Program`. If ``mas`` is also given, it describes the program's agents.
        recorded: A recorded run to search in place of a system and a policy, or the store that contains it; see
            `search.Recorded`.
        seed: Together with the problem's id, determines every sample and every choice of a search.
        sampling: Temperature, top-p and token limit; the paper's settings by default.
        budget: Limits of each search. A search that reaches a limit returns its best plan so far, or fails.
        run_budget: Limits of the whole run, including the cost of earlier calls with the same store. A search starts
            only if the remaining budget covers its expected cost, which is the cost of the most expensive search
            so far. The time limit ends open searches.
        prices: Prices of the models, as a YAML file or a mapping of the same form (`search.prices`). Plans then have a
            cost ``usd``, and budgets may limit ``usd``.
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
    program: Program | None = None
    recorded: RecordedSource | None = None
    seed: int = 42
    sampling: Sampling = field(default_factory=Sampling)
    budget: Budget = field(default_factory=Budget)
    run_budget: Budget = field(default_factory=Budget)
    prices: Prices | None = None
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
