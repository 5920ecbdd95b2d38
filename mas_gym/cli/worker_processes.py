"""The number of worker processes of a command."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mas_gym.cli.option_values import read_critic, read_policy

if TYPE_CHECKING:
    from mas_gym.policies.registry import PolicySpec
    from search import Critic, Planner
    from search.compare.comparison_runs import Row
    from search.compare.worker_runs import Workers

_MODELS = (
    "mas_gym.policies.local.transformers",
    "rewardmodels.model.prefix_cache",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.tokenization_utils_tokenizers",
)
"""Packages that local policies and critics import."""

_SHIPPED = ("tiny", "tiny-masprm", "tiny-orm")

# Models up to this size use one core each (see mas_gym.policies.local.forward), at 2 or more bytes per parameter.
_SMALL_BYTES = 100_000_000

# A process takes some seconds to start.
_SEARCHES_PER_WORKER = 50


def read_workers(
    wanted: int | None,
    policy: PolicySpec,
    rows: Sequence[Row],
    problems: int,
    seeds: int = 1,
    cache: Path | None = None,
) -> Workers | None:
    """Return the worker processes that share the runs; None to run all of them in this process.

    Args:
        wanted: The user's choice. By default, one process per core if policy and critics are small local models,
            limited by the number of runs and the start-up cost; otherwise one.
        policy: The policy that each process loads.
        rows: The rows.
        problems: Searches per run.
        seeds: Runs per row.
        cache: Response cache that the processes share.
    """
    from search.compare.worker_runs import Workers

    runs = len(rows) * seeds
    if wanted is None:
        parts = [policy, *(row.critic_spec for row in rows if row.critic is not None and not row.critic.free)]
        small = all(map(_is_small, parts)) and all(_is_shipped(row.planner) for row in rows)
        wanted = min(_cores(), runs * problems // _SEARCHES_PER_WORKER) if small else 1
    count = min(wanted, runs)
    if count < 2:
        return None
    local = not isinstance(policy, str) or policy.startswith(("tiny", "transformers:"))
    return Workers(count, partial(read_policy, policy, cache), critic_maker, _MODELS if local else ())


def critic_maker(spec: str) -> Callable[[], Critic]:
    """Return a picklable function that loads a critic."""
    return partial(read_critic, spec)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _is_shipped(planner: Planner) -> bool:
    """Whether another process can import the planner."""
    from mas_gym.internal.adapter import Adapter
    from search.planners import Cascade
    from search.planners.wrapper import PlannerWrapper

    if isinstance(planner, PlannerWrapper):
        return _is_shipped(planner.planner)
    if isinstance(planner, Cascade):
        return all(map(_is_shipped, planner.stages))
    return not isinstance(planner, Adapter) and type(planner).__module__.startswith("search.")


def _is_small(spec: PolicySpec) -> bool:
    """Whether a policy or critic is a shipped model, or a folder with a model of at most `_SMALL_BYTES`."""
    if not isinstance(spec, str):
        return False
    name = spec.partition("#")[0]
    if name in _SHIPPED:
        return True
    weights = Path(name.removeprefix("transformers:")).glob("*.safetensors")
    sizes = [file.stat().st_size for file in weights]
    return bool(sizes) and sum(sizes) <= _SMALL_BYTES
