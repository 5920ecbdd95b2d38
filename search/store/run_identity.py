"""The identity of a run, which contains everything that determines its results, and differences between two runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sized
from datetime import UTC, datetime
from typing import Any

import mas_gym
from mas_gym.errors import IdentityError, shown
from mas_gym.internal.identity import digest_of, identity_of, own_identity
from mas_gym.internal.json_types import JSONMapping, JSONObject
from mas_gym.tasks.base import Problem, Task
from mas_gym.tasks.problem_task import ProblemTask
from mas_gym.tasks.procedural.generated import ProceduralTask
from search.planners.registry import planner_spec
from search.results.run_info import RunInfo
from search.setup import Setup

FORM = 2
"""The schema of a run's config."""


def run_config(setup: Setup) -> JSONObject:
    """Return everything that determines a run's results, in JSON-serializable form.

    Raises:
        IdentityError: The planner, the policy, the critic or the task has no identity.
    """
    others = {} if setup.source is None else {key: _stated(key, part) for key, part in setup.source.stated.items()}
    if setup.planner.needs_costs:
        others["prices"] = _stated("prices", setup.budget.rate)
    return others | {
        "schema": FORM,
        "planner": _stated("planner", setup.planner),
        "mas": setup.dynamics.mas.to_dict(),
        "policy": engine_identity("policy", setup.policy),
        "critic": None if setup.critic is None else engine_identity("critic", setup.critic),
        "seed": setup.seed,
        "training": setup.training,
        "sampling": dataclasses.asdict(setup.sampling),
        "budget": setup.budget.to_dict(),
        "grading": _grading(setup.problems),
    }


def engine_identity(role: str, engine: Any) -> JSONObject:
    """Return the name and the identity of a policy or critic.

    Raises:
        IdentityError: The policy or critic has no identity.
    """
    stated = getattr(engine, "identity", None)
    # The process with the engine has already computed its identity.
    identity = _stated(role, engine) if stated is None or callable(stated) else stated
    return {"name": engine.name, "identity": identity}


def _grading(problems: Iterable[Problem]) -> object:
    """Return the identity of the grading, independent of the selection of problems."""
    if isinstance(problems, ProblemTask | ProceduralTask):
        return _stated("task", problems.identity())
    if own_identity(problems) is not None:
        return _stated("task", problems)
    if isinstance(problems, Task):
        # A custom task: its attributes include its problems, so only a digest is stored.
        return {"task": digest_of(_stated("task", problems))}
    return "strict"


def _stated(role: str, part: object) -> object:
    try:
        return identity_of(part)
    except IdentityError as error:
        raise IdentityError(f"a run with store= requires the identity of its {role}: {error}") from error


def run_facts(setup: Setup) -> JSONObject:
    """Return facts that do not determine a run's results."""
    problems = setup.problems
    named = problems if isinstance(problems, Task) else setup.source
    return {
        "mas_gym": mas_gym.__version__,
        "planner": planner_spec(setup.planner),
        "task": None if named is None else named.name or None,
        "split": (problems.split or None) if isinstance(problems, Task) else None,
        "problems": len(problems) if isinstance(problems, Sized) else None,
        "started": datetime.now(UTC).isoformat(),
    }


def config_differences(old: JSONMapping, new: JSONMapping) -> list[str]:
    """Return the differences between two configs, such as ``"planner.fields.width was 1, now 8"``.

    >>> config_differences({"program": {"files": {"agents.py": "1f"}}}, {"program": {"files": {"agents.py": "2e"}}})
    ["the program's file agents.py changed"]
    """
    found = list(_unequal(dict(old), dict(new), ()))
    # The place of a lambda usually changes with its file.
    edited = {path[0] for path, *_ in found if "files" in path}
    kept = [entry for entry in found if not (entry[0][0] in edited and "place" in entry[0])]
    return list(dict.fromkeys(_told(*entry) for entry in kept))


def _unequal(old: object, new: object, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict) and path != ("mas",):
        for key in dict.fromkeys((*new, *old)):
            yield from _unequal(old.get(key), new.get(key), (*path, key))
    elif old != new:
        yield path, old, new


def _told(path: tuple[str, ...], old: object, new: object) -> str:
    for kind, noun in (("files", "file"), ("packages", "package")):
        if kind in path[1:-1]:
            what = f"the {path[0]}'s {noun} {path[path.index(kind) + 1]}"
            if kind == "files" and old is not None and new is not None:
                return f"{what} changed"
            return f"{what} was {_value(old)}, now {_value(new)}"
    return f"{'.'.join(path)} was {_value(old)}, now {_value(new)}"


def _value(value: object) -> str:
    return "absent" if value is None else shown(value)


def named_alike(old: RunInfo, config: JSONMapping, facts: JSONMapping) -> bool:
    """Return whether a stored run has the same planner, critic, seed, policy, system and task, by name."""

    def names(config: JSONMapping, facts: JSONMapping) -> list[Any]:
        parts = [(config.get(key) or {}).get("name") for key in ("policy", "critic", "mas")]
        settings = [config.get(key) for key in ("schema", "seed", "training")]
        return [*parts, *settings, *(facts.get(key) for key in ("planner", "task", "split"))]

    return names(old.config, old.facts) == names(config, facts)
