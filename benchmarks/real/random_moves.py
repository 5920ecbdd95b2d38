"""A policy for the system ``game24`` without a language model: each step is a random move.

``mas-gym rollouts --task game24 --policy benchmarks/real/random_moves.py:proposer --store trees.db``
"""

from __future__ import annotations

import random
from functools import lru_cache

from benchmarks.real.game24_text import combine, read_left, read_question, write_move
from mas_gym.policies.base import SamplingRequest
from mas_gym.policies.scripted import ScriptedPolicy
from mas_gym.tasks.procedural.game24 import TARGET, moves

NOTHING = "no move is left"


def script(request: SamplingRequest, seed: int) -> str:
    """Write a move drawn uniformly from the distinct ones, or as the last agent the formula of the steps."""
    options = options_of(request.agent, request.messages[-1].content)
    return random.Random(seed).choice(options) if options else NOTHING


@lru_cache(maxsize=4096)
def options_of(agent: str, prompt: str) -> tuple[str, ...]:
    """Return the messages that an agent may write."""
    inputs = prompt.split("\n\n")
    if agent == "Answer":
        numbers = read_question(inputs[0])
        formula = None if numbers is None else combine(numbers, inputs[1:])
        return () if formula is None else (f"Answer: {formula} = {TARGET}",)
    left = read_left(inputs[-1]) or read_question(inputs[-1])
    return () if left is None else tuple(write_move(left, move) for move in moves(left))


def proposer() -> ScriptedPolicy:
    return ScriptedPolicy(script, name="random-moves")
