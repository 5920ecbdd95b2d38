"""MAS configs: the paper's seven against the paper's listings, and everything the validator must report."""

import json
import pickle
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mas_gym.errors import ConfigError, DataNotFoundError, MASGymError, UnknownNameError
from mas_gym.systems.conditions import Condition, matcher
from mas_gym.systems.graph import MAS
from mas_gym.systems.loading import load_mas, mas_names

LISTINGS = Path(__file__).parent / "data" / "paper_listings.txt"


def paper_listings():
    """Read the paper's listings line by line, without a YAML parser: name -> (agents, edges)."""
    systems = {}
    for chunk in LISTINGS.read_text(encoding="utf-8").split("=== ")[1:]:
        title, rest = chunk.split("\n", 1)
        blocks, edges = rest.split("--- edges\n")
        agents = []
        for block in re.split(r"(?m)^- name: ", blocks)[1:]:
            lines = block.split("\n")
            start = lines[1].removeprefix("system_prompt: ")
            cap = next(line for line in lines if line.startswith("max_new_tokens: "))
            if start == "|":
                body = lines[2 : lines.index(cap)]
                prompt = "".join(line.removeprefix("  ") + "\n" for line in body)
            else:
                prompt = start.strip('"')
            agents.append((lines[0], prompt, int(cap.split(": ")[1])))
        found = []
        for line in edges.strip().split("\n")[1:]:
            source, target, condition = re.fullmatch(r'\s*- \[\s*(-?\d+), (\d+)(?:, "(.*)")?\]\s*', line).groups()
            found.append((int(source), int(target), condition and condition.replace("\\\\", "\\")))
        systems[title] = agents, found
    return systems


def agent(name="A", **fields):
    return {"name": name, "system_prompt": "Speak.", "max_new_tokens": 8, **fields}


def config(agents, edges, **fields):
    return {"agents": [agent(a) if isinstance(a, str) else a for a in agents], "edges": edges, **fields}


def faults_of(source) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_mas(source)
    assert all(fault in str(caught.value) for fault in caught.value.faults)
    return caught.value.faults


def test_paper_lists_every_shipped_system_of_its_experiments() -> None:
    assert sorted(paper_listings()) == [name for name in mas_names() if name not in ("cot", "game24", "handoff")]


@pytest.mark.parametrize("name", sorted(paper_listings()))
def test_shipped_configs_equal_the_configs_in_the_paper(name: str) -> None:
    agents, edges = paper_listings()[name]
    mas = load_mas(name)
    assert mas.name == name
    assert [(a.name, a.system_prompt, a.max_new_tokens) for a in mas.agents] == agents
    assert [(e.source, e.target, e.condition and str(e.condition)) for e in mas.edges] == edges
    assert mas.dynamic == (name == "dylan")


def test_block_prompts_preserve_line_breaks() -> None:
    prompt = load_mas("refine").agents[1].system_prompt
    assert prompt == (
        "You are a checker. Look at the solution and check if it is correct.\n\n"
        "Check:\n- Are the steps logical?\n- Is the math correct?\n\n"
        "Reply with only one of these:\nCORRECT\nor\nINCORRECT: [explain the error]\n"
    )


@pytest.mark.parametrize("name", sorted(paper_listings()))
def test_mas_survives_dict_json_and_pickle(name: str, tmp_path: Path) -> None:
    mas = load_mas(name)
    assert load_mas(json.loads(json.dumps(mas.to_dict()))) == mas
    assert pickle.loads(pickle.dumps(mas)) == mas
    assert load_mas(mas) is mas
    path = tmp_path / "own.json"
    path.write_text(json.dumps(mas.to_dict()), encoding="utf-8")
    assert load_mas(path) == mas
    assert load_mas(str(path)).fingerprint == mas.fingerprint


def test_fingerprints_differ_between_systems() -> None:
    prints = {load_mas(name).fingerprint for name in mas_names()}
    assert len(prints) == len(mas_names())
    changed = load_mas("rpsv").to_dict()
    changed["agents"][0]["max_new_tokens"] -= 1
    assert load_mas(changed).fingerprint not in prints


