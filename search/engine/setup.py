"""What determines a search, apart from its problem and the policy."""

from __future__ import annotations

from dataclasses import dataclass

from mas_gym.dynamics import Dynamics
from mas_gym.errors import ConfigError
from mas_gym.graph import MAS
from mas_gym.policies.base import AsyncPolicy, Policy
from search.engine.settings import Budget, Sampling
from search.protocol import Critic, Planner, bind_planner


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
    """

    planner: Planner
    dynamics: Dynamics
    critic: Critic | None
    seed: int
    sampling: Sampling
    budget: Budget
    training: bool


def make_setup(
    planner: Planner | str,
    mas: MAS | str,
    critic: Critic | None,
    *,
    seed: int = 42,
    sampling: Sampling | None = None,
    budget: Budget | None = None,
    training: bool = False,
) -> Setup:
    """Load what is given by name, bind the planner to the critic, and fill in the defaults.

    Raises:
        ConfigError: The planner or the critic lacks a part of its protocol, or they do not fit each other.
    """
    from mas_gym.loading import load_mas
    from search.registry import load_planner

    if isinstance(planner, str):
        planner = load_planner(planner)
    if not isinstance(planner, Planner):
        raise ConfigError(f"expected a planner with a plan method, got {type(planner).__name__}")
    _check_critic(critic)
    system = mas if isinstance(mas, MAS) else load_mas(mas)
    bound = bind_planner(planner, critic, training)
    return Setup(bound, Dynamics(system), critic, seed, sampling or Sampling(), budget or Budget(), training)


def _check_critic(critic: object) -> None:
    if critic is None or isinstance(critic, Critic):
        return
    missing = [name for name in ("name", "terminal_only", "free", "score") if not hasattr(critic, name)]
    raise ConfigError(
        f"expected a critic with name, terminal_only, free and score(contexts); {type(critic).__name__} has no "
        f"{', '.join(missing)}"
    )


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
