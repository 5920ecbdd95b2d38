"""The transition model: properties over random graphs, the paper's systems turn by turn, and very long chains."""

import copy
import json
import pickle
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mas_gym.errors import DataError, EpisodeOverError, IllegalActionError, UnknownNameError
from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.graph import MAS, Q
from mas_gym.systems.loading import load_mas, mas_names
from mas_gym.systems.prompts import agent_inputs, chat_messages
from mas_gym.systems.state import Action, LocalView, MASState, Message

ODD = ["", " \n", "x", "a", "ab", "xb", "Final Answer: 18", "\ud800"]
ODD += ["نص من اليمين", "\u202eover", "漢字🙂", "\x00\x1b[31m"]
TEXTS = st.sampled_from(ODD) | st.text(max_size=8)
CONDITIONS = ["contains:x", "not_contains:x", "regex:^a", "not_regex:b$"]


@st.composite
def systems(draw, conditional: bool | None = None) -> MAS:
    """Draw a valid MAS of one to seven agents."""
    count = draw(st.integers(1, 7))
    dynamic = draw(st.booleans()) if conditional is None else conditional
    edges = {}
    for target in range(count):
        for source in range(Q, target):
            if draw(st.booleans()):
                guarded = dynamic and source != Q and draw(st.booleans())
                edges[source, target] = draw(st.sampled_from(CONDITIONS)) if guarded else None
        if not any(edge[1] == target for edge in edges):
            edges[Q, target] = None
    for source in range(count - 1):
        if not any(edge[0] == source for edge in edges):
            edges[source, source + 1] = None
        if dynamic and draw(st.integers(0, 5)) == 0:
            edges[source, "sink"] = draw(st.sampled_from(CONDITIONS))
    listed = draw(st.permutations([[u, v] if c is None else [u, v, c] for (u, v), c in edges.items()]))
    agents = [{"name": f"A{i}", "system_prompt": f"Be A{i}.", "max_new_tokens": 8} for i in range(count)]
    return load_mas({"agents": agents, "edges": listed})


@st.composite
def walks(draw, conditional: bool | None = None) -> tuple[Dynamics, list[MASState]]:
    """Draw a system and an episode in it, some of whose messages name one recipient."""
    model = Dynamics(draw(systems(conditional)))
    states = [model.initial_state(draw(TEXTS))]
    while not model.is_terminal(states[-1]):
        text = draw(TEXTS)
        recipient = draw(st.sampled_from(model.legal_recipients(states[-1])))
        try:
            states.append(model.transition(states[-1], (text, recipient)))
        except IllegalActionError:
            assert model.mas.dynamic
            assert recipient != model.mas.ALL
            states.append(model.transition(states[-1], Action(text, model.mas.ALL)))
    return model, states


def condition_of(mas: MAS, source: int, target: int):
    """Return the edge's condition, None for an unconditional edge, False for no edge."""
    return next((edge.condition for edge in mas.edges if (edge.source, edge.target) == (source, target)), False)


def next_by_hand(mas: MAS, transcript: tuple[Message, ...], speaker: int) -> int:
    """Return the agent that acts next in a dynamic graph, by the definition; ``sink`` if no agent can act."""
    delivered = {(m.speaker, m.recipient) for m in transcript}
    for agent in range(speaker + 1, len(mas.agents)):
        sources = {e.source for e in mas.edges if e.target == agent and e.source != Q}
        if all((source, agent) in delivered for source in sources):
            return agent
    return mas.sink


def can_act_by_hand(mas: MAS, state: MASState, recipient: int) -> bool:
    """Return whether the recipient acts if only it gets this message and later agents send along every edge."""
    if recipient >= mas.sink or not mas.dynamic:
        return True
    delivered = {(m.speaker, m.recipient) for m in state.transcript} | {(state.acting, recipient)}
    acts = set()
    for agent in range(state.acting + 1, recipient + 1):
        if all((edge.source, agent) in delivered for edge in mas.edges if edge.target == agent and edge.source != Q):
            acts.add(agent)
            delivered |= {(agent, edge.target) for edge in mas.edges if edge.source == agent}
    return recipient in acts


