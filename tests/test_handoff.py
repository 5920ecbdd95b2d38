"""Recipients named in messages: the contract, illegal ones, the shipped handoff system, and search over recipients."""

import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import search
from mas_gym import Dynamics, chat_messages, load_mas
from mas_gym.envs.env import MASEnv
from mas_gym.errors import ConfigError, IllegalActionError
from mas_gym.policies import ScriptedPolicy
from mas_gym.systems.recipient_names import current_answer, nameable, named_recipient
from mas_gym.tasks import Problem, ProblemTask
from mas_gym.testing import check_mas, check_planner
from search import Tree

QUESTION = "6 + 12?"
TASK = ProblemTask.of([Problem("one", QUESTION, "18")], split="train")
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
def test_named_recipient_is_extracted(text: str, name: str | None) -> None:
    assert named_recipient(text) == name


@given(st.text(alphabet=" \n\r\u2028->\u2192:aRECIPIENTrecipient*\x00", max_size=60))
def test_recipient_extracted_from_arbitrary_text_is_at_most_one_line(text: str) -> None:
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
def test_current_answer_field_is_extracted(text: str, answer: str | None) -> None:
    assert current_answer(text) == answer


@pytest.mark.parametrize("name", ["Number Theorist", "number_theorist", "**NumberTheorist**.", "NUMBER-THEORIST"])
def test_recipient_matching_ignores_case_spaces_and_punctuation(name: str) -> None:
    _, state = play(load_mas(TEAM), f"RECIPIENT: {name}")
    assert (state.acting, state.recipients) == (2, (2,))


def test_handoffs_continue_until_sink_is_named() -> None:
    mas = load_mas(TEAM)
    model, state = play(mas, "-> Solver", "-> Planner", "-> Number Theorist", "18 -> sink")
    assert [turn.recipients for turn in state.turns] == [(1,), (0,), (2,), (mas.sink,)]
    assert model.is_terminal(state)
    assert model.failure(state) is None
    assert model.state_from_dict(json.loads(json.dumps(state.to_dict()))) == state
    assert [m.text for m in model.local_view(state, 0).messages] == ["-> Solver", "-> Planner", "-> Number Theorist"]


def test_legal_recipients_exclude_the_sink_before_min_turns() -> None:
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


def test_last_turn_ends_the_episode() -> None:
    mas = load_mas(TEAM)
    for last in ("-> Planner", "nobody", "-> sink"):
        model, state = play(mas, *["-> Solver", "-> Planner"] * 2, "-> Solver")
        assert model.legal_recipients(state) == (mas.sink, mas.ALL)
        state = model.transition(state, (last, mas.ALL))
        assert state.recipients == (mas.sink,)
        assert model.failure(state) is None


def test_recipient_of_the_action_overrides_the_message() -> None:
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
def test_message_without_legal_recipient_fails_the_episode(text: str) -> None:
    model, state = play(load_mas(TEAM), text)
    assert model.is_terminal(state)
    assert state.recipients == ()
    assert state.transcript == ()
    assert model.failure(state).startswith("the message of Planner names ")
    assert "expected a line RECIPIENT: with one of 1 (Solver), 2 (Number Theorist)" in model.failure(state)
    assert model.state_from_dict(json.loads(json.dumps(state.to_dict()))) == state
    assert pickle.loads(pickle.dumps(state)) == state


@pytest.mark.parametrize("text", UNREADABLE)
def test_on_invalid_option_applies_to_illegal_recipients(text: str) -> None:
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


def test_fallback_receives_messages_without_legal_recipient() -> None:
    agents = [{**TEAM["agents"][0], "fallback": 2}, *TEAM["agents"][1:]]
    agents[2] = {**agents[2], "fallback": "sink"}
    mas = load_mas(team(agents=agents, fallback="Planner"))
    assert [agent.fallback for agent in mas.agents] == [2, 0, 3]
    assert load_mas(json.loads(json.dumps(mas.to_dict()))) == mas
    assert play(mas, "hm")[1].recipients == (2,)
    assert play(mas, "-> Solver", "hm")[1].recipients == (0,)
    # sink is not legal yet, so this fallback has no effect.
    model, state = play(mas, "hm", "hm")
    assert model.failure(state)
    assert play(mas, "-> Solver", "-> Number Theorist", "hm")[1].recipients == (3,)


