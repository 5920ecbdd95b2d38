"""The text spaces, alone and under Gymnasium's vector utilities."""

import copy
import json
import multiprocessing
import pickle
from ctypes import c_uint8

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import (
    batch_space,
    concatenate,
    create_empty_array,
    create_shared_memory,
    iterate,
    read_from_shared_memory,
    write_to_shared_memory,
)
from hypothesis import given
from hypothesis import strategies as st

from mas_gym import ChatMessage, Message, Records, Unicode
from mas_gym.envs.spaces import utf8_length
from mas_gym.errors import ConfigError, DataError

ANY_TEXT = st.text(st.characters(exclude_categories=[]), max_size=30)
MESSAGES = Records(Message, (4, None, 5), 6, 1_000)
CHAT = Records(ChatMessage, (None, None), 2, 1_000)
ROWS = st.lists(st.builds(Message, st.integers(0, 3), ANY_TEXT, st.integers(0, 4)), max_size=6).map(tuple)


@given(ANY_TEXT, st.integers(0, 100))
def test_text_space_contains_every_text_within_the_limit(text: str, limit: int) -> None:
    size = len(text.encode("utf-8", "surrogatepass"))
    assert utf8_length(text) == size
    assert (text in Unicode(limit)) == (size <= limit)


@pytest.mark.parametrize("stranger", [None, 3, b"bytes", ["a"], ("a",), np.array("a")])
def test_text_space_rejects_other_types(stranger) -> None:
    assert stranger not in Unicode()


SPACES = [Unicode(), Unicode(0), Unicode(3), MESSAGES, CHAT, Records(Message, (1, None, 1), 3, 4)]


@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_samples_are_contained_and_reproducible(space) -> None:
    twin = copy.deepcopy(space)
    space.seed(3)
    twin.seed(3)
    samples = [space.sample() for _ in range(200)]
    assert samples == [twin.sample() for _ in range(200)]
    assert all(sample in space for sample in samples)
    assert space.from_jsonable(json.loads(json.dumps(space.to_jsonable(samples)))) == samples
    assert type(space)(**{**arguments(space), "seed": 3}).sample() == samples[0]


def arguments(space):
    if isinstance(space, Unicode):
        return {"max_bytes": space.max_bytes}
    return {name: getattr(space, name) for name in ("record", "fields", "max_rows", "max_bytes")}


def test_samples_contain_several_writing_systems() -> None:
    space = Unicode(seed=0)
    text = "".join(space.sample() for _ in range(100))
    assert "\n" in text
    assert " " in text
    assert any("\u05d0" <= c <= "\u05ea" for c in text)
    assert any(c > "\uffff" for c in text)
    text.encode("utf-8")


@pytest.mark.parametrize("space", [Unicode(), MESSAGES])
def test_masks_of_the_text_space_are_rejected(space) -> None:
    with pytest.raises(ConfigError, match="no mask"):
        space.sample(mask=np.ones(2, np.int8))
    with pytest.raises(ConfigError, match="no mask"):
        space.sample(probability=np.ones(2))


def test_recipient_part_of_an_action_can_be_masked() -> None:
    space = spaces.Tuple((Unicode(), spaces.Discrete(6)), seed=1)
    mask = np.array([0, 1, 0, 0, 0, 1], np.int8)
    assert {space.sample(mask=(None, mask))[1] for _ in range(40)} == {1, 5}


@pytest.mark.parametrize("limit", [-1, 1.5, "9", True, None])
def test_invalid_limits_are_rejected(limit) -> None:
    with pytest.raises(ConfigError, match="max_bytes: expected an integer"):
        Unicode(limit)


def test_spaces_are_equal_after_pickling() -> None:
    assert Unicode(5) == Unicode(5) != Unicode(6)
    assert Unicode(5) != spaces.Text(5)
    assert MESSAGES == copy.deepcopy(MESSAGES) != CHAT
    assert Unicode(1_000) != MESSAGES
    assert len({Unicode(5), Unicode(5), MESSAGES, copy.copy(MESSAGES)}) == 2
    assert repr(Unicode(5)) == "Unicode(5)"
    assert repr(MESSAGES) == "Records(Message, (4, None, 5), 6, 1000)"
    for space in (Unicode(5), MESSAGES):
        thawed = pickle.loads(pickle.dumps(space))
        assert thawed == space
        assert len(pickle.dumps(space)) < 1_000
        assert not space.is_np_flattenable