@settings(max_examples=150, deadline=None)
@given(walks())
def test_episodes_are_legal_and_bounded(walk) -> None:
    model, states = walk
    mas = model.mas
    assert len(states) - 1 <= model.max_depth == len(mas.agents)
    acted = [turn.speaker for turn in states[-1].turns]
    assert acted == sorted(set(acted))
    for before, after in pairwise(states):
        assert after.parent is before
        assert after.depth == before.depth + 1
        assert after.speaker == before.acting
        assert list(after.recipients) == sorted(set(after.recipients))
        assert (mas.sink in after.recipients) == model.is_terminal(after)
        for recipient in after.recipients:
            condition = condition_of(mas, after.speaker, recipient)
            if recipient == mas.sink and (
                not mas.dynamic or next_by_hand(mas, after.transcript, after.speaker) == mas.sink
            ):
                # Implicit: the last scheduled agent, or no other agent can act.
                continue
            assert condition is None or (condition is not False and condition.holds(after.text))
        if not model.is_terminal(after) and not mas.dynamic:
            assert after.acting == before.acting + 1


@settings(max_examples=200, deadline=None)
@given(walks(conditional=True))
def test_dynamic_schedule_follows_its_definition(walk) -> None:
    model, states = walk
    mas = model.mas
    if not mas.dynamic:
        return
    for before, after in pairwise(states):
        expected = next_by_hand(mas, after.transcript, after.speaker)
        if after.acting != mas.sink:
            assert after.acting == expected
        elif condition_of(mas, after.speaker, mas.sink) is False:
            # No edge to sink: the model added it, because no other agent could act.
            assert expected == mas.sink
        enabled = [
            e.target
            for e in mas.edges
            if e.source == before.acting and (e.condition is None or e.condition.holds(after.text))
        ]
        full = model.transition(before, (after.text, mas.ALL))
        assert set(enabled) == set(full.recipients) - ({mas.sink} - set(enabled))


@settings(max_examples=150, deadline=None)
@given(walks(), TEXTS)
def test_masks_equal_the_legal_recipients(walk, text: str) -> None:
    model, states = walk
    for state in states:
        legal = model.legal_recipients(state)
        if model.is_terminal(state):
            assert legal == ()
            with pytest.raises(EpisodeOverError):
                model.route(state, (text, model.mas.ALL))
            continue
        assert list(legal) == sorted(set(legal))
        assert legal[-1] == model.mas.ALL
        for recipient in range(-3, model.mas.ALL + 3):
            try:
                routed = model.route(state, (text, recipient))
            except IllegalActionError as error:
                assert recipient != model.mas.ALL
                assert model.mas.dynamic or recipient not in legal
                assert str(recipient) in str(error)
            else:
                assert recipient == model.mas.ALL or recipient in routed
                assert (recipient in legal) == can_act_by_hand(model.mas, state, recipient)


@settings(max_examples=150, deadline=None)
@given(walks())
def test_local_views_contain_exactly_the_messages_sent_and_received(walk) -> None:
    model, states = walk
    for state in states:
        assert len(state.turns) == state.depth
        assert state.transcript == tuple(Message(t.speaker, t.text, r) for t in state.turns for r in t.recipients)
        for agent in range(len(model.mas.agents)):
            seen = tuple(m for m in state.transcript if agent in (m.speaker, m.recipient))
            sees = condition_of(model.mas, Q, agent) is not False
            assert model.local_view(state, agent) == LocalView(state.question if sees else None, seen)
        to_sink = tuple(m for m in state.transcript if m.recipient == model.mas.sink)
        assert model.local_view(state, model.mas.sink) == LocalView(None, to_sink)
    for nobody in (-1, model.mas.ALL):
        with pytest.raises(UnknownNameError):
            model.local_view(states[0], nobody)


