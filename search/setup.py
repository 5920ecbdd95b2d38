"""What determines a search, apart from its problem and the policy; the engine and the store share these types."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from mas_gym.dynamics import Dynamics
from mas_gym.errors import ConfigError
from mas_gym.graph import MAS
from mas_gym.policies.base import AsyncPolicy, Policy, effective_temperature
from mas_gym.programs import Program, load_program
from search.plan import Usage
from search.protocol import Critic, Planner, bind_planner
from search.tree import Proposal

logger = logging.getLogger("search")

ProgramSource = Program | str | Callable[..., Any]
"""What `mas_gym.programs.load_program` takes."""


@dataclass(frozen=True)
class Budget:
    """Limits on what is spent; None means no limit.

    Attributes:
        calls: Agent calls (AC), never exceeded.
        tokens: Generated tokens (TOK). Once they are spent, a search samples nothing more, except single
            messages that bring its first path to an end. The last request may overshoot.
        seconds: Wall-clock seconds. Results under this limit depend on the machine's speed.
    """

    calls: int | None = None
    tokens: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        """Check the limits."""
        for field in fields(self):
            limit = getattr(self, field.name)
            if limit is not None and not (isinstance(limit, int | float) and 0 < limit < math.inf):
                raise ConfigError(f"budget: expected {field.name} to be a positive number or None, got {limit!r}")

    def spent(self, usage: Usage, wanted: int) -> str | None:
        """Say which limit forbids ``wanted`` more agent calls, ``"budget of 30 calls spent"``; None if none does.

        When no calls are wanted, only the seconds can be spent.
        """
        if wanted and self.calls is not None and usage.agent_calls + wanted > self.calls:
            return f"budget of {self.calls} calls spent"
        if wanted and self.tokens is not None and usage.generated_tokens >= self.tokens:
            return f"budget of {self.tokens} tokens spent"
        if self.seconds is not None and usage.seconds >= self.seconds:
            return f"budget of {self.seconds:g} seconds spent"
        return None

    def messages_left(self, usage: Usage) -> int | None:
        """Return how many more messages the calls and tokens pay for (`Remaining`); None without such a limit."""
        left: list[int] = []
        if self.calls is not None:
            left.append(self.calls - usage.agent_calls)
        if self.tokens is not None:
            tokens = self.tokens - usage.generated_tokens
            # The length of messages is unknown before the first one.
            left.append(tokens * usage.agent_calls // max(usage.generated_tokens, 1) if usage.agent_calls else 1)
        return max(0, min(left)) if left else None


@dataclass(frozen=True)
class Sampling:
    """How agents sample (paper, App. "Search configurations").

    Attributes:
        temperature: Softmax temperature; 0 is greedy decoding, and so is anything below 0.01.
        top_p: Nucleus mass in ``(0, 1]``.
        max_new_tokens: Maximum length of one message; an agent's own maximum also applies.
    """

    temperature: float = 0.7
    top_p: float = 0.95
    max_new_tokens: int = 1024

    def __post_init__(self) -> None:
        """Check the ranges."""
        object.__setattr__(self, "temperature", effective_temperature(self.temperature))
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"sampling: expected top_p in (0, 1], got {self.top_p!r}")
        if self.max_new_tokens < 1:
            raise ConfigError(f"sampling: expected max_new_tokens >= 1, got {self.max_new_tokens!r}")


@dataclass(frozen=True)
class Setup:
    """The settings of a search.

    Attributes:
        planner: The algorithm, bound to the critic.
        dynamics: The system's transition model.
        critic: Scores states; None if there is none.
        seed: With the problem's id it determines every sample and every choice.
        sampling: How agents sample.
        budget: Limits of one search.
        training: Whether `search.Reward` requests are answered.
        program: The agent program behind the system; None for a MAS.
    """

    planner: Planner
    dynamics: Dynamics
    critic: Critic | None
    seed: int
    sampling: Sampling
    budget: Budget
    training: bool
    program: Program | None = None


class SampleRecord(NamedTuple):
    """Where a message came from: the policy's proposal and the seed it was drawn with."""

    proposal: Proposal
    seed: int


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
) -> Setup:
    """Load what is given by name, bind the planner to the critic, and fill in the defaults.

    Raises:
        ConfigError: The planner or the critic lacks a part of its protocol, or they do not fit each other.
    """
    from search.registry import load_planner

    if isinstance(planner, str):
        planner = load_planner(planner)
    if not isinstance(planner, Planner):
        raise ConfigError(f"expected a planner with a plan method, got {type(planner).__name__}")
    _check_critic(critic)
    system, loaded = read_system(mas, program)
    check_graph(critic, system)
    bound = bind_planner(planner, critic, training)
    return Setup(bound, Dynamics(system), critic, seed, sampling or Sampling(), budget or Budget(), training, loaded)


