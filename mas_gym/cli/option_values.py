"""Functions that parse and check the values of options."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mas_gym.errors import ConfigError, shown_url
from mas_gym.internal.suggestions import choice
from mas_gym.plugins import yaml_value

if TYPE_CHECKING:
    from mas_gym.policies import AsyncPolicy
    from mas_gym.policies.registry import PolicySpec
    from search import Budget, Critic, Planner, Prices
    from search.compare.comparison_runs import Row


def check_folder(path: Path | None) -> None:
    """Check that a file's folder exists before any work starts."""
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"{path}: its folder does not exist; create it with: mkdir -p {path.parent}")


def check_kind(kind: str | None) -> Any:
    """Check a kind of answer and return it; ``"number"`` by default."""
    from mas_gym.tasks.base import KINDS

    return choice("--kind", "number" if kind is None else kind, KINDS)


def read_pairs(pairs: Sequence[str] | None) -> dict[str, Any]:
    """Read ``key=value`` options; values are YAML scalars, so ``3`` is a number and ``true`` a boolean."""
    read: dict[str, Any] = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"expected an option as key=value, such as difficulty=3, got {pair!r}")
        read[key.replace("-", "_")] = yaml_value(value, f"option {key}: expected a YAML value, quoted if necessary")
    return read


def read_budget(pairs: Sequence[str] | None, flag: str, prices: Prices | None) -> Budget:
    """Read limits such as ``calls=200``; a limit in USD requires prices.

    Raises:
        ConfigError: A limit is unknown, not a positive number, or in USD without prices.
    """
    from search.costs import Budget

    try:
        budget = replace(Budget.read(",".join(pairs)) if pairs else Budget(), prices=prices)
        budget.check_priced()
        return budget
    except ConfigError as error:
        raise ConfigError(f"{flag}: {str(error).removeprefix('budget: ')}") from None


def read_prices(path: Path | None) -> Prices | None:
    """Read a file of prices. Raises `ConfigError`."""
    from search.prices import as_prices

    return None if path is None else as_prices(path)


def read_seeds(text: str) -> list[int]:
    """Parse seeds such as ``"14,24,42"``."""
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"expected whole-number seeds separated by commas, such as 14,24,42, got {text!r}") from error
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"expected distinct seeds, got {text!r}: repeating a seed adds no information")
    return seeds


def policy_label(spec: PolicySpec) -> str:
    """Return a policy's name for titles."""
    name = spec if isinstance(spec, str) else ", ".join(f"{agent}={policy}" for agent, policy in spec.items())
    return shown_url(name)


def read_policy(spec: PolicySpec, cache: Path | None = None, traces: Path | None = None) -> AsyncPolicy:
    """Load a policy; ``cache`` adds a response cache, and ``traces`` records its token traces."""
    from mas_gym.policies import load_policy
    from mas_gym.policies.token_traces import traced

    check_folder(cache)
    policy = load_policy(spec) if cache is None else load_policy(spec, cache=str(cache))
    return policy if traces is None else traced(policy, traces)


def read_critic(spec: str) -> Critic:
    """Load a critic."""
    from rewardmodels import load_critic

    critic: Critic = load_critic(spec)
    return critic


def load_weights(rows: Iterable[Row]) -> None:
    """Load the weights of lazily loaded critics, so that damaged files are reported at once."""
    from rewardmodels import LearnedCritic

    for row in rows:
        if isinstance(row.critic, LearnedCritic):
            row.critic.load()


def read_planner(spec: str) -> tuple[str, Planner]:
    """Load a planner; return its name in tables, and the planner."""
    from search import load_planner, planner_spec
    from search.protocol import planner_name

    planner = load_planner(spec)
    label = planner_spec(planner)
    return (spec if label == planner_name(planner) else label), planner
