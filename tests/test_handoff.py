"""Recipients named in messages: the contract, illegal ones, the shipped handoff system, and search over recipients."""

import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mas_gym import Dynamics, chat_messages, load_mas
from mas_gym.env import MASEnv
from mas_gym.errors import ConfigError, IllegalActionError
from mas_gym.routing import current_answer, nameable, named_recipient
from mas_gym.tasks import Problem, ProblemTask
from mas_gym.testing import check_mas

QUESTION = "6 + 12?"
TASK = ProblemTask.of([Problem("one", QUESTION, "18")])
NAMES = ("Planner", "Solver", "Number Theorist")
TEAM = {
    "name": "team",
    "agents": [{"name": name, "system_prompt": f"You are {name}."} for name in NAMES],
    "edges": [
        *(["q", name] for name in NAMES),
        *([a, b] for a in NAMES for b in NAMES if a != b),
        ["Number Theorist", "sink"],
    ],
    "max_turns": 6,
    "min_turns": 3,
    "history": "private",
    "route": "message",
}


def team(**changes) -> dict:
    return {**TEAM, **changes}


def play(mas, *texts: str):
    model = Dynamics(mas)
    state = model.initial_state(QUESTION)
    for text in texts:
        state = model.transition(state, (text, mas.ALL))
    return model, state


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("RECIPIENT: Solver", "Solver"),
        ("SPEAKER: Planner\nRECIPIENT: Solver\nMESSAGE: RECIPIENT: Critic\nCURRENT ANSWER: 3", "Solver"),
        ("RECIPIENT: Solver\nRECIPIENT: Critic", "Solver"),
        ("**Recipient:** Solver", "** Solver"),
        ('  "recipient": "Solver",', '"Solver",'),
        ("recipient : Solver\r\nmore", "Solver"),
        ("RECIPIENT:", ""),
        ("RECIPIENT: Solver\n-> Critic", "Solver"),
        ("I am done. -> Solver", "Solver"),
        ("a -> b\nwork\n2 -> 3 -> Solver\n \n", "Solver"),
        ("x \u2192 Solver", "Solver"),
        ("x -> a \u2192 Solver", "Solver"),
        ("x \u2192 a -> Solver", "Solver"),
        ("-> Solver\nthen work", None),
        ("my recipient is known: Solver", None),
        ("Solver", None),
        ("", None),
        ("\n \n", None),
    ],
)
def test_the_contract_of_recipients(text: str, name: str | None) -> None:
    assert named_recipient(text) == name


@given(st.text(alphabet=" \n\r\u2028->\u2192:aRECIPIENTrecipient*\x00", max_size=60))
def test_any_text_names_at_most_a_line(text: str) -> None:
    name = named_recipient(text)
    assert name is None or (name in text and name == name.strip() and len(name.splitlines()) <= 1)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("MESSAGE: x\nCURRENT ANSWER: 18", "18"),
        ("CURRENT ANSWER: 17\n**Current answer:**\n\\boxed{18}\n", "**\n\\boxed{18}"),
        ("CURRENT ANSWER: unknown", "unknown"),
        ("the current answer is 18", None),
    ],
)
def test_the_field_of_the_current_answer(text: str, answer: str | None) -> None:
    assert current_answer(text) == answer


@pytest.mark.parametrize("name", ["Number Theorist", "number_theorist", "**NumberTheorist**.", "NUMBER-THEORIST"])
def test_case_spaces_and_punctuation_make_no_difference(name: str) -> None:
    _, state = play(load_mas(TEAM), f"RECIPIENT: {name}")
    assert (state.acting, state.recipients) == (2, (2,))


def test_agents_hand_over_until_one_names_sink() -> None:
    mas = load_mas(TEAM)
    model, state = play(mas, "-> Solver", "-> Planner", "-> Number Theorist", "18 -> sink")
    assert [turn.recipients for turn in state.turns] == [(1,), (0,), (2,), (mas.sink,)]
    assert model.is_terminal(state)
    assert model.failure(state) is None
    assert model.state_from_dict(json.loads(json.dumps(state.to_dict()))) == state
    assert [m.text for m in model.local_view(state, 0).messages] == ["-> Solver", "-> Planner", "-> Number Theorist"]