def read_system(mas: MAS | str | None, program: ProgramSource | None) -> tuple[MAS, Program | None]:
    """Load a system, or a program with the system that search sees in its place; ``mas`` may describe the program.

    Raises:
        ConfigError: There is neither, or the program is described already.
    """
    from mas_gym.loading import load_mas

    if program is not None:
        loaded = load_program(program) if mas is None else load_program(program, mas=mas)
        return loaded.mas, loaded
    if mas is None:
        raise ConfigError("expected mas= or program=, got neither: pass mas='rpsv', or program='my_agents.py:solve'")
    return load_mas(mas), None


def _check_critic(critic: object) -> None:
    if critic is None or isinstance(critic, Critic):
        return
    missing = [name for name in ("name", "terminal_only", "free", "score") if not hasattr(critic, name)]
    raise ConfigError(
        f"expected a critic with name, terminal_only, free and score(contexts); {type(critic).__name__} has no "
        f"{', '.join(missing)}"
    )


def check_graph(critic: Critic | None, mas: MAS) -> None:
    """Let a critic that is bound to some graphs refuse the others before any search (its ``check_graph(mas)``).

    Raises:
        CriticError: It was trained on other graphs.
    """
    check = getattr(critic, "check_graph", None)
    if callable(check):
        check(mas)


_warned: set[tuple[str, str]] = set()


def check_training(problems: object, training: bool) -> None:
    """Refuse the true reward on a test split; plain lists of problems have none.

    Raises:
        ConfigError: ``training`` is set and the task is a test split.
    """
    if training and getattr(problems, "split", None) == "test":
        raise ConfigError(
            f"training=True gives searches the true reward, and {getattr(problems, 'name', 'this task')} is a test "
            "split, which would leak; load it with split='train' or 'dev'"
        )


def check_problems(problems: object, setup: Setup, policy: Policy | AsyncPolicy) -> None:
    """Check the split (`check_training`), and log one warning if the policy was made for other tasks or graphs.

    Raises:
        ConfigError: As `check_training`.
    """
    from mas_gym.policies.registry import purpose_of

    check_training(problems, setup.training)
    purpose, task = purpose_of(policy), getattr(problems, "name", None)
    mas = setup.dynamics.mas
    # What a program asks of its agents is not known from its name.
    known = purpose is not None and isinstance(task, str) and not mas.program
    misuse = purpose.misuse(task, mas.name) if purpose is not None and known else None
    if misuse is not None and (policy.name, misuse) not in _warned:
        _warned.add((policy.name, misuse))
        logger.warning("policy %s was %s", policy.name, misuse)


def resolve_policy(mas: MAS, policy: Policy | AsyncPolicy | None) -> Policy | AsyncPolicy:
    """Return the given policy, or load the one that the MAS names.

    Raises:
        ConfigError: There is neither, or what was given is not a policy.
    """
    if policy is None:
        if not mas.policies:
            raise ConfigError(
                f"expected a policy, and the MAS {mas.name!r} names none: pass policy=load_policy('tiny'), "
                "or add policies: to its config"
            )
        from mas_gym.policies import load_policy

        policy = load_policy(dict(mas.policies))
    if not isinstance(policy, Policy | AsyncPolicy):
        raise ConfigError(
            f"expected a policy with sample(requests) or sample_async(request), got {type(policy).__name__}; "
            "make one with mas_gym.policies.load_policy('tiny')"
        )
    return policy