@settings(max_examples=150, deadline=None)
@given(walks())
def test_prompts_contain_exactly_the_local_view(walk) -> None:
    model, states = walk
    for state in states[:-1]:
        view = model.local_view(state, state.acting)
        heard = sorted((m.speaker, m.text.strip()) for m in view.messages if m.recipient == state.acting)
        question = [] if view.question is None else [view.question.strip()]
        assert agent_inputs(model.mas, state) == question + [text for _, text in heard]
        system, user = chat_messages(model.mas, state)
        assert (system.role, user.role) == ("system", "user")
        assert system.content == model.mas.agents[state.acting].system_prompt
    assert chat_messages(model.mas, states[-1]) == ()


@settings(max_examples=150, deadline=None)
@given(walks())
def test_replayed_transitions_give_equal_states_and_digests(walk) -> None:
    model, states = walk
    frozen = [pickle.dumps(state) for state in states]
    again = [model.initial_state(states[0].question)]
    for state in states[1:]:
        choice = next(
            c
            for c in (model.mas.ALL, *state.recipients)
            if model.transition(again[-1], (state.text, c)).recipients == state.recipients
        )
        again.append(model.transition(again[-1], (state.text, choice)))
    assert again == states
    assert [hash(s) for s in again] == [hash(s) for s in states]
    assert [s.digest for s in again] == [s.digest for s in states]
    assert len({s.digest for s in states}) == len(states)
    assert [pickle.dumps(state) for state in states] == frozen


@settings(max_examples=150, deadline=None)
@given(walks())
def test_states_survive_serialization(walk) -> None:
    model, states = walk
    twin = pickle.loads(pickle.dumps(model))
    for state in states:
        assert copy.copy(state) is state
        assert copy.deepcopy([state])[0] is state
        thawed = pickle.loads(pickle.dumps(state))
        assert thawed == state
        assert thawed.turns == state.turns
        assert thawed.path()[0] == states[0]
        assert twin.legal_recipients(thawed) == model.legal_recipients(state)
        read = model.state_from_dict(state.to_dict())
        assert read == state
        if not model.is_terminal(state):
            after = model.transition(thawed, ("x", model.mas.ALL))
            assert after == model.transition(state, ("x", model.mas.ALL))
            assert after.acting == model.transition(read, ("x", model.mas.ALL)).acting


@example("\ud800")
@given(st.text(max_size=20))
def test_json_preserves_every_text(text: str) -> None:
    model = Dynamics(load_mas("single"))
    state = model.transition(model.initial_state(text), (text, 1))
    assert model.state_from_dict(json.loads(json.dumps(state.to_dict()))) == state


def test_states_are_immutable() -> None:
    model = Dynamics(load_mas("rpsv"))
    state = model.initial_state("x")
    before = state.digest
    for name in ("question", "acting", "text", "recipients", "parent", "depth", "delivered", "_digest", "new"):
        with pytest.raises(AttributeError, match="immutable"):
            setattr(state, name, 1)
        with pytest.raises(AttributeError, match="immutable"):
            delattr(state, name)
    assert state.digest == before
    assert repr(state) == "MASState('x', depth=0, acting=0)"
    assert type(MASState("x", 0)) is MASState
    assert MASState("x", 0) == state
    assert state != "x"


def test_digests_do_not_depend_on_the_process() -> None:
    model = Dynamics(load_mas("rpsv"))
    state = model.transition(model.initial_state("x"), ("facts", 1))
    assert model.initial_state("x").digest.hex() == "e2994472b59172238b00664fd61ce44d"
    assert state.digest.hex() == "45aacd6eb0e5961cfb823b0b808f21c8"