def test_nodes_are_found_by_name() -> None:
    by_name = load_mas(config("AB", [["q", "A"], ["A", "B", "contains:x"], ["A", "sink"], ["q", "B"]]))
    by_number = load_mas(config("AB", [[-1, 0], [0, 1, "contains:x"], [0, "sink"], [-1, 1]]))
    assert by_name == by_number
    assert by_name.node_name(2) == "sink"


@pytest.mark.parametrize("source", ["RPSV", "Rpsv"])
def test_names_are_case_insensitive(source: str) -> None:
    assert load_mas(source) == load_mas("rpsv")


@pytest.mark.parametrize(
    ("edges", "expected"),
    [
        ([[-1, 0], [0, 5], [0, 1]], "edges[1][1]: unknown node 5"),
        ([[-1, 0], [0, "Solver"], [0, 1]], "edges[1][1]: unknown node 'Solver'"),
        ([[-1, 0], [0, True], [0, 1]], "edges[1][1]: unknown node True"),
        ([[-1, 0], [0, 1], [1, 0]], "edges[2]: B -> A goes against the order"),
        ([[-1, 0], [0, 1], [1, 1]], "edges[2]: B -> B goes against the order"),
        ([[-1, 1], [1, 0]], "edges[1]: B -> A goes against the order"),
        ([[-1, 0], [0, 1], [0, 1]], "edges[2]: repeats edges[1]"),
        ([[-1, 0], [0, 1], [0, 1, "contains:x"]], "edges[2]: repeats edges[1]"),
        ([[-1, 0], [0, 1], ["sink", 1]], "edges[2]: an edge out of sink"),
        ([[-1, 0], [0, 1], [0, "q"]], "edges[2]: an edge into q"),
        ([[-1, 0], [0, 1], [-1, "sink"]], "edges[2]: an edge from q to sink"),
        ([[-1, 0, "contains:x"], [0, 1]], "edges[0]: a condition on an edge from q"),
        ([[-1, 0], [0, 1, r"regex:(a)\1"]], "edges[1][2]: the pattern '(a)\\\\1' is not valid"),
        ([[-1, 0], [0, 1, "regex:("]], "edges[1][2]: the pattern '(' is not valid"),
        ([[-1, 0], [0, 1, "contains:"]], "edges[1][2]: contains: needs a pattern"),
        ([[-1, 0], [0, 1, "regx:a"]], "edges[1][2]: unknown condition 'regx:a'"),
        ([[-1, 0], [0, 1, 7]], "edges[1][2]: unknown condition 7"),
        ([[-1, 0], [0, 1], [0]], "edges[2]: expected [source, target]"),
        ([[-1, 0], [0, 1], "0 -> 1"], "edges[2]: expected [source, target]"),
        ([[-1, 0]], "agents[1]: no path leads from q to B"),
        ([[-1, 0], [-1, 1]], "agents[0]: no agent reads A, and B acts after it"),
        ([[-1, 0], [0, "sink"], [-1, 1]], "agents[0]: A always ends the episode, so B never acts"),
        ([], "edges: expected a list of edges, got []"),
        (None, "edges: expected a list of edges, got nothing"),
        ("many", "edges: expected a list of edges, got 'many'"),
    ],
)
def test_invalid_edges_are_rejected(edges, expected: str) -> None:
    found = faults_of(config("AB", edges))
    assert any(fault.startswith(expected) for fault in found), found


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("a text", "agents[1]: expected a mapping"),
        (agent("B", max_new_tokens=0), "agents[1].max_new_tokens: expected an integer"),
        (agent("B", max_new_tokens=-3), "agents[1].max_new_tokens: expected an integer"),
        (agent("B", max_new_tokens=2.5), "agents[1].max_new_tokens: expected an integer"),
        (agent("B", max_new_tokens=True), "agents[1].max_new_tokens: expected an integer"),
        (agent("B", max_new_tokens="8"), "agents[1].max_new_tokens: expected an integer"),
        (agent("B", max_new_tokens=10**9), "agents[1].max_new_tokens: expected an integer"),
        (agent("B", system_prompt=" "), "agents[1].system_prompt: expected a non-empty text"),
        (agent("B", system_prompt=None), "agents[1].system_prompt: expected a non-empty text"),
        (agent(""), "agents[1].name: expected a non-empty text"),
        (agent(False), "agents[1].name: expected a non-empty text, got False: name the agent, in quotes if necessary"),
        (agent("Sink"), "agents[1].name: 'Sink' is the name of a special node"),
        (agent("A"), "agents[1].name: 'A' is also the name of agents[0]"),
        (agent("B", max_tokens=3), "agents[1].max_tokens: unknown key 'max_tokens'"),
        (agent("B", system_promt="x"), "agents[1].system_promt: unknown key 'system_promt'"),
    ],
)
def test_invalid_agents_are_rejected(entry, expected: str) -> None:
    found = faults_of({"agents": [agent("A"), entry], "edges": [[-1, 0], [0, 1]]})
    assert any(fault.startswith(expected) for fault in found), found


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({}, "agents: expected a list of at least one agent, got nothing"),
        ({"agents": [], "edges": [[-1, 0]]}, "agents: expected a list of at least one agent, got []"),
        ({**config("A", [[-1, 0]]), "edgs": []}, "edgs: unknown key 'edgs'"),
        ({**config("A", [[-1, 0]]), "schema": 2}, "schema: expected 1, got 2"),
        ({**config("A", [[-1, 0]]), "name": 3}, "name: expected a non-empty text, got 3"),
    ],
)
def test_invalid_top_level_keys_are_rejected(source, expected: str) -> None:
    assert any(fault.startswith(expected) for fault in faults_of(source))