def test_conditions_apply_to_named_recipients() -> None:
    edges = [*TEAM["edges"][:3], ["Planner", "Solver", "contains:WORK"], ["Planner", "Number Theorist"]]
    mas = load_mas(team(edges=[*edges, ["Solver", "Planner"], ["Number Theorist", "sink"]]))
    assert play(mas, "WORK -> Solver")[1].recipients == (1,)
    assert play(mas, "-> Solver")[1].recipients == ()
    with pytest.raises(IllegalActionError, match="condition does not hold"):
        Dynamics(mas).transition(play(mas)[1], ("-> Solver", 1))


def test_message_routing_can_be_enabled_for_one_agent() -> None:
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
        (
            {"external": True},
            "route: route: message has no effect, because the running system determines the next agent",
        ),
        ({"fallback": "Bob"}, "fallback: unknown node 'Bob'"),
        ({"fallback": "q"}, "fallback: q receives no messages: name an agent or sink"),
        (
            {"fallback": "sink"},
            "fallback: Planner has no unconditional edge to sink",
        ),
        ({"fallback": "Solver"}, "fallback: Solver has no unconditional edge to Solver"),
        ({"route": "edges", "fallback": "Solver"}, "fallback: no agent has route: message: add it or drop the key"),
    ],
)
def test_invalid_routing_is_rejected(change, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_mas(team(**change))
    assert any(fault.startswith(expected) for fault in caught.value.faults), caught.value.faults


def test_all_routing_faults_are_reported_together() -> None:
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
        "agents[0].route: route: message needs max_turns: add it",
        "agents[1].name: messages cannot distinguish 'ab' and 'A b': rename one",
        "agents[2].name: messages cannot distinguish 'S.i.n.k' and 'sink': rename one",
        "agents[3].name: '++' needs a letter or digit, so that messages can name it",
    )


def test_routes_are_part_of_the_identity() -> None:
    plain = {key: value for key, value in TEAM.items() if key != "route"}
    variants = [plain, TEAM, team(max_turns=5)]
    assert len({load_mas(one).fingerprint for one in variants}) == 3
    alike = {**plain, "agents": [{**agent, "route": "message"} for agent in TEAM["agents"]]}
    assert load_mas(alike) == load_mas(TEAM)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_arbitrary_handoffs_follow_the_rules(data) -> None:
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


def test_handoff_system_has_the_documented_agents_limits_and_prompts() -> None:
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


def test_handoff_env_is_made_by_id(tmp_path) -> None:
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


# ------------------------------------------------------------------------------- search over recipients

REPAIR = {
    "name": "repair",
    "agents": [{"name": name, "system_prompt": f"You are {name}."} for name in ("Adder", "Doubler", "Verifier")],
    "edges": [
        *(["q", name] for name in ("Adder", "Doubler", "Verifier")),
        ["Adder", "Doubler"],
        ["Doubler", "Verifier"],
        *(["Verifier", goal] for goal in ("Adder", "Doubler", "sink")),
    ],
    "max_turns": 9,
    "history": "private",
    "route": "message",
}
SUMS = [(a, b) for a in range(3, 8) for b in (4, 9, 15, 26)]
REPAIRS = ProblemTask.of([Problem(f"{a}+{b}", f"Double {a} + {b}", str(2 * (a + b))) for a, b in SUMS])


def facts(question: str, said: list[str]) -> tuple[int, int, int]:
    """Return the right sum, and the sum and the product that were claimed last; 0 for none."""
    a, b = (int(word) for word in question.removeprefix("Double ").split(" + "))
    sums = [int(text.split("sum ")[1].split()[0]) for text in said if "sum " in text]
    products = [int(text.split("twice ")[1].split()[0]) for text in said if "twice " in text]
    return a + b, *(claims[-1] if claims else 0 for claims in (sums, products))


def repair_script(request, seed: int) -> str:
    question, *said = request.messages[-1].content.split("\n\n")
    total, claimed, doubled = facts(question, said)
    slip = seed % 2
    if request.agent == "Adder":
        return f"RECIPIENT: Doubler\nMESSAGE: sum {total + slip} here"
    if request.agent == "Doubler":
        return f"RECIPIENT: Verifier\nMESSAGE: sum {claimed} gives twice {2 * claimed + slip} here"
    goal = "sink"
    if doubled != 2 * total and seed % 3:
        goal = "Adder" if claimed != total else "Doubler"
    elif doubled != 2 * total or seed % 5 == 0:
        goal = ("Adder", "Doubler", "sink")[seed % 7 % 3]
    return f"RECIPIENT: {goal}\nMESSAGE: sum {claimed} gives twice {doubled} here\nCURRENT ANSWER: {doubled}"