def test_only_legal_recipients_can_be_named() -> None:
    mas = load_mas(TEAM)
    model = Dynamics(mas)
    start = model.initial_state(QUESTION)
    assert nameable(mas, start) == (1, 2)
    assert model.legal_recipients(start) == (1, 2, mas.ALL)
    _, state = play(mas, "-> Number Theorist")
    # Before min_turns the episode cannot end.
    assert model.legal_recipients(state) == (0, 1, mas.ALL)
    with pytest.raises(
        IllegalActionError, match=r"cannot end before turn 3; expected one of 0 \(Planner\), 1 \(Solver\)"
    ):
        model.transition(state, ("done", mas.sink))
    _, state = play(mas, "-> Solver", "-> Number Theorist")
    assert model.legal_recipients(state) == (0, 1, 3, mas.ALL)


def test_the_last_turn_ends_whatever_the_message_names() -> None:
    mas = load_mas(TEAM)
    for last in ("-> Planner", "nobody", "-> sink"):
        model, state = play(mas, *["-> Solver", "-> Planner"] * 2, "-> Solver")
        assert model.legal_recipients(state) == (mas.sink, mas.ALL)
        state = model.transition(state, (last, mas.ALL))
        assert state.recipients == (mas.sink,)
        assert model.failure(state) is None


def test_the_recipient_of_the_action_overrides_that_of_the_message() -> None:
    mas = load_mas(TEAM)
    model = Dynamics(mas)
    start = model.initial_state(QUESTION)
    own, other = (model.transition(start, ("-> Solver", r)) for r in (mas.ALL, 2))
    assert (own.acting, other.acting) == (1, 2)
    assert own.digest != other.digest
    assert own == model.transition(start, ("-> Solver", 1))
    assert model.state_from_dict(other.to_dict()) == other


UNREADABLE = (
    "no name",
    "RECIPIENT: Bob",
    "RECIPIENT: Planner",
    "-> sink",
    "RECIPIENT:\nSolver",
    "-> Solver or Planner",
)


@pytest.mark.parametrize("text", UNREADABLE)
def test_a_message_that_names_no_legal_recipient_ends_the_episode_in_failure(text: str) -> None:
    model, state = play(load_mas(TEAM), text)
    assert model.is_terminal(state)
    assert state.recipients == ()
    assert state.transcript == ()
    assert model.failure(state).startswith("the message of Planner names ")
    assert "expected a line RECIPIENT: with one of 1 (Solver), 2 (Number Theorist)" in model.failure(state)
    assert model.state_from_dict(json.loads(json.dumps(state.to_dict()))) == state
    assert pickle.loads(pickle.dumps(state)) == state


@pytest.mark.parametrize("text", UNREADABLE)
def test_on_invalid_handles_it_in_the_environment(text: str) -> None:
    env = MASEnv(TASK, TEAM)
    env.reset(seed=0)
    _, reward, terminated, _, info = env.step((text, env.ALL))
    assert (reward, terminated, info["correct"], info["reason"]) == (-1.0, True, False, "invalid action")
    assert info["invalid_action"].startswith("the message of Planner names ")
    env = MASEnv(TASK, TEAM, on_invalid="retry", max_retries=1)
    env.reset(seed=0)
    before = env.state
    _, reward, terminated, _, info = env.step((text, env.ALL))
    assert (reward, terminated, info["retries_left"], env.state) == (0.0, False, 0, before)
    assert info["action_mask"].tolist() == [0, 1, 1, 0, 1]
    assert not env.step(("-> Solver", env.ALL))[2]
    assert env.state.acting == 1


def test_a_fallback_takes_what_names_no_legal_recipient() -> None:
    agents = [{**TEAM["agents"][0], "fallback": 2}, *TEAM["agents"][1:]]
    agents[2] = {**agents[2], "fallback": "sink"}
    mas = load_mas(team(agents=agents, fallback="Planner"))
    assert [agent.fallback for agent in mas.agents] == [2, 0, 3]
    assert load_mas(json.loads(json.dumps(mas.to_dict()))) == mas
    assert play(mas, "hm")[1].recipients == (2,)
    assert play(mas, "-> Solver", "hm")[1].recipients == (0,)
    # sink is not legal yet, so this fallback is no help.
    model, state = play(mas, "hm", "hm")
    assert model.failure(state)
    assert play(mas, "-> Solver", "-> Number Theorist", "hm")[1].recipients == (3,)