def test_nearest_names_are_suggested() -> None:
    found = faults_of({**config(["Planner", "Solver"], [[-1, "Plannr"], ["Planner", 1, "regx:a"]]), "agent": 1})
    assert any("did you mean 'Planner'?" in fault for fault in found)
    assert any("did you mean 'regex'?" in fault for fault in found)
    assert any("did you mean 'agents'?" in fault for fault in found)


def test_all_faults_are_reported_at_once_with_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(
        "agents:\n"
        "  - name: A\n"
        "    system_prompt: Speak.\n"
        "    max_new_tokens: 0\n"
        "  - name: B\n"
        "    prompt: Speak.\n"
        "  - {name: C, system_prompt: Speak.}\n"
        "edges:\n"
        "  - [-1, 0]\n"
        "  - [0, 1]\n"
        "  - [1, 0]\n"
        "  - [0, 9]\n"
        '  - [0, 2, "regex:(?=x)y"]\n',
        encoding="utf-8",
    )
    found = faults_of(path)
    for expected in (
        "bad.yaml:4: agents[0].max_new_tokens:",
        "bad.yaml:6: agents[1].prompt: unknown key",
        "bad.yaml:5: agents[1].system_prompt: expected a non-empty text, got None",
        "bad.yaml:12: edges[3][1]: unknown node 9",
        "bad.yaml:13: edges[4][2]: the pattern",
        "bad.yaml:11: edges[2]: B -> A goes against the order",
    ):
        assert sum(fault.startswith(expected) for fault in found) == 1, found
    assert len(found) == 6


def test_each_unknown_node_gives_one_fault() -> None:
    assert len(faults_of(config("AB", [[-1, 0], ["Aa", 1], [0, "Bb"]]))) == 2


def test_each_separate_cycle_is_reported() -> None:
    edges = [[-1, 0], [0, 1], [1, 0], [1, 2], [2, 3], [3, 2], [3, 3]]
    assert sum("against the order" in fault for fault in faults_of(config("ABCD", edges))) == 3


def test_conditional_branches_may_end_without_out_edges() -> None:
    edges = [[-1, 0], [0, 1, "contains:fix"], [0, 2, "not_contains:fix"]]
    mas = load_mas(config(["Judge", "Fixer", "Reporter"], edges))
    assert mas.dynamic


def test_undecodable_file_is_rejected(tmp_path: Path) -> None:
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("name: é\n".encode("latin-1"))
    with pytest.raises(ConfigError, match="not UTF-8 at byte 6"):
        load_mas(latin)


