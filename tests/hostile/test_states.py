"""Untrusted states: any dict is read back or raises a short `DataError`."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mas_gym import Dynamics, load_mas
from mas_gym.errors import DataError

MODEL = Dynamics(load_mas("dylan"))
STATE = MODEL.transition(MODEL.initial_state("6 + 12?"), ("18", MODEL.mas.ALL)).to_dict()


def nested(depth: int) -> list:
    data: list = []
    for _ in range(depth):
        data = [data]
    return data


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from([-1, 2.5, "\ud800"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["schema", "turns"]), inner),
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["schema", "question", "turns", "acting"]), VALUES)
@example("acting", 10**5000)
@example("schema", nested(200))
@example("turns", nested(200))
@example("turns", [[10**5000, "x", [1]]])
@example("turns", [[0, "18", [10**5000]]])
@example("turns", [[0, "18", [3, 4]], [1, nested(200), [3]]])
def test_hostile_states_are_rejected(field: str, value) -> None:
    try:
        assert MODEL.state_from_dict({**STATE, field: value}).question
    except DataError as error:
        assert len(str(error)) < 1000


@pytest.mark.parametrize("field", STATE)
def test_deeply_nested_values_are_rejected(field: str) -> None:
    deep = nested(100_000)
    with pytest.raises(DataError):
        MODEL.state_from_dict({**STATE, field: deep})