class Checker:
    """Recomputes the arithmetic. Good messages forward right claims, or return wrong claims to the agent that erred."""

    name, terminal_only, free = "checker", False, False

    def score(self, contexts):
        return [self.value(context.state, context.mas.node_name(context.state.acting)) for context in contexts]

    def value(self, state, following: str) -> float:
        total, claimed, doubled = facts(state.question, [turn.text for turn in state.turns])
        fine = (claimed == total) + (doubled == 2 * total)
        if state.speaker != 2:
            return fine / 4
        right = {2: "sink", 1: "Doubler"}.get(fine, "Adder")
        return (fine - 1) / 2 if following == right else -0.9


def repaired(planner, **options) -> list:
    options = {"critic": Checker(), "seed": 1, **options}
    found = search.run(planner, REPAIRS, mas=REPAIR, policy=ScriptedPolicy(repair_script), **options)
    return sorted(found, key=lambda plan: plan.problem_id)


def hits(planner, **options) -> int:
    plans = repaired(planner, **options)
    assert [plan.error for plan in plans] == [None] * len(REPAIRS)
    return sum(plan.correct for plan in plans)


def test_verifier_can_return_to_an_earlier_agent() -> None:
    plans = repaired("single")
    ways = {tuple(turn.speaker for turn in plan.best.state.turns) for plan in plans}
    assert {(0, 1, 2), (0, 1, 2, 1, 2), (0, 1, 2, 0, 1, 2)} <= ways
    assert [plan.candidates for plan in plans] == [plan.candidates for plan in repaired("single")]


def test_search_outperforms_a_single_handoff_pass() -> None:
    single = hits("single", critic=None)
    assert single <= 14
    assert hits("sbs:4,2") == 20
    assert hits("mcts:8,3") == 20
    assert hits("mcts:8,3", concurrency=3) == 20


def test_recipients_chosen_by_a_critic_outperform_those_chosen_by_agents() -> None:
    assert hits("single:recipients=critic") > hits("single") > hits("single:recipients=uniform")


def same_words(request, seed: int) -> str:
    return "CURRENT ANSWER: 18"


def handed(planner: str, script=same_words, mas=None, **options):
    options = {"critic": search.ConstantCritic(), "seed": 3, **options}
    [plan] = search.run(planner, TASK, mas=mas or TEAM, policy=ScriptedPolicy(script), **options)
    return plan


@pytest.mark.parametrize("rule", ["uniform", "critic", "schedule"])
def test_children_with_different_recipients_are_distinct(rule: str) -> None:
    plan = handed(f"mcts:20,4,same=opening,recipients={rule}")
    tree = plan.tree
    first = [tree.states[child] for child in tree.children(0)]
    assert {state.text for state in first} == {"CURRENT ANSWER: 18"}
    assert [state.recipients for state in first] == ([(1,), (2,)] if rule == "uniform" else [(1,)])
    assert len({state.digest for state in tree.states}) == len(tree)
    assert (plan.error, plan.correct) == (None, True)
    back = Tree.from_dict(json.loads(json.dumps(tree.to_dict())), Dynamics(load_mas(TEAM)))
    assert back.states == tree.states


def test_equal_messages_to_different_recipients_are_not_merged() -> None:
    def say(request, seed: int) -> str:
        return f"So 18. -> {NAMES[1 + seed % 2] if request.agent == 'Planner' else 'Number Theorist'}"

    tree = handed("mcts:1,8,same=opening", say).tree
    assert sorted(tree.states[child].recipients for child in tree.children(0)) == [(1,), (2,)]


def test_round_robin_recipients_follow_the_agent_order() -> None:
    plan = handed("single:recipients=schedule", mas="handoff")
    assert [turn.speaker for turn in plan.best.state.turns] == list(range(8))
    assert plan.best.state.recipients == (8,)
    assert [turn.speaker for turn in handed("single:recipients=schedule", mas=TEAM).best.state.turns] == [0, 1, 2]