def test_crafted_question_does_not_have_the_digest_of_a_turn() -> None:
    model = Dynamics(load_mas("rpsv"))
    first = model.initial_state("x")
    second = model.transition(first, ("facts", 1))
    forged = (b"t" + first.digest + b"0>1|facts").decode("utf-8", "surrogateescape")
    assert model.initial_state(forged).digest != second.digest


def test_rpsv_prompts_and_legal_recipients_are_correct_at_each_turn() -> None:
    mas = load_mas("rpsv")
    model = Dynamics(mas)
    state = model.initial_state("  How many?\n")
    assert model.legal_recipients(state) == (1, mas.ALL)
    assert chat_messages(mas, state)[1].content == "How many?"
    state = model.transition(state, ("facts ", 1))
    assert chat_messages(mas, state)[1].content == "How many?\n\nfacts"
    state = model.transition(state, ("plan", mas.ALL))
    assert chat_messages(mas, state)[1].content == "plan"
    state = model.transition(state, ("work", 3))
    assert chat_messages(mas, state)[1].content == "How many?\n\nwork"
    assert model.legal_recipients(state) == (mas.sink, mas.ALL)
    for recipient in (0, 1, 2, 3, -1, 6):
        with pytest.raises(
            IllegalActionError, match=r"Verifier cannot route to .*expected one of 4 \(sink\), 5 \(ALL\)"
        ):
            model.transition(state, ("Final Answer: 3", recipient))
    done = model.transition(state, ("Final Answer: 3", mas.ALL))
    assert model.is_terminal(done)
    assert done == model.transition(state, ("Final Answer: 3", mas.sink))
    assert done.acting == mas.sink
    with pytest.raises(EpisodeOverError):
        model.transition(done, ("more", mas.ALL))


def test_consensus_message_reaches_every_listener() -> None:
    mas = load_mas("consensus")
    model = Dynamics(mas)
    state = model.transition(model.initial_state("q"), ("summary", mas.ALL))
    assert state.recipients == (1, 2, 3)
    state = model.transition(state, ("A: 1", mas.ALL))
    state = model.transition(state, ("B: 2", mas.ALL))
    assert agent_inputs(mas, state) == ["q", "summary", "A: 1", "B: 2"]
    alone = model.transition(model.initial_state("q"), ("summary", 3))
    assert agent_inputs(mas, alone) == ["q"]


