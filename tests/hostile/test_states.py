"""Untrusted states and snapshots: any dict is read back or raises a short `DataError`."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mas_gym import Dynamics, load_mas
from mas_gym.envs.env import MASEnv, Snapshot
from mas_gym.errors import DataError
from mas_gym.tasks import Problem, ProblemTask

MODEL = Dynamics(load_mas("dylan"))
STATE = MODEL.transition(MODEL.initial_state("6 + 12?"), ("18", MODEL.mas.ALL)).to_dict()
SNAPSHOT = {"schema": 1, "mas": MODEL.mas.fingerprint, "problem_id": "one", "refusals": 0, "over": False, "rng": None}


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


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([*SNAPSHOT, "state"]), VALUES)
@example("mas", nested(200))
@example("refusals", 10**5000)
def test_hostile_snapshots_are_rejected(field: str, value) -> None:
    try:
        assert Snapshot.from_dict({**SNAPSHOT, "state": STATE, field: value}, MODEL).state
    except DataError as error:
        assert len(str(error)) < 1000


@pytest.mark.parametrize(
    "rng",
    [
        "[" * 100_000,
        "{}",
        "null",
        '{"bit_generator": "PCG64"}',
        '{"bit_generator": "PCG64", "state": {"state": -1, "inc": 1}, "has_uint32": 0, "uinteger": 0}',
        json.dumps({"bit_generator": "PCG64", "state": {"state": 1 << 999, "inc": 1}, "has_uint32": 0, "uinteger": 0}),
        '{"bit_generator": "PCG64", "state": {"state": "x", "inc": []}, "has_uint32": 0, "uinteger": 0}',
        '{"bit_generator": "PCG64", "state": {"state": ' + "9" * 5000 + ', "inc": 1}, "has_uint32": 0, "uinteger": 0}',
    ],
    ids=lambda value: value[:60],
)
def test_hostile_generator_states_are_rejected(rng: str) -> None:
    env = MASEnv(ProblemTask.of([Problem("one", "6 + 12?", "18")]), "dylan")
    env.reset(seed=0)
    with pytest.raises(DataError, match="generator state cannot be read"):
        env.restore_state(env.clone_state()._replace(rng=rng))


@pytest.mark.parametrize("field", [*STATE, "state"])
def test_deeply_nested_values_are_rejected(field: str) -> None:
    deep = nested(100_000)
    with pytest.raises(DataError):
        MODEL.state_from_dict({**STATE, field: deep} if field in STATE else {"schema": deep})
    with pytest.raises(DataError):
        Snapshot.from_dict({**SNAPSHOT, "state": {**STATE, field: deep} if field in STATE else deep}, MODEL)