def test_uniform_recipients_depend_on_the_seed_and_reach_all_agents() -> None:
    ways = [handed("single:recipients=uniform", mas="handoff", seed=seed).best.state for seed in range(12)]
    assert ways[0] == handed("single:recipients=uniform", mas="handoff", seed=0).best.state
    assert {turn.speaker for state in ways for turn in state.turns} == set(range(8))


def test_critic_recipient_rule_costs_one_score_per_legal_recipient() -> None:
    critic = search.ConstantCritic()
    critic.free = False
    plan = handed("single:recipients=critic", critic=critic)
    # Two or three recipients are legal at the first three turns; equal values go to the first.
    legal = [nameable(load_mas(TEAM), state) for state in plan.best.state.path()[:-1]]
    assert plan.usage.reward_calls == sum(len(nodes) for nodes in legal if len(nodes) > 1)
    assert [turn.recipients for turn in plan.best.state.turns[:2]] == [(1,), (0,)]
    own = handed("single:recipients=critic", lambda request, seed: "18 -> Number Theorist")
    assert own.best.state.turns[0].recipients == (2,)


def test_path_without_legal_recipient_has_no_answer() -> None:
    class Proud:
        name, terminal_only, free, scored = "proud", False, False, 0

        def score(self, contexts):
            self.scored += len(contexts)
            return [5.0 for _ in contexts]

    critic = Proud()
    plan = handed("sbs:2,1", critic=critic)
    assert (plan.error, plan.answer, plan.correct, plan.best.score) == (None, None, False, -1.0)
    assert plan.best.state.recipients == ()
    assert (plan.usage.agent_calls, plan.usage.reward_calls, critic.scored) == (2, 0, 0)
    plan = handed("mcts:4,2", training=True, critic=None)
    assert [candidate.correct for candidate in plan.candidates] == [False]
    assert plan.tree[1].value == -1.0
    assert Tree.from_dict(plan.tree.to_dict(), Dynamics(load_mas(TEAM))).states == plan.tree.states
    # Self-consistency counts no answer for it.
    plan = handed("sc:5", lambda request, seed: "18 -> sink" if seed % 2 else "18 -> Solver", critic=None)
    assert plan.answer in (None, "18")
    assert plan.correct == (plan.best.state.recipients != ())


def test_recipient_rule_is_part_of_the_run_identity(tmp_path) -> None:
    path = tmp_path / "runs.db"
    specs = ["single", "single:recipients=uniform", "single:recipients=schedule"]
    first = [handed(spec, mas="handoff", store=path) for spec in specs]
    again = [handed(spec, mas="handoff", store=path) for spec in specs]
    assert [plan.best.state for plan in again] == [plan.best.state for plan in first]
    assert [search.turn_answers(plan, TASK) for plan in again] == [search.turn_answers(plan, TASK) for plan in first]
    with search.open_store(path) as store:
        assert [run.label.split()[0] for run in store.runs()] == specs


def test_every_planner_accepts_a_recipient_rule() -> None:
    for name in ("single", "sc:2", "bon:2", "sbs:2,1", "mcts:2,2", "puct:2,2", "dvts:2,2", "rebase:4", "adaptive:3"):
        spec = f"{name}{',' if ':' in name else ':'}recipients=uniform"
        planner = search.load_planner(spec)
        assert search.load_planner(search.planner_spec(planner)) == planner
        assert handed(spec).error is None
    assert search.load_planner("mcts:4,2,recipients=own") == search.MCTS(4, 2)


def test_recipient_rules_pass_the_planner_check_within_budgets() -> None:
    check_planner(search.ChosenRecipients(search.MCTS(4, 2), "uniform"), systems=("handoff", "rpsv"))
    check_planner(search.ChosenRecipients(search.StepBeamSearch(2, 1), "schedule"), systems=("handoff",))
    for rule in ("schedule", "uniform", "critic"):
        for planner in ("mcts:20,3", "sbs:3,2"):
            plan = handed(f"{planner},recipients={rule}", budget=search.Budget(calls=24), mas="handoff")
            assert (plan.error, plan.usage.agent_calls <= 24) == (None, True)