@pytest.mark.parametrize(
    ("verdict", "speakers"),
    [
        ("VERDICT: AGREE\nFinal Answer: 4", [0, 1, 2, 3]),
        ("VERDICT: DISAGREE\nwrong sum", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("verdict:\n disagree", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("", [0, 1, 2, 3]),
    ],
)
def test_dylan_schedule_is_as_published(verdict: str, speakers: list[int]) -> None:
    mas = load_mas("dylan")
    model = Dynamics(mas)
    state = model.initial_state("q")
    while not model.is_terminal(state):
        state = model.transition(state, (verdict if state.acting == 3 else f"by {state.acting}", mas.ALL))
    assert [turn.speaker for turn in state.turns] == speakers
    assert state.recipients == (mas.sink,)
    if len(speakers) == 8:
        refiner = state.path()[4]
        assert agent_inputs(mas, refiner) == ["q", "by 0", verdict.strip()]


def test_dylan_with_one_refiner_ends_the_episode() -> None:
    mas = load_mas("dylan")
    model = Dynamics(mas)
    state = model.initial_state("q")
    for _ in range(3):
        state = model.transition(state, ("4", mas.ALL))
    assert mas.sink in model.legal_recipients(state)
    # Rejected recipients are not offered: only sink and ALL are left for this text.
    with pytest.raises(IllegalActionError, match=r"condition does not hold .*; expected one of 8 \(sink\), 9 \(ALL\)$"):
        model.transition(state, ("VERDICT: AGREE", 4))
    with pytest.raises(IllegalActionError, match="no edge"):
        model.transition(state, ("VERDICT: DISAGREE", 7))
    # RefinerA alone cannot bring FinalJudge to act, so its message ends the episode.
    state = model.transition(state, ("VERDICT: DISAGREE", 4))
    assert state.acting == 4
    state = model.transition(state, ("fixed", mas.ALL))
    assert state.recipients == (7, mas.sink)
    assert model.state_from_dict(state.to_dict()) == state


def test_mask_omits_agents_that_will_not_act() -> None:
    model = Dynamics(load_mas("dylan"))
    state = model.initial_state("q")
    for text, recipient in [("4", model.mas.ALL)] * 3 + [("VERDICT: DISAGREE", 4)]:
        state = model.transition(state, (text, recipient))
    # FinalJudge waits for three refiners, of which only RefinerA acts.
    assert model.legal_recipients(state) == (model.mas.sink, model.mas.ALL)
    two = {
        "agents": [{"name": n, "system_prompt": n} for n in "AB"],
        "edges": [[-1, 0], [0, 1], [1, 0]],
        "max_turns": 2,
    }
    loop = Dynamics(load_mas(two))
    last = loop.transition(loop.initial_state("q"), ("a", loop.mas.ALL))
    assert loop.legal_recipients(loop.initial_state("q"))[0] == 1 and 0 not in loop.legal_recipients(last)


def test_message_may_reach_no_agent() -> None:
    mas = load_mas(
        {
            "agents": [{"name": n, "system_prompt": n} for n in "ABC"],
            "edges": [[-1, 0], [-1, 1], [0, 2, "contains:x"], [1, 2]],
        }
    )
    model = Dynamics(mas)
    state = model.transition(model.initial_state("q"), ("quiet", mas.ALL))
    assert (state.recipients, state.acting, state.transcript) == ((), 1, ())
    assert state.turns[0].text == "quiet"
    state = model.transition(state, ("b", mas.ALL))
    assert state.recipients == (2, mas.sink)
    assert model.state_from_dict(state.to_dict()) == state
    assert pickle.loads(pickle.dumps(state)) == state


def test_sink_is_legal_only_if_a_text_can_reach_it() -> None:
    mas = load_mas(
        {
            "agents": [{"name": n, "system_prompt": n} for n in "ABC"],
            "edges": [[-1, 0], [0, 1], [1, 2, "contains:x"]],
        }
    )
    model = Dynamics(mas)
    state = model.initial_state("q")
    assert model.legal_recipients(state) == (1, mas.ALL)
    state = model.transition(state, ("a", mas.ALL))
    assert model.legal_recipients(state) == (2, mas.sink, mas.ALL)
    assert model.transition(state, ("no", mas.sink)).recipients == (mas.sink,)
    with pytest.raises(IllegalActionError):
        model.transition(state, ("x", mas.sink))


def test_edge_to_sink_ends_the_episode_early() -> None:
    mas = load_mas({"agents": [{"name": n, "system_prompt": n} for n in "AB"], "edges": [[-1, 0], [0, 1], [0, "sink"]]})
    model = Dynamics(mas)
    start = model.initial_state("q")
    assert model.legal_recipients(start) == (1, 2, mas.ALL)
    assert model.is_terminal(model.transition(start, ("18", mas.sink)))
    assert model.transition(start, ("go on", 1)).acting == 1
    assert model.transition(start, ("both", mas.ALL)).recipients == (1, 2)


@pytest.mark.parametrize("action", [(None, 1), (b"bytes", 1), (3, 1), (["x"], 1)])
def test_message_text_must_be_str(action) -> None:
    model = Dynamics(load_mas("rpsv"))
    with pytest.raises(IllegalActionError, match="str as text"):
        model.transition(model.initial_state("q"), action)
    with pytest.raises(DataError, match="question as a str"):
        model.initial_state(action[0])


def test_numpy_recipients_are_stored_as_integers() -> None:
    np = pytest.importorskip("numpy")
    for name in mas_names():
        mas = load_mas(name)
        model = Dynamics(mas)
        state = model.initial_state("q")
        while not model.is_terminal(state):
            state = model.transition(state, ("t", np.int64(mas.ALL)))
            assert all(type(r) is int for r in state.recipients)
        json.dumps(state.to_dict())


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(schema=2),
        lambda d: d.pop("schema"),
        lambda d: d.pop("question"),
        lambda d: d.update(question=None),
        lambda d: d.pop("acting"),
        lambda d: d.update(acting=0),
        lambda d: d.update(turns=None),
        lambda d: d.update(turns=[[0, "a"]]),
        lambda d: d["turns"][0].__setitem__(0, 1),
        lambda d: d["turns"][0].__setitem__(0, "0"),
        lambda d: d["turns"][0].__setitem__(1, None),
        lambda d: d["turns"][0].__setitem__(2, [2]),
        lambda d: d["turns"][0].__setitem__(2, [1, 2]),
        lambda d: d["turns"][0].__setitem__(2, ["1"]),
        lambda d: d["turns"][0].__setitem__(2, []),
        lambda d: d["turns"].extend([[2, "w", [3]], [3, "f", [4]], [4, "g", [5]]]),
    ],
)
def test_damaged_states_are_rejected(change) -> None:
    model = Dynamics(load_mas("rpsv"))
    state = model.transition(model.transition(model.initial_state("q"), ("facts", 1)), ("plan", 2))
    data = state.to_dict()
    assert model.state_from_dict(data) == state
    change(data)
    with pytest.raises(DataError):
        model.state_from_dict(data)
    with pytest.raises(DataError):
        model.state_from_dict([data])


