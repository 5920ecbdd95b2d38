"""Every error class keeps its message and attributes when it is copied or sent to another process."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import mas_gym.plugins
import search  # noqa: F401 - defines errors
from mas_gym.errors import MASGymError, SearchError, is_number
from mas_gym.internal.parallel_jobs import _portable
from mas_gym.programs import Program  # noqa: F401 - defines errors


def subclasses(base: type) -> Iterator[type]:
    for kind in base.__subclasses__():
        yield kind
        yield from subclasses(kind)


def sent(error: Any) -> Any:
    return pickle.loads(pickle.dumps(error))


KINDS = [kind for kind in subclasses(MASGymError) if kind.__module__.startswith(("mas_gym", "search", "rewardmodels"))]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("copied", [sent, copy.deepcopy, lambda error: sent(_portable(error))])
def test_error_round_trip_keeps_message_and_faults(kind: Any, copied: Callable[[Any], Any]) -> None:
    error = kind("message", ("a", "b")) if "faults" in inspect.signature(kind.__init__).parameters else kind("message")
    error.add_note("note")
    got = copied(error)
    assert type(got) is kind and str(got) == "message"
    assert vars(got) == vars(error) and got.__notes__ == ["note"]


def test_unpicklable_user_error_becomes_a_search_error() -> None:
    class Odd(MASGymError):
        def __init__(self, one: str, two: str) -> None:
            super().__init__(f"{one} {two}")

    got = _portable(Odd("a", "b"))
    assert type(got) is SearchError and "Odd: a b" in str(got)


def test_user_code_error_is_a_public_class() -> None:
    assert mas_gym.plugins.UserCodeError in KINDS


@pytest.mark.parametrize(("value", "expected"), [(0, True), (-1.5, True), (10**400, True), (True, False), ("1", False)])
def test_is_number_accepts_finite_numbers(value: object, expected: bool) -> None:
    assert is_number(value) is expected


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_is_number_rejects_infinite_values_and_nan(value: float) -> None:
    assert not is_number(value)
