"""Digests of questions, by which evaluations leave out a critic's training questions."""

from __future__ import annotations

from hashlib import blake2b

_HELD_OUT_SHARE = 5


def question_digest(question: str) -> str:
    """Return the digest of a question, 16 hexadecimal digits; spaces do not matter."""
    return blake2b(" ".join(question.split()).encode("utf-8", "replace"), digest_size=8).hexdigest()


def for_training(question: str) -> bool:
    """Return whether a question is in the training part of a log: four fifths, selected by digest."""
    return int(question_digest(question), 16) % _HELD_OUT_SHARE > 0