@pytest.mark.parametrize("condition", [None, "not_contains:stop"])
def test_chain_of_ten_thousand_agents_runs(condition) -> None:
    count = 10_000
    agents = [{"name": f"A{i}", "system_prompt": "Go on.", "max_new_tokens": 1} for i in range(count)]
    links = [[i, i + 1] if condition is None else [i, i + 1, condition] for i in range(count - 1)]
    model = Dynamics(load_mas({"agents": agents, "edges": [[-1, 0], *links]}))
    state = model.initial_state("q")
    while not model.is_terminal(state):
        assert model.legal_recipients(state)[-1] == model.mas.ALL
        state = model.transition(state, (str(state.acting), model.mas.ALL))
    assert state.depth == count
    # A state keeps few delivered edges, however long the chain.
    assert max(len(s.delivered) for s in state.path()) <= 1
    thawed = pickle.loads(pickle.dumps(state))
    assert thawed == state
    assert hash(thawed) == hash(state)
    assert copy.deepcopy(state) is state
    assert model.state_from_dict(json.loads(json.dumps(state.to_dict()))) == state
    assert model.local_view(state, count - 1).messages[0].text == str(count - 2)
    assert len(state.transcript) == count
    assert pickle.loads(pickle.dumps(model)).mas == model.mas
    if condition:
        early = model.transition(model.initial_state("q"), ("stop", model.mas.ALL))
        assert early.recipients == (model.mas.sink,)


def test_message_in_a_wide_graph_reaches_all_agents_and_errors_are_short() -> None:
    count = 2_000
    agents = [{"name": f"A{i}", "system_prompt": "Go on."} for i in range(count)]
    edges = [[-1, 0], *([0, i] for i in range(1, count)), *([i, count - 1] for i in range(1, count - 1))]
    model = Dynamics(load_mas({"agents": agents, "edges": edges}))
    state = model.transition(model.initial_state("q"), ("hello", model.mas.ALL))
    assert len(state.recipients) == count - 1
    with pytest.raises(IllegalActionError, match=r"A0 cannot route to 0: .*\.\.\., 2001 \(ALL\)"):
        model.transition(model.initial_state("q"), ("hello", 0))