def test_invalid_recipient_rules_are_rejected() -> None:
    with pytest.raises(ConfigError, match="expected recipients to be one of"):
        search.load_planner("mcts:2,2,recipients=best")
    with pytest.raises(ConfigError, match="needs a critic"):
        search.run("single:recipients=critic", TASK, mas=TEAM, policy=ScriptedPolicy(same_words))
    with pytest.raises(ConfigError, match="recipients=critic"):
        handed("single:recipients=critic", critic=search.PolicyLikelihood())
    with pytest.raises(ConfigError, match="MCTS needs a critic"):
        handed("mcts:2,2,recipients=uniform", critic=None)


def growing(request, seed: int) -> str:
    turn = request.messages[-1].content.count("CURRENT ANSWER")
    answer = {0: "unknown", 1: "17", 2: "18"}.get(turn, "18")
    goal = {"Planner": "Solver", "Solver": "Planner"}.get(request.agent, "sink")
    return f"RECIPIENT: {goal}\nMESSAGE: 3 and 4\nCURRENT ANSWER: {answer}"


def test_turn_answers_returns_answers_after_given_turns() -> None:
    plan = handed("single", growing)
    found = search.turn_answers(plan, TASK, turns=(1, 2, 3, 6, 99))
    assert found == ((1, None, False), (2, "17", False), (3, "18", True), (6, "18", True), (99, "18", True))
    assert [answer.turns for answer in search.turn_answers(plan, TASK)] == [4, 8, 12]
    with pytest.raises(ConfigError, match="turns: expected an integer of at least 1, got 0"):
        search.turn_answers(plan, TASK, turns=(0,))
    failed = handed("single", lambda request, seed: "RECIPIENT: nobody\nCURRENT ANSWER: 18")
    assert search.turn_answers(failed, TASK, turns=(4,)) == ((4, None, False),)


def test_pages_and_critic_texts_show_recipients() -> None:
    from rewardmodels.data.encode import state_text
    from search.pages.tree_page import tree_page

    plan = handed("mcts:6,3,recipients=uniform", mas="handoff")
    page = tree_page(plan)
    assert "NumberTheorist" in page
    texts = {state_text(load_mas("handoff"), state) for state in plan.tree.states}
    assert len(texts) == len(plan.tree)
    _, failed = play(load_mas(TEAM), "nobody")
    assert state_text(load_mas(TEAM), failed).endswith("\n0>: nobody\n3")


def test_equal_messages_to_different_recipients_form_a_preference_pair() -> None:
    from rewardmodels.data.mining import pairs

    tree = handed("mcts:30,6,recipients=uniform", training=True, critic=None, mas=REPAIR).tree
    assert all(pair.chosen.state.digest != pair.rejected.state.digest for pair in pairs(tree, 9))
    model = Dynamics(load_mas(TEAM))
    tree = Tree(model.initial_state(QUESTION))
    for recipient, value in ((1, 1.0), (2, -1.0)):
        child = tree.add(0, model.transition(tree.states[0], ("Over to you.", recipient)))
        tree.visits[child], tree.totals[child] = 1, value
    [pair] = pairs(tree, 6)
    assert (pair.chosen.state.recipients, pair.rejected.state.recipients) == ((1,), (2,))


def test_play_and_check_support_handoffs(tmp_path) -> None:
    from typer.testing import CliRunner

    from mas_gym.cli import app

    path = tmp_path / "math.jsonl"
    path.write_text(json.dumps({"problem": "$6+12$?", "solution": r"$\boxed{18}$", "level": "Level 1", "type": "A"}))
    runner = CliRunner(env={"COLUMNS": "100"})
    goals = ["Algebraist", "Critic", "Algebraist", "Finalizer"]
    said = "".join(f"RECIPIENT: {goal}\nCURRENT ANSWER: 17\n\n\n" for goal in goals)
    # The last message names no recipient; the line after it names sink.
    done = runner.invoke(app, ["play", "MAS-MATH-Handoff-v0", "--data", str(path)], input=f"{said}18\n\nsink\n")
    assert done.exit_code == 0, done.output
    assert "To (empty for the one that your message names)" in done.output
    assert "Turns left, this one included: 8." in done.output
    assert done.output.count("Algebraist: RECIPIENT: Critic") == 2
    assert "answer 18, right (reward +1)" in done.output
    shown = runner.invoke(app, ["check", "handoff"]).output
    assert "agents act as messages reach them, 4 to 12 turns" in shown
    assert "writes the agent named in its message, or else Critic; legal: Algebraist, Geometer" in shown