def test_unknown_names_and_paths_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'rpsv'") as caught:
        load_mas("rpvs")
    assert "consensus, cot, debate, dylan, game24, handoff, logic, refine, rpsv, single" in str(caught.value)
    with pytest.raises(DataNotFoundError, match="no MAS config at"):
        load_mas(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="expected a MAS name, a path or a dict, got int"):
        load_mas(3)
    for source in ("a\0b", "x" * 5000):
        with pytest.raises(MASGymError):
            load_mas(source)


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        (r"(?i)verdict:\s*disagree", "VERDICT:  Disagree", True),
        (r"(?i)verdict:\s*disagree", "VERDICT: AGREE\nFinal Answer: 18.5", False),
        (r"^VERDICT:\s*AGREE", "so\nVERDICT: AGREE", False),
        (r"(?m)^VERDICT:\s*AGREE$", "so\nVERDICT: AGREE\nFinal Answer: 18.5", True),
        (r"Final Answer:\s*[-+]?\d+(\.\d+)?", "Final Answer: 18.5", True),
        (r"(?:\d{1,3},)*\d{3}", "1,234 on 2024-01-31", True),
        (r"(?s:x.y)|(?i:z)", "x\ny", True),
        (r"a.b", "a\nb", False),
        (r"\bagree\b", "disagree", False),
        (r"\pL+\.", "\u00e9t\u00e9.", True),
        ("", "", True),
    ],
)
def test_regex_condition_holds_if_the_pattern_matches(pattern: str, text: str, expected: bool) -> None:
    assert Condition("regex", pattern).holds(text) == expected
    assert Condition("not_regex", pattern).holds(text) != expected


@pytest.mark.parametrize(
    ("pattern", "remedy"),
    [
        (r"(?<!DIS)AGREE", "RE2 has no lookahead or lookbehind: match the text itself, or use not_regex:"),
        (r"(?=.*a)b", "RE2 has no lookahead or lookbehind"),
        (r"x*+y", "possessive repeats: use ordinary ones"),
        (r"(?>x*)y", "no atomic groups"),
        (r"(a)\1+", "RE2 has no backreferences: write the text out"),
        (r"(a)?(?(1)b|c)", "see https://github.com/google/re2/wiki/Syntax"),
        (r"x\Z", r"the end of the text is \z in RE2"),
        ("(?:a{1000}){1000}", "invalid repetition size"),
        ("a{1001}", "invalid repetition size"),
        (r"\pL{900}", "pattern too large"),
        ("(", "missing )"),
        ("*", "no argument for repetition operator"),
        ("\\", "trailing"),
        ("[\ud800]", "surrogates not allowed"),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_invalid_pattern_error_suggests_a_fix(pattern: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(remedy)):
        matcher(pattern)


def test_conditions_match_as_documented() -> None:
    assert Condition("regex", r"(?i)verdict:\s*disagree").holds("VERDICT:  Disagree")
    assert not Condition("not_regex", r"^x").holds("xyz")
    assert Condition("contains", "DONE").holds("all DONE.")
    assert not Condition("not_contains", "DONE").holds("all DONE.")
    assert Condition("contains", "\ud800").holds("a\ud800b")
    assert str(Condition("regex", "a:b")) == "regex:a:b"


def test_regex_and_contains_find_text_inside_a_long_message() -> None:
    filler = "." * 100_000
    for kind in ("regex", "contains"):
        assert Condition(kind, "mark").holds(filler + "mark" + filler)
        assert not Condition(kind, "mark").holds(filler)


def test_lone_surrogates_match_as_characters() -> None:
    assert Condition("regex", r"a.b").holds("a\ud800b")
    assert not Condition("regex", r"\w").holds("\ud800")


KEYS = st.sampled_from(["name", "agents", "edges", "system_prompt", "max_new_tokens", "x"])
DATA = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5),
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(KEYS, DATA, max_size=5))
def test_arbitrary_config_is_loaded_or_rejected_with_a_list_of_faults(data) -> None:
    try:
        assert isinstance(load_mas(data), MAS)
    except ConfigError as error:
        assert error.faults


def test_many_invalid_agents_are_reported() -> None:
    agents = [agent(f"A{i}") for i in range(10_000)]
    edges = [[-1, 0], *([i, i + 1] for i in range(9_999))]
    assert len(load_mas({"agents": agents, "edges": edges}).agents) == 10_000
    ring = faults_of({"agents": agents, "edges": [*edges, [9_999, 0]]})
    assert len(ring) == 1
    assert "A9999 -> A0 goes against the order" in ring[0]
