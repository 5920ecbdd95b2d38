"""The questions that a critic was trained on, as digests in its folder, so that evaluations can leave them out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from mas_gym.errors import ConfigError, DataError, shown
from mas_gym.policies.folder_checks import read_object
from mas_gym.tasks.base import Problem, question_digest
from rewardmodels.model.critic_folder import write_whole

FILE = "questions.json"


def write_questions(folder: Path, digests: Iterable[str]) -> None:
    """Write the digests of the training questions into a critic's folder."""
    write_whole(folder / FILE, json.dumps({"questions": sorted(set(digests))}, indent=0) + "\n")


def trained_questions(critic: str) -> frozenset[str]:
    """Return the digests of the questions that a critic was trained on; empty if they are not known.

    Args:
        critic: A folder, a combination of critics such as ``"ensemble:A,B"``, or another argument of
            `rewardmodels.load_critic`.

    Raises:
        DataError: A file in a folder is invalid.
    """
    specs = (critic, *critic.partition(":")[2].split(","))
    folders = [Path(spec.partition("#")[0]).expanduser() for spec in specs if spec]
    # The members of a saved combination are folders in its folder.
    files = [path for folder in folders if folder.is_dir() for path in (folder / FILE, *folder.glob(f"*/{FILE}"))]
    return frozenset[str]().union(*map(_digests, filter(Path.is_file, files)))


def _digests(path: Path) -> list[str]:
    found = read_object(path).get("questions")
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise DataError(f"{path}: expected a list of digests as questions, got {shown(found)}; train the critic again")
    return found


def untrained(problems: Sequence[Problem], critics: Iterable[str], source: Path, held_out: bool) -> list[Problem]:
    """Return the problems that critics were not trained on.

    Args:
        problems: The problems of a log.
        critics: The critics' specs.
        source: The log, for messages.
        held_out: Whether training questions are left out; otherwise they are an error.

    Raises:
        ConfigError: A critic was trained on some of the problems, or, with ``held_out``, on all of them.
    """
    known = frozenset[str]().union(*map(trained_questions, critics))
    others = [problem for problem in problems if question_digest(problem.question) not in known]
    if len(others) < len(problems) and not held_out:
        raise ConfigError(
            f"expected questions that the critics were not trained on, got {len(problems) - len(others):,} of "
            f"{len(problems):,} that they were; leave them out with --split held-out"
        )
    if not others:
        raise ConfigError(
            f"--split held-out: the critics were trained on all {len(problems):,} questions of {source}; train them on "
            "a part of the questions with mas-gym train ... --split train, or use another log"
        )
    return others