@pytest.mark.parametrize(
    "stranger",
    [
        *(None, [Message(0, "a", 1)], ((0, "a", 1),), (ChatMessage("user", "a"),), (Message(0, "a", 1),) * 7),
        *((Message(place, "a", 1),) for place in (4, -1)),
        *((Message(0, "a", to),) for to in (5, "1")),
        *((Message(0, text, 1),) for text in (b"a", "a" * 1_001)),
        (Message(0, "a" * 600, 1),) * 2,
    ],
)
def test_records_space_rejects_other_values(stranger) -> None:
    assert stranger not in MESSAGES


@pytest.mark.parametrize(("space", "members"), [(MESSAGES, ROWS), (Unicode(200), ANY_TEXT)], ids=["records", "texts"])
@given(data=st.data())
def test_shared_memory_round_trip_keeps_values(space, members, data) -> None:
    values = data.draw(st.lists(members, min_size=1, max_size=4))
    count = len(values)
    # A plain array: no lock is needed where nothing is shared.
    memory = create_shared_memory(space, n=count, ctx=_Context)
    live = read_from_shared_memory(space, memory, n=count)
    assert list(live) == list(create_empty_array(space, count))
    for i, value in enumerate(values):
        assert value in space
        write_to_shared_memory(space, i, value, memory)
    assert copy.deepcopy(live) == tuple(values)
    assert live[0] == values[0]
    assert live[-1] == values[-1]
    assert live[:2] == tuple(values[:2])
    assert len(live) == count
    # A shorter value leaves nothing of a longer one behind.
    write_to_shared_memory(space, 0, space.empty(), memory)
    assert live[0] == space.empty()
    with pytest.raises(IndexError):
        live[count]


class _Context:
    """Gives arrays without a lock."""

    @staticmethod
    def Array(kind, size):
        class Plain:
            data = (kind * size)()

            def get_obj(self):
                return self.data

        return Plain()


def test_shared_memory_is_visible_to_another_process() -> None:
    context = multiprocessing.get_context("spawn")
    space = Unicode(100)
    memory = create_shared_memory(space, n=2, ctx=context)
    process = context.Process(target=write_to_shared_memory, args=(space, 1, "zweite Zeile\n نص 🙂", memory))
    process.start()
    process.join()
    assert copy.deepcopy(read_from_shared_memory(space, memory, n=2)) == ("", "zweite Zeile\n نص 🙂")


def test_value_too_large_for_shared_memory_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"got 1500 MiB for.*shared_memory=False"):
        create_shared_memory(Unicode(15 * 2**20), n=100)
    memory = create_shared_memory(Unicode(4), n=1)
    with pytest.raises(DataError, match="fits Unicode\\(4\\), got 5 bytes"):
        write_to_shared_memory(Unicode(4), 0, "abcde", memory)
    assert memory.get_obj()._type_ is c_uint8


def test_vector_utilities_support_the_spaces() -> None:
    action = spaces.Tuple((Unicode(50), spaces.Discrete(6)))
    batch = batch_space(action, 3)
    batch.seed(4)
    sample = batch.sample()
    assert sample in batch
    items = list(iterate(batch, sample))
    assert items == [(text, number) for text, number in zip(*sample, strict=True)]
    joined = concatenate(Unicode(50), ["a", "b"], create_empty_array(Unicode(50), 2))
    assert joined == ("a", "b")
    assert create_empty_array(MESSAGES, 2) == ((), ())
    observation = spaces.Dict({"transcript": MESSAGES, "acting": spaces.Discrete(5)})
    rows = [{"transcript": (Message(0, "a", 1),), "acting": 1}, {"transcript": (), "acting": 0}]
    joined = concatenate(observation, rows, create_empty_array(observation, 2))
    assert joined["transcript"] == ((Message(0, "a", 1),), ())
    assert joined["acting"].tolist() == [1, 0]
