"""Systems with loops: `max_turns`, `min_turns` and private histories; and the paper's graphs, which have none."""

import json
import pickle
from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import search
from mas_gym import Dynamics, chat_messages, load_mas, mas_names
from mas_gym.envs.env import MASEnv
from mas_gym.errors import ConfigError, IllegalActionError
from mas_gym.policies import ScriptedPolicy
from mas_gym.policies.base import derive_seed
from mas_gym.tasks import Problem, ProblemTask
from mas_gym.testing import check_mas
from search.pages.graph_drawing import graph_svg

TASK = ProblemTask.of([Problem("one", "6 + 12?", "18"), Problem("two", "1 + 1?", "2")])
REVIEW = {
    "name": "review",
    "agents": [{"name": name, "system_prompt": f"You are the {name}."} for name in ("Writer", "Critic")],
    "edges": [
        ["q", "Writer"],
        ["q", "Critic"],
        ["Writer", "Critic"],
        ["Critic", "Writer", "contains:REVISE"],
        ["Critic", "sink", "not_contains:REVISE"],
    ],
    "max_turns": 6,
}
# Fingerprint of the system, and a digest over the states, seeds, masks and dicts of two fixed episodes.
SHIPPED = {
    "consensus": ("a50e672f01b27f1039f68e14335129cf", "527b36426bbecb25"),
    "cot": ("720c211b6bd2afcc03af9bc8f10f715f", "00b9bec064d3752d"),
    "debate": ("f0811ba17a9668733c0e91efc01a81aa", "f43d0aabf1c1538d"),
    "dylan": ("8829b6181e237d856d4f513873efcd52", "849bfc6ae8c2442d"),
    "game24": ("20c461f0294a33771da93519ff6d560c", "4c513d8d120e4488"),
    "logic": ("044963b1e209bf74f6da45787dc099f2", "8d083c0a6eaf33f9"),
    "refine": ("959a49c2589db0061f9ada5baae1e6aa", "b306d74a3dbc32f1"),
    "rpsv": ("8204fc82bb6c12bf5fb3e81afd70e8af", "a1dcd052e8ccf36f"),
    "single": ("fdba89e50002f5ff92cbeda0dfb1f975", "00b9bec064d3752d"),
}


def play(mas, texts):
    """Return the states of an episode in which the agents send these texts to ALL."""
    model = Dynamics(mas)
    states = [model.initial_state("6 + 12?")]
    for text in texts:
        states.append(model.transition(states[-1], (text, mas.ALL)))
    return model, states


def test_every_shipped_graph_without_loops_has_pinned_results() -> None:
    assert sorted(SHIPPED) == [name for name in mas_names() if load_mas(name).max_turns is None]


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_digests_states_and_seeds_of_shipped_graphs_are_unchanged(name: str) -> None:
    mas = load_mas(name)
    model, total = Dynamics(mas), blake2b(digest_size=8)
    for verdict in ("VERDICT: AGREE", "VERDICT: DISAGREE"):
        state = model.initial_state("How many?")
        while not model.is_terminal(state):
            seed, legal = derive_seed(1, "p", state.digest, 0), model.legal_recipients(state)
            total.update(state.digest + str(seed).encode() + str(legal).encode())
            state = model.transition(state, (f"{verdict} {state.acting}", mas.ALL))
        total.update(state.digest + repr(state.to_dict()).encode())
    assert (mas.fingerprint, total.hexdigest()) == SHIPPED[name]


def test_loop_repeats_until_the_critic_agent_approves() -> None:
    mas = load_mas(REVIEW)
    model, states = play(mas, ["17", "REVISE: recount", "18", "Final Answer: 18"])
    assert [s.acting for s in states] == [0, 1, 0, 1, mas.sink]
    assert states[-1].recipients == (mas.sink,)
    assert [m.text for m in model.local_view(states[-1], 0).messages] == ["17", "REVISE: recount", "18"]
    assert chat_messages(mas, states[3])[1].content == "6 + 12?\n\n17\n\n18"


