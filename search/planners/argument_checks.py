"""Checks of the settings of planners."""

from __future__ import annotations

from mas_gym.errors import ConfigError, is_number, whole_number


def check_at_least(planner: object, low: int, **numbers: int) -> None:
    """Check that a planner's settings are integers of at least ``low``.

    Raises:
        ConfigError: A setting is too small or not an integer.
    """
    for name, number in numbers.items():
        whole_number(f"{type(planner).__name__}: {name}", number, at_least=low)


def check_positive(planner: object, **numbers: float) -> None:
    """Check that a planner's settings are finite numbers above 0.

    Raises:
        ConfigError: A setting is not a finite number above 0.
    """
    for name, number in numbers.items():
        if not is_number(number) or number <= 0:
            raise ConfigError(
                f"{type(planner).__name__}: expected {name} to be a positive finite number, got {number!r}"
            )
