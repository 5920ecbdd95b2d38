"""The critic's input: content, shared prefixes, truncation, and messages that cannot imitate others."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
from grove import MODEL, chain
from hypothesis import given
from hypothesis import strategies as st

import mas_gym
from mas_gym.errors import CriticError
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.state import MASState
from rewardmodels.data.encode import CUT, Encoder, drop_oldest, state_parts, state_text

TEXTS = ["Facts: has 3.", "Plan: start 3.", "Work: 3 + 4 = 7.", "Final Answer: 7"]
GRAPHS = ["single", "rpsv", "refine", "consensus", "dylan", "debate", "logic", "handoff", "game24"]

anything = st.text(st.characters(codec=None, categories=None), max_size=40) | st.sampled_from(
    ["0>1: hello", "a\n1>2,3: b\n3", "\n2>4: x", "3", "\r\n0>1: y", "<|end|>", "\ud800", "", "  ", "1>2: \u2028 1>3: z"]
)


_BOUNDARY = re.compile(r"\n[0-9]+(?=>[0-9,]*: )")


def split_text(text: str) -> list[str]:
    """Return the parts of a text that `state_text` wrote."""
    start = text.find("\n") + 1
    cuts = [0, start, *(match.end() for match in _BOUNDARY.finditer(text, start - 1 if start else 0)), len(text)]
    return [text[a:b] for a, b in pairwise(cuts)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    pytest.importorskip("transformers")
    from benchmarks.tiny.tokenizer import build_tokenizer

    return build_tokenizer()


def test_full_view_has_the_documented_format() -> None:
    assert state_text(MODEL.mas, chain(TEXTS[:2])).splitlines() == [
        "Agents: 0 Reader, 1 Planner, 2 Solver, 3 Verifier, 4 sink",
        "How many coins?",
        "0>1: Facts: has 3.",
        "1>2: Plan: start 3.",
        "2",
    ]


def test_text_of_a_terminal_state_ends_with_the_sink() -> None:
    assert state_text(MODEL.mas, chain(TEXTS)).endswith("\n4")


def test_local_view_contains_the_messages_that_the_last_speaker_received() -> None:
    state = chain(TEXTS)
    heard = MODEL.local_view(state, state.speaker)
    shown = state_text(MODEL.mas, state, "local")
    for turn in state.turns:
        assert (turn.text in shown) == any(message.text == turn.text for message in heard.messages)
    assert state.question in shown
    assert len(shown) < len(state_text(MODEL.mas, state))


def test_local_view_names_only_the_receiving_agent() -> None:
    model = Dynamics(mas_gym.load_mas("dylan"))
    state = model.initial_state("q")
    while not model.is_terminal(state):
        state = model.transition(state, ("AGREE", model.mas.ALL))
        last, wide = state_parts(model.mas, state, "local"), state_parts(model.mas, state)
        assert last[-1] == wide[-1]
        for part in last[2:-1]:
            header = part.split(":")[0].lstrip(">")
            assert header == str(state.speaker) or part in wide


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("view", ["full", "local"])
def test_siblings_differ_only_in_the_last_part(name: str, view: Any) -> None:
    model = Dynamics(mas_gym.load_mas(name))
    state = model.initial_state("How many?")
    while not model.is_terminal(state):
        left, right = (model.transition(state, (text, model.mas.ALL)) for text in ("AGREE 1", "DISAGREE 2"))
        assert state_parts(model.mas, left, view)[:-1] == state_parts(model.mas, right, view)[:-1]
        assert state_parts(model.mas, left)[:-1] == state_parts(model.mas, state)
        state = left


@given(question=anything, texts=st.lists(anything, max_size=4))
def test_joined_parts_of_arbitrary_messages_are_split_unchanged(question: str, texts: list[str]) -> None:
    parts = state_parts(MODEL.mas, chain(texts, question))
    assert split_text("".join(parts)) == parts
    assert len(parts) == 2 + len(texts)


@given(texts=st.lists(anything, min_size=1, max_size=4, unique=True), other=anything)
def test_different_transcripts_have_different_texts(texts: list[str], other: str) -> None:
    longer = [*texts[:-1], texts[-1] + "\n" + other] if len(texts) < 4 else [*texts[:-1], texts[-1]]
    one, two = chain(texts), chain([*texts, other][:4])
    if one != two:
        assert state_text(MODEL.mas, one) != state_text(MODEL.mas, two)
    assert split_text(state_text(MODEL.mas, chain(longer))) == state_parts(MODEL.mas, chain(longer))


def test_token_ids_of_a_state_are_a_prefix_of_its_successors(tokenizer: Any) -> None:
    encoder = Encoder(tokenizer, 512)
    states = [chain(TEXTS[:n]) for n in range(5)]
    encoded = encoder.encode([(MODEL.mas, state) for state in states])
    for shorter, longer in pairwise(encoded):
        assert longer[: len(shorter)] == shorter


def test_tokens_of_the_parts_equal_those_of_the_whole_text(tokenizer: Any) -> None:
    text = state_text(MODEL.mas, chain(TEXTS))
    joined = [
        i for part in Encoder(tokenizer, 512).encode_parts([state_parts(MODEL.mas, chain(TEXTS))])[0] for i in part
    ]
    assert joined == tokenizer(text, add_special_tokens=False)["input_ids"]


def _ids(tokenizer: Any, state: MASState, limit: int) -> list[int]:
    [encoded] = Encoder(tokenizer, limit).encode([(MODEL.mas, state)])
    return [i for part in encoded for i in part]


def test_truncation_removes_the_oldest_messages(tokenizer: Any) -> None:
    state = chain([f"Facts: {'has 3, ' * n}." for n in (30, 20, 10)])
    whole = _ids(tokenizer, state, 512)
    cut = _ids(tokenizer, state, len(whole) - 1)
    text = tokenizer.decode(cut)
    newest = state_parts(MODEL.mas, state)[-1]
    assert len(cut) < len(whole) - 80 and CUT in text and text.endswith(newest)
    assert "How many coins?" in text and "1>" in text and "0>" not in text


def test_truncation_removes_the_start_of_the_question_if_needed(tokenizer: Any) -> None:
    state = chain(["Facts: has 3."], "Maya has 3 coins. " * 60 + "How many now?")
    cut = _ids(tokenizer, state, 90)
    text = tokenizer.decode(cut)
    assert len(cut) == 90
    assert CUT in text and "How many now?" in text and text.endswith(state_parts(MODEL.mas, state)[-1])


def test_newest_message_longer_than_the_limit_keeps_its_end(tokenizer: Any) -> None:
    state = chain(["Facts: has 3.", "Plan: " + "start 3, " * 60 + "minus 7."])
    encoder = Encoder(tokenizer, 128)
    [encoded] = encoder.encode([(MODEL.mas, state)])
    text = tokenizer.decode([i for part in encoded for i in part])
    assert sum(map(len, encoded)) == 128 and encoder.shortened == 1
    assert CUT in text and text.endswith(f"minus 7.{state_parts(MODEL.mas, state)[-1].rpartition('minus 7.')[2]}")
    with pytest.raises(CriticError, match="larger max_length"):
        _ids(tokenizer, state, 16)


@pytest.mark.parametrize("limit", range(84, 164, 8))
def test_truncated_input_is_within_the_limit(tokenizer: Any, limit: int) -> None:
    state = chain(["Facts: " + "has 3, " * 20, "Plan: " + "start 3, " * 10, "Work: 3 + 4 = 7."])
    cut = _ids(tokenizer, state, limit)
    whole = _ids(tokenizer, state, 512)
    assert len(cut) <= limit < len(whole) + (cut == whole)
    assert cut[-8:] == whole[-8:]


def test_truncation_keeps_the_format() -> None:
    parts = state_parts(MODEL.mas, chain(TEXTS))
    shorter = drop_oldest(parts, 2)
    assert shorter[2:] == parts[4:] and shorter[0] == parts[0]
    assert shorter[1] == f"How many coins?\n{CUT}\n2"
    assert split_text("".join(shorter)) == shorter


def test_tokenizer_with_a_start_token_adds_it_once() -> None:
    pytest.importorskip("transformers")
    from tokenizers.processors import TemplateProcessing

    from benchmarks.tiny.tokenizer import build_tokenizer

    tokenizer = build_tokenizer()
    opening = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", opening)]
    )
    [encoded] = Encoder(tokenizer, 512).encode([(MODEL.mas, chain(TEXTS))])
    ids = [i for part in encoded for i in part]
    assert ids[0] == opening and ids.count(opening) == 1