def test_last_turn_ends_the_episode() -> None:
    mas = load_mas(REVIEW)
    model, states = play(mas, ["17", "REVISE"] * 3)
    assert model.max_depth == 6
    assert model.is_terminal(states[-1])
    assert states[-1].recipients == (0, mas.sink)
    assert states[-1].text == "REVISE"


def test_episode_does_not_end_before_min_turns() -> None:
    mas = load_mas(
        {**REVIEW, "edges": [*REVIEW["edges"][:3], ["Critic", "Writer"], ["Critic", "sink"]], "min_turns": 4}
    )
    model, states = play(mas, ["17", "fine", "18"])
    assert model.legal_recipients(states[1]) == (0, mas.ALL)
    with pytest.raises(IllegalActionError, match=r"cannot end before turn 4; expected one of 0 \(Writer\), 3 \(ALL\)"):
        model.transition(states[1], ("done", mas.sink))
    assert model.legal_recipients(states[3]) == (0, mas.sink, mas.ALL)
    assert model.is_terminal(model.transition(states[3], ("Final Answer: 18", mas.sink)))


def test_agents_act_in_order_of_message_arrival() -> None:
    names = "ABCD"
    agents = [{"name": name, "system_prompt": "Speak."} for name in names]
    edges = [["q", "A"], ["A", "B"], ["A", "D"], ["B", "C"], ["B", "A"], ["C", "A"], ["D", "B"]]
    mas = load_mas({"agents": agents, "edges": edges, "max_turns": 8})
    _, states = play(mas, [str(i) for i in range(8)])
    # A reaches B and D; B reaches A and C; D reaches B; A reaches B, which waits already, and D.
    assert [names[s.speaker] for s in states[1:]] == ["A", "B", "D", "A", "C", "B", "D", "A"]


