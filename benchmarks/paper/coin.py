"""Random grades instead of the reference answer: one message in three is right, regardless of its text.

Agents with random weights never answer correctly, so their searches contain no right leaf to mine. The labels are
meaningless, and so is everything that is learned from them.
"""

from __future__ import annotations

from hashlib import blake2b

from mas_gym.tasks.base import Grade, Problem

SIDES = 3


def flip(problem: Problem, text: str) -> Grade:
    """Return the side that the message falls on, as its answer; the first side is right.

    Args:
        problem: The problem; its reference answer is not looked at.
        text: The final message.
    """
    digest = blake2b(f"{problem.id}\n{text}".encode("utf-8", "surrogatepass"), digest_size=4).digest()
    side = int.from_bytes(digest) % SIDES
    return Grade(side == 0, str(side), "equal" if side == 0 else "different")
