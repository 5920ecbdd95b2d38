"""The base class of critics that run a local model."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

from mas_gym.errors import CriticError
from mas_gym.systems.state import MASState
from search.protocol import Critic, ScoringContext

_GRID = 1_000_000
_REMEMBERED = 200_000


class ModelCritic(Critic):
    """A critic that computes the value of each state once; subclasses implement `values`."""

    free = False

    def __init__(self) -> None:
        self._known: dict[tuple[str, MASState], float] = {}

    def score(self, contexts: Sequence[ScoringContext]) -> list[float]:
        """Return one value per state, in order.

        Raises:
            CriticError: The model cannot score a state, or its output is not a number.
        """
        if len(self._known) > _REMEMBERED:
            self._known.clear()
        fresh = {(c.mas.fingerprint, c.state): c for c in contexts}
        fresh = {key: context for key, context in fresh.items() if key not in self._known}
        for key, value in zip(fresh, self.values(list(fresh.values())) if fresh else (), strict=True):
            if not math.isfinite(value):
                raise CriticError(
                    f"critic {self.name!r}: expected a finite value for {key[1]!r}, got {value}; its weights are "
                    "damaged, or its dtype has too small a range"
                )
            self._known[key] = rounded(value)
        return [self._known[context.mas.fingerprint, context.state] for context in contexts]

    @abstractmethod
    def values(self, contexts: Sequence[ScoringContext]) -> Sequence[float]:
        """Return the values of distinct states, in order."""


def rounded(value: float) -> float:
    """Return a value rounded to six decimal places, which removes most differences between batches."""
    return round(value * _GRID) / _GRID