def test_private_history_contains_all_sent_and_received_messages() -> None:
    mas = load_mas({**REVIEW, "history": "private"})
    _, states = play(mas, ["17", "REVISE: recount", "18"])
    assert chat_messages(mas, states[2])[1].content == "6 + 12?\n\nWriter: 17\n\nCritic: REVISE: recount"
    expected = "6 + 12?\n\nWriter: 17\n\nCritic: REVISE: recount\n\nWriter: 18"
    assert chat_messages(mas, states[3])[1].content == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"max_turns": None}, "max_turns: expected an integer from 1 to 10000, got None"),
        ({"max_turns": 0}, "max_turns: expected an integer from 1 to 10000, got 0"),
        ({"max_turns": True}, "max_turns: expected an integer from 1 to 10000, got True"),
        ({"max_turns": 10**6}, "max_turns: expected an integer from 1 to 10000, got 1000000"),
        ({"min_turns": 7}, "min_turns: expected an integer from 1 to max_turns, got 7"),
        ({"history": "none"}, "history: expected inputs or private, got 'none'"),
        ({"edges": [["q", "Writer"]]}, "agents[1]: no path leads from q to Critic"),
        ({"max_turn": 3}, "max_turn: unknown key 'max_turn'"),
    ],
)
def test_invalid_loops_are_rejected(change, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_mas({**REVIEW, **change})
    assert any(fault.startswith(expected) for fault in caught.value.faults), caught.value.faults


def test_cycle_without_max_turns_is_rejected_with_a_suggested_fix() -> None:
    config = {key: value for key, value in REVIEW.items() if key != "max_turns"}
    with pytest.raises(ConfigError, match=r"Critic -> Writer goes against the order .* set max_turns"):
        load_mas(config)
    with pytest.raises(ConfigError, match=r"min_turns: .* add max_turns"):
        load_mas({**config, "min_turns": 2})


def test_loop_config_survives_serialization() -> None:
    mas = load_mas({**REVIEW, "min_turns": 2, "history": "private"})
    assert load_mas(json.loads(json.dumps(mas.to_dict()))) == mas
    assert len({mas.fingerprint, load_mas(REVIEW).fingerprint, load_mas({**REVIEW, "max_turns": 5}).fingerprint}) == 3


@st.composite
def systems(draw) -> dict:
    count = draw(st.integers(1, 4))
    nodes = st.integers(0, count - 1)
    pairs = draw(st.lists(st.tuples(nodes, nodes | st.just("sink")), unique=True, max_size=8))
    conditions = st.sampled_from([[], ["contains:x"], ["not_contains:x"]])
    edges = [*([-1, i] for i in range(count)), *([*pair, *draw(conditions)] for pair in pairs)]
    most = draw(st.integers(1, 7))
    extras = {"max_turns": most, "min_turns": draw(st.integers(1, most))}
    extras["history"] = draw(st.sampled_from(["inputs", "private"]))
    agents = [{"name": f"A{i}", "system_prompt": "Speak."} for i in range(count)]
    return {"agents": agents, "edges": edges, **extras}


@settings(max_examples=150, deadline=None)
@given(systems(), st.data())
def test_arbitrary_systems_with_loops_follow_the_rules(config: dict, data) -> None:
    mas = load_mas(config)
    model, env = Dynamics(mas), MASEnv(TASK, mas, max_bytes=64)
    env.reset(options={"problem_id": "one"})
    state = model.initial_state("6 + 12?")
    while not model.is_terminal(state):
        legal = model.legal_recipients(state)
        assert legal[-1] == mas.ALL
        text = data.draw(st.sampled_from(["x", "y"]))
        recipient = data.draw(st.sampled_from(legal))
        try:
            following = model.transition(state, (text, recipient))
        except IllegalActionError as error:
            # Only a condition may reject an action that the mask allows.
            assert "condition does not hold" in str(error) or recipient == mas.sink
            recipient = mas.ALL
            following = model.transition(state, (text, recipient))
        assert following.recipients or not model.is_terminal(following)
        ended = model.is_terminal(following)
        assert not ended or following.depth >= mas.min_turns or not following.delivered
        observation, _, terminated, _, _ = env.step((text, recipient))
        assert env.observation_space.contains(observation)
        assert terminated == ended
        assert env.state == following
        state = following
    assert state.depth <= mas.max_turns
    assert model.state_from_dict(json.loads(json.dumps(state.to_dict()))) == state
    assert pickle.loads(pickle.dumps(state)) == state
    for agent in range(len(mas.agents)):
        own = tuple(m for m in state.transcript if agent in (m.speaker, m.recipient))
        assert tuple(dict.fromkeys(model.local_view(state, agent).messages)) == tuple(dict.fromkeys(own))


def test_system_with_loops_passes_the_check_and_is_drawn() -> None:
    check_mas(REVIEW, texts=["REVISE: no", "Final Answer: 18"])
    env = MASEnv(TASK, REVIEW, render_mode="rgb_array")
    env.reset(seed=0)
    empty = env.render()
    for text in ("17", "REVISE", "18"):
        env.step((text, env.ALL))
    assert (env.render() != empty).any()
    svg = graph_svg(env.mas, env.state)
    assert svg.count("edge last") == 1
    assert svg.index('class="edge"') < svg.index('class="edge used') < svg.index('class="edge last')
    loop = {**REVIEW, "edges": [*REVIEW["edges"], ["Writer", "Writer", "contains:again"]]}
    assert MASEnv(TASK, loop, render_mode="rgb_array").reset(seed=0)


def say(request, seed: int) -> str:
    if request.agent == "Writer":
        return "18" if seed % 3 == 0 else "17"
    return "Final Answer: 18" if request.messages[-1].content.endswith("18") else "REVISE: recount"


@pytest.mark.parametrize("spec", ["single", "sc:5", "sbs:4,2", "mcts:8,3"])
def test_planners_can_search_systems_with_loops(spec: str) -> None:
    critic = search.PolicyLikelihood() if spec.startswith(("sbs", "mcts")) else None
    plans = list(search.run(spec, TASK[:1], mas=REVIEW, policy=ScriptedPolicy(say), critic=critic, seed=1))
    again = list(search.run(spec, TASK[:1], mas=REVIEW, policy=ScriptedPolicy(say), critic=critic, seed=1))
    assert [p.error for p in plans] == [None]
    assert [p.answer for p in plans] == [p.answer for p in again]
    assert all(candidate.state.depth <= 6 for plan in plans for candidate in plan.candidates)
