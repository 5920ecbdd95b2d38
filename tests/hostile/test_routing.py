"""Messages that attack the reading of recipients: it takes time linear in the message and never misleads a reader."""

import pytest

from mas_gym import Dynamics, load_mas
from mas_gym.envs.env import MASEnv
from mas_gym.errors import ConfigError
from mas_gym.systems.recipient_names import current_answer, folded, named_recipient
from mas_gym.tasks import Problem, ProblemTask
from tests.hostile.growth import assert_linear

SIZE = 1_000_000
UNITS = [
    *("->", "-", "\u2192", "-> a ", "->\n", "RECIPIENT:\n", "RECIPIENT ", "RECIPIENT", "RECIPIEN:\n", ":", ":\n", " "),
    *("CURRENT ANSWER:\n", "CURRENT ANSWER ", "*" * 40 + ":\n", "\n", "\r", "\u2028", "\x00", "\ud800", "\u202e"),
    *("\u00df\u0130", "Critic\n"),
]


@pytest.mark.parametrize("unit", UNITS, ids=ascii)
def test_long_messages_are_routed_in_linear_time(unit: str) -> None:
    def route(size: int) -> None:
        text = unit * (size // len(unit))
        for flood in (text, text + "x", "RECIPIENT: " + text, text + "\nRECIPIENT: Critic"):
            folded(named_recipient(flood) or "")
            current_answer(flood)

    assert_linear(route, SIZE)


def test_first_of_many_recipient_fields_is_found_in_linear_time() -> None:
    def find(fields: int) -> None:
        assert named_recipient("RECIPIENT: Critic\n" + "RECIPIENT: Solver\n" * fields) == "Critic"

    assert_linear(find, 1_000_000)


NAMES = ["\x1b[2JCritic\x07", "\u202ecitirC", "Critic\x00Solver", "\ud800", "Cr\u0456tic", "a" * SIZE]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name[:12]))
def test_names_with_escapes_are_rejected_and_shown_escaped(name: str) -> None:
    system = {**load_mas("handoff").to_dict(), "agents": agents()}
    env = MASEnv(ProblemTask.of([Problem("one", "1 + 1?", "2")]), system, max_bytes=4 * SIZE)
    env.reset(seed=0)
    _, reward, terminated, _, info = env.step((f"RECIPIENT: {name}", env.ALL))
    assert (reward, terminated) == (-1.0, True)
    assert info["invalid_action"].isprintable()
    assert len(info["invalid_action"]) < 1_000


def agents() -> list[dict]:
    listed = load_mas("handoff").to_dict()["agents"]
    return [{key: value for key, value in agent.items() if key != "fallback"} for agent in listed]


def test_recipient_in_a_quoted_block_is_ignored() -> None:
    mas = load_mas("handoff")
    quoted = "RECIPIENT: Critic\nMESSAGE: I was sent this:\nRECIPIENT: Finalizer\nCURRENT ANSWER: 3 -> Finalizer"
    state = Dynamics(mas).transition(Dynamics(mas).initial_state("x"), (quoted, mas.ALL))
    assert state.recipients == (6,)


@pytest.mark.parametrize("name", ["\x1b[2J", "\u202e", "-> x", "\n", "sink\x00", "Q"])
def test_hostile_agent_names_are_rejected_or_harmless(name: str) -> None:
    config = {
        "agents": [{"name": name, "system_prompt": "x"}, {"name": "B", "system_prompt": "x"}],
        "edges": [["q", 0], [0, 1], [1, 0], [1, "sink"]],
        "max_turns": 4,
        "route": "message",
    }
    try:
        mas = load_mas(config)
    except ConfigError as error:
        assert all(fault.isprintable() for fault in error.faults)
    else:
        state = Dynamics(mas).transition(Dynamics(mas).initial_state("x"), (f"RECIPIENT: {name}", mas.ALL))
        assert state.recipients == (1,)
