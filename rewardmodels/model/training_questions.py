"""The questions that a critic was trained on, as digests in its folder, so that evaluations can leave them out."""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from mas_gym.errors import DataError, shown
from rewardmodels.model.critic_folder import read_object, write_whole

FILE = "questions.json"
_HELD_OUT_SHARE = 5


def question_digest(question: str) -> str:
    """Return the digest of a question, 16 hexadecimal digits; spaces do not matter."""
    return blake2b(" ".join(question.split()).encode("utf-8", "replace"), digest_size=8).hexdigest()


def for_training(question: str) -> bool:
    """Return whether a question is in the training part of a log: four fifths, selected by digest."""
    return int(question_digest(question), 16) % _HELD_OUT_SHARE > 0


def write_questions(folder: Path, questions: Iterable[str]) -> None:
    """Write the digests of the training questions into a critic's folder."""
    write_whole(folder / FILE, json.dumps({"questions": sorted(set(map(question_digest, questions)))}, indent=0) + "\n")


def trained_questions(critic: str) -> frozenset[str]:
    """Return the digests of the questions that a critic was trained on; empty if they are not known.

    Args:
        critic: A folder, or another argument of `rewardmodels.load_critic`.

    Raises:
        DataError: The file in the folder is invalid.
    """
    path = Path(critic.partition("#")[0]).expanduser() / FILE
    if not path.is_file():
        return frozenset()
    found = read_object(path).get("questions")
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise DataError(f"{path}: expected a list of digests as questions, got {shown(found)}; train the critic again")
    return frozenset(found)