def test_conditions_hold_for_named_recipients() -> None:
    edges = [*TEAM["edges"][:3], ["Planner", "Solver", "contains:WORK"], ["Planner", "Number Theorist"]]
    mas = load_mas(team(edges=[*edges, ["Solver", "Planner"], ["Number Theorist", "sink"]]))
    assert play(mas, "WORK -> Solver")[1].recipients == (1,)
    assert play(mas, "-> Solver")[1].recipients == ()
    with pytest.raises(IllegalActionError, match="condition does not hold"):
        Dynamics(mas).transition(play(mas)[1], ("-> Solver", 1))


def test_an_agent_of_its_own_may_route_by_message() -> None:
    agents = [{**TEAM["agents"][0], "route": "message"}, *TEAM["agents"][1:]]
    mixed = {key: value for key, value in TEAM.items() if key != "route"}
    mas = load_mas({**mixed, "agents": agents})
    assert [agent.route for agent in mas.agents] == ["message", "edges", "edges"]
    _, state = play(mas, "-> Solver", "to all")
    assert state.recipients == (0, 2)


def test_placeholders_are_filled_at_each_turn() -> None:
    agents = [{"name": name, "system_prompt": "Write to {recipients}, {turns_left} left. {x}"} for name in NAMES]
    mas = load_mas(team(agents=agents))
    prompts = [
        chat_messages(mas, play(mas, *texts)[1])[0].content for texts in ([], ["-> Solver", "-> Number Theorist"])
    ]
    assert prompts == ["Write to Solver, Number Theorist, 6 left. {x}", "Write to Planner, Solver, sink, 4 left. {x}"]
    plain = load_mas({key: value for key, value in team(agents=agents).items() if key != "route"})
    assert chat_messages(plain, play(plain)[1])[0].content == "Write to {recipients}, {turns_left} left. {x}"
    env = MASEnv(TASK, mas, max_bytes=64)
    observation, _ = env.reset(seed=0)
    assert observation in env.observation_space


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"route": "text"}, "route: expected edges or message, got 'text'"),
        ({"route": ["message"]}, "route: expected edges or message, got ['message']"),
        ({"program": True}, "route: route: message in a program, which decides itself who acts next: drop the key"),
        ({"fallback": "Bob"}, "fallback: unknown node 'Bob'"),
        ({"fallback": "q"}, "fallback: q receives no messages: name an agent or sink"),
        (
            {"fallback": "sink"},
            "fallback: Planner has no edge without a condition to sink: add the edge or give Planner",
        ),
        ({"fallback": "Solver"}, "fallback: Solver has no edge without a condition to Solver"),
        ({"route": "edges", "fallback": "Solver"}, "fallback: no agent has route: message: add it or drop the key"),
    ],
)
def test_faults_of_routing(change, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_mas(team(**change))
    assert any(fault.startswith(expected) for fault in caught.value.faults), caught.value.faults


def test_all_faults_of_routing_are_reported_at_once() -> None:
    agents = [
        {"name": "A b", "system_prompt": "x", "route": "message"},
        {"name": "ab", "system_prompt": "x", "fallback": 0},
        {"name": "S.i.n.k", "system_prompt": "x"},
        {"name": "++", "system_prompt": "x", "route": 3},
    ]
    edges = [["q", i] for i in range(4)] + [[0, 1], [1, 2], [2, 3]]
    with pytest.raises(ConfigError) as caught:
        load_mas({"agents": agents, "edges": edges})
    assert caught.value.faults == (
        "agents[3].route: expected edges or message, got 3",
        "agents[1].fallback: the agent has no route: message: add it or drop the key",
        "agents[0].route: route: message needs max_turns, with which agents act as messages reach them: add it",
        "agents[1].name: messages cannot tell 'ab' from 'A b': rename one",
        "agents[2].name: messages cannot tell 'S.i.n.k' from 'sink': rename one",
        "agents[3].name: '++' needs a letter or digit: messages name it",
    )


def test_routes_are_part_of_the_identity() -> None:
    plain = {key: value for key, value in TEAM.items() if key != "route"}
    variants = [plain, TEAM, team(max_turns=5)]
    assert len({load_mas(one).fingerprint for one in variants}) == 3
    alike = {**plain, "agents": [{**agent, "route": "message"} for agent in TEAM["agents"]]}
    assert load_mas(alike) == load_mas(TEAM)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_handoff_keeps_the_contract(data) -> None:
    fallback = data.draw(st.sampled_from([{}, {"fallback": "Planner"}]))
    agents = [dict(TEAM["agents"][0], **({"fallback": 1} if fallback else {})), *TEAM["agents"][1:]]
    mas = load_mas(team(agents=agents, **fallback, min_turns=data.draw(st.integers(1, 6))))
    model, env = Dynamics(mas), MASEnv(TASK, mas, max_bytes=64)
    env.reset(options={"problem_id": "one"})
    state = model.initial_state(QUESTION)
    while not model.is_terminal(state):
        legal = model.legal_recipients(state)
        text = data.draw(st.sampled_from(["x", "-> Solver", "-> Planner", "-> sink", "RECIPIENT: number theorist"]))
        action = text, data.draw(st.sampled_from(legal))
        following = model.transition(state, action)
        assert len(following.recipients) == (model.failure(following) is None)
        observation, reward, terminated, _, info = env.step(action)
        assert env.observation_space.contains(observation)
        assert terminated == model.is_terminal(following)
        assert ("invalid_action" in info) == (model.failure(following) is not None)
        assert reward == (-1.0 if terminated else 0.0)
        state = following
    assert state.depth >= mas.min_turns or model.failure(state)
    assert state.depth <= 6
    assert model.state_from_dict(json.loads(json.dumps(state.to_dict()))) == state


def test_routing_passes_the_compliance_checks() -> None:
    check_mas(TEAM)


# ------------------------------------------------------------------------------------- the shipped system


def test_handoff_is_as_described() -> None:
    mas = load_mas("handoff")
    roles = "Analyst Algebraist Geometer NumberTheorist Combinatorialist IndependentSolver Critic Finalizer"
    assert [agent.name for agent in mas.agents] == roles.split()
    assert (mas.min_turns, mas.max_turns, mas.history) == (4, 12, "private")
    assert all(agent.route == "message" for agent in mas.agents)
    model = Dynamics(mas)
    assert model.initial_state(QUESTION).acting == 0
    assert all(mas.sees_question)
    for agent in mas.agents:
        for field in ("SPEAKER: " + agent.name, "RECIPIENT: ", "MESSAGE: ", "CURRENT ANSWER: "):
            assert f"\n{field}" in agent.system_prompt
        assert "{recipients}" in agent.system_prompt
        assert "{turns_left}" in agent.system_prompt
        assert max(map(len, agent.system_prompt.splitlines())) <= 80


def test_handoff_takes_four_to_twelve_turns() -> None:
    mas = load_mas("handoff")
    model, state = play(mas, "-> Finalizer", "-> Critic", "-> Finalizer")
    assert mas.sink in nameable(mas, state)
    _, early = play(mas, "-> Finalizer")
    assert mas.sink not in nameable(mas, early)
    texts = ["RECIPIENT: Critic", "RECIPIENT: Finalizer"] * 6
    model, state = play(mas, texts[1], *texts[:11])
    assert (state.depth, model.is_terminal(state)) == (12, True)


def test_handoff_env_by_id(tmp_path) -> None:
    import gymnasium as gym

    path = tmp_path / "math.jsonl"
    path.write_text(json.dumps({"problem": "$6+12$?", "solution": r"$\boxed{18}$", "level": "Level 1", "type": "A"}))
    env = gym.make("MAS-MATH-Handoff-v0", data=str(path))
    env.reset(seed=0)
    names = ["Algebraist", "IndependentSolver", "Critic", "Finalizer", "sink"]
    for turn, name in enumerate(names, 1):
        text = f"SPEAKER: me\nRECIPIENT: {name}\nMESSAGE: {turn} + 4.\nCURRENT ANSWER: \\boxed{{18}}"
        _, reward, terminated, _, info = env.step((text, env.unwrapped.ALL))
        assert terminated == (name == "sink")
    assert (reward, info["extracted"], env.unwrapped.state.depth) == (1.0, "18", 5)
