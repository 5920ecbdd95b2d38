"""What determines a search, apart from its problem and the policy; the engine and the store share these types.

A planner has a short form, as in ``"mcts:10,3,leaf=bootstrap"``. One of your own is named by its file, as in
``"my.py:Lookahead:2,3"`` (see `mas_gym.user_code`). A package adds names with an entry point in the group
``mas_gym.planners``, which loads to a planner class or a function that returns a planner.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

from mas_gym.dynamics import Dynamics
from mas_gym.errors import ConfigError
from mas_gym.graph import MAS
from mas_gym.policies.base import AsyncPolicy, Policy, effective_temperature
from mas_gym.programs import Program, load_program
from mas_gym.user_code import is_user_code, load_user_code, read_settings, unknown
from search import planners
from search.plan import Usage
from search.planners.variants import OWN
from search.protocol import Critic, Planner, as_critic, as_planner, planner_name
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
    if isinstance(planner, str):
        planner = load_planner(planner)
    planner = as_planner(planner)
    critic = None if critic is None else as_critic(critic)
    system, loaded = read_system(mas, program)
    if critic is not None:
        critic.check_graph(system)
    bound = as_planner(planner.for_run(critic, training))
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


GROUP = "mas_gym.planners"
_SHIPPED: dict[str, Callable[..., Any]] = {
    "single": planners.SinglePass,
    "sc": planners.SelfConsistency,
    "bon": planners.BestOfN,
    "sbs": planners.StepBeamSearch,
    "mcts": planners.MCTS,
    "puct": planners.PUCT,
    "halving": planners.SequentialHalving,
    "dvts": planners.DVTS,
    "rebase": planners.REBASE,
    "adaptive": planners.AdaptiveBranching,
}
_SHORT = {"c": "c_uct"}
_RECIPIENTS = "recipients"


def planner_names() -> list[str]:
    """Return the names that `load_planner` knows, those of installed packages included."""
    return sorted(_SHIPPED | _plugins())


def load_planner(spec: str) -> Planner:
    """Build a planner from its short form.

    Args:
        spec: A name, then after a colon its settings in order or by name: ``"single"``, ``"sc:5"``,
            ``"sc:5,weights=critic"``, ``"bon:5"``, ``"sbs:5,3"`` (B2, B1), ``"mcts:10,3"``,
            ``"mcts:10,3,leaf=bootstrap,c=2"``; or ``"FILE.py:NAME"`` with settings likewise. Every shipped planner
            also takes ``recipients=``, the rule of `search.planners.variants`.

    Returns:
        The planner.

    Raises:
        UnknownNameError: No planner has that name; the message lists the known ones.
        ConfigError: A setting is unknown, missing its value, or out of range.

    >>> load_planner("sbs:5,3")
    StepBeamSearch(b2=5, b1=3)
    """
    spec = spec.strip()
    if is_user_code(spec):
        planner = load_user_code("planner", spec)
    else:
        name, _, settings = spec.partition(":")
        make = _find(name.strip())
        args, kwargs = read_settings(f"planner {spec!r}", settings, lambda key: _full(make, key))
        recipients: Any = kwargs.pop(_RECIPIENTS, OWN) if make in _SHIPPED.values() else OWN
        try:
            inspect.signature(make).bind(*args, **kwargs)
        except TypeError as error:
            raise ConfigError(f"planner {spec!r}: {error}; expected {name}:{_usage(make)}") from None
        planner = make(*args, **kwargs)
        if recipients != OWN:
            planner = planners.ChosenRecipients(planner, recipients)
    try:
        return as_planner(planner)
    except ConfigError as error:
        raise ConfigError(f"planner {spec!r}: {error}") from None


def planner_makers() -> dict[str, Callable[..., Any]]:
    """Return every planner class or function by its name, those of installed packages included."""
    return {name: _find(name) for name in planner_names()}


def planner_spec(planner: Planner) -> str:
    """Return the short form of a planner, for reports; the class name for one that is not registered.

    >>> planner_spec(planners.MCTS(10, 3, leaf="bootstrap"))
    'mcts:10,3,leaf=bootstrap'
    """
    if isinstance(planner, planners.ChosenRecipients):
        inner = planner_spec(planner.planner)
        return f"{inner}{',' if ':' in inner else ':'}{_RECIPIENTS}={planner.recipients}"
    for name, make in _SHIPPED.items():
        if type(planner) is make:
            return name + _settings(planner)
    return planner_name(planner)


def _settings(planner: Planner) -> str:
    """Return the leading whole numbers by position, and by name whatever else is not the default."""
    shown: list[str] = []
    leading = True
    for parameter in inspect.signature(type(planner)).parameters.values():
        value = getattr(planner, parameter.name)
        leading = leading and isinstance(parameter.default, int)
        # The critic determines the kind of values, and tables name the critic next to the planner.
        if parameter.name == "values" or (not leading and value == parameter.default):
            continue
        short = f"{value:g}" if isinstance(value, float) else str(getattr(value, "__name__", value)).lower()
        text = repr(value) if isinstance(value, float) and float(short) != value else short
        shown.append(text if leading else f"{parameter.name.replace('c_uct', 'c')}={text}")
    return ":" + ",".join(shown) if shown else ""


def _find(name: str) -> Callable[..., Any]:
    if name in _SHIPPED:
        return _SHIPPED[name]
    plugins = _plugins()
    if name not in plugins:
        raise unknown("planner", name, _SHIPPED | plugins, GROUP)
    loaded: Callable[..., Any] = plugins[name].load()
    return loaded


def _plugins() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in _SHIPPED}


def _full(make: Callable[..., Any], key: str) -> str:
    parameters = inspect.signature(make).parameters
    return key if key in parameters else _SHORT.get(key, key)


def _usage(make: Callable[..., Any]) -> str:
    return ",".join(f"{p.name}={p.default}" for p in inspect.signature(make).parameters.values())
