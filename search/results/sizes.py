"""The size that a planner got for an equal cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    pass


class Calibrated(NamedTuple):
    """The size that a planner was given, and what it spent on the calibration problems.

    Attributes:
        label: The row.
        setting: The setting that was changed; ``""`` for a planner without one.
        size: Its value.
        spent: Tokens or calls per problem.
        problems: The number of calibration problems.
    """

    label: str
    setting: str
    size: int
    spent: float
    problems: int
