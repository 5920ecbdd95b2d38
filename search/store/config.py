"""What determines a run's results, and further facts worth storing with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sized
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from mas_gym.errors import IdentityError
from mas_gym.identity import digest_of, identity_of
from mas_gym.tasks.base import Problem
from mas_gym.tasks.sequences import ProblemTask, ProceduralTask
from search.setup import Setup

FORM = 2
"""The form of a run's config. In form 1, planners, policies and critics stated only a part of their identity."""

_PARTS = ("planner", "policy", "critic", "grading")


def run_config(setup: Setup, problems: Iterable[Problem], policy: Any) -> dict[str, Any]:
    """Return all that determines a run's results, JSON-able.

    Raises:
        IdentityError: The planner, the policy, the critic or the task cannot state its identity.
    """
    return {
        "schema": FORM,
        "planner": _stated("planner", setup.planner),
        "mas": setup.dynamics.mas.to_dict(),
        "policy": engine_identity("policy", policy),
        "critic": None if setup.critic is None else engine_identity("critic", setup.critic),
        "seed": setup.seed,
        "training": setup.training,
        "sampling": dataclasses.asdict(setup.sampling),
        "budget": dataclasses.asdict(setup.budget),
        "grading": _grading(problems),
    }


def engine_identity(role: str, engine: Any) -> dict[str, Any]:
    """Return the name and the identity of a policy or critic.

    Raises:
        IdentityError: It cannot state its identity.
    """
    stated = getattr(engine, "identity", None)
    # Another process that holds the engine has already computed its identity.
    identity = _stated(role, engine) if stated is None or callable(stated) else stated
    return {"name": engine.name, "identity": identity}


def _grading(problems: Iterable[Problem]) -> Any:
    """Return how problems are graded, and nothing about which problems they are."""
    if isinstance(problems, ProblemTask | ProceduralTask):
        return _stated("task", problems.identity())
    if callable(getattr(problems, "identity", None)):
        return _stated("task", problems)
    if hasattr(problems, "grade") and hasattr(problems, "extract"):
        # A user's own task: its attributes include its problems, so only a digest is stored.
        return {"task": digest_of(_stated("task", problems))}
    return "strict"


def _stated(role: str, part: object) -> Any:
    try:
        return identity_of(part)
    except IdentityError as error:
        raise IdentityError(
            f"a run with store= needs to know what determines the results of its {role}: {error}"
        ) from (error)


def run_facts(setup: Setup, problems: Iterable[Problem]) -> dict[str, Any]:
    """Return what does not determine a run's results."""
    from search.registry import planner_spec

    try:
        installed = version("mas-gym")
    except PackageNotFoundError:
        installed = "unknown"
    return {
        "mas_gym": installed,
        "planner": planner_spec(setup.planner),
        "task": getattr(problems, "name", None),
        "split": getattr(problems, "split", None),
        "problems": len(problems) if isinstance(problems, Sized) else None,
        "started": datetime.now(UTC).isoformat(),
    }


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return what differs between two configs, ``"planner.fields.width was 1, now 8"``."""
    found: list[str] = []
    for key in dict.fromkeys((*new, *old)):
        pairs = _unequal(old.get(key), new.get(key), key) if key in _PARTS else [(key, old.get(key), new.get(key))]
        found += [f"{path} was {_brief(was)}, now {_brief(now)}" for path, was, now in pairs if was != now]
    return found


def _unequal(old: Any, new: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys((*new, *old)):
            yield from _unequal(old.get(key), new.get(key), f"{path}.{key}")
    elif old != new:
        yield path, old, new


def _brief(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


def continues(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether a config of an earlier form may be of the same run: all that it states is the same."""
    if old.get("schema") == new["schema"]:
        return False
    same = all(old.get(key) == new[key] for key in ("mas", "seed", "training", "sampling", "budget"))
    was, now = _part(old.get("planner")), _part(new["planner"])
    planner = was["class"].rpartition(".")[2] == str(now.get("class")).rpartition(".")[2] and all(
        now.get("fields", {}).get(key, value) == value for key, value in was["settings"].items()
    )
    names = [[_part(config.get(key)).get("name") for key in ("policy", "critic")] for config in (old, new)]
    return same and planner and names[0] == names[1]


def _part(value: Any) -> dict[str, Any]:
    return {"class": "", "settings": {}} | value if isinstance(value, dict) else {}
