"""The JSON Schema of MAS configs against validation: what loads conforms, and faults that one value shows do not."""

import copy
import json
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import mas_gym
from mas_gym.cli import app
from mas_gym.errors import ConfigError
from mas_gym.systems.schema import json_schema
from mas_gym.systems.validation import AGENT_KEYS, CONFIG_KEYS

CHECK = jsonschema.Draft202012Validator(json_schema())
GOOD: dict[str, Any] = {
    "name": "pair",
    "agents": [
        {"name": "A", "system_prompt": "Answer.", "max_new_tokens": 5},
        {"name": "B", "system_prompt": "Check."},
    ],
    "edges": [["q", "A"], ["A", "B", "contains:x"], [-1, 1]],
    "policies": {"*": "tiny"},
    "max_turns": 4,
    "min_turns": 2,
    "history": "private",
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return the good config with one value replaced; None removes the key."""
    config: Any = copy.deepcopy(GOOD)
    *steps, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    place = config
    for step in steps:
        place = place[step]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return config


def loads(config: Any) -> bool:
    try:
        mas_gym.load_mas(config)
    except ConfigError:
        return False
    return True


def test_schema_is_valid_and_has_the_keys_that_validation_accepts() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())
    assert tuple(json_schema()["properties"]) == CONFIG_KEYS
    assert tuple(json_schema()["$defs"]["agent"]["properties"]) == AGENT_KEYS


@pytest.mark.parametrize("name", mas_gym.mas_names())
def test_every_shipped_config_conforms(name: str) -> None:
    from importlib import resources

    text = (resources.files("mas_gym") / "configs" / f"{name}.yaml").read_text("utf-8")
    CHECK.validate(yaml.safe_load(text))
    CHECK.validate(mas_gym.load_mas(name).to_dict())


WRONG: dict[str, tuple[Any, ...]] = {
    "schema": (2, True),
    "name": (" ", 7),
    "agents": (None, [], {}),
    "agents.0": ("A",),
    "agents.0.name": (None, "", "Sink", " q ", "*", "A" * 201),
    "agents.0.system_prompt": (None, " "),
    "agents.0.max_new_tokens": (0, 1_000_001, "12", True),
    "agents.0.temperature": (101,),
    "edges": (None, []),
    "edges.0": (["q"], ["q", "A", None, 1], "q A", [-2, 0], ["q", "sink"], ["q", "A", "contains:x"]),
    "edges.1": (
        *(["sink", "A"], ["A", "q"], ["A", -1], ["A", 1.5]),
        *(["A", "B", "has:x"], ["A", "B", "contains:"], ["A", "B", 3]),
    ),
    "policies": ([], {}),
    "policies.*": ("", 3),
    "max_turns": (0, 10_001, "4", None),
    "min_turns": (0,),
    "history": ("all",),
    "graph": ([],),
}
BAD = [(path, value) for path, values in WRONG.items() for value in values]


def test_valid_config_conforms_and_loads() -> None:
    CHECK.validate(GOOD)
    assert loads(GOOD)


@pytest.mark.parametrize(("path", "value"), BAD, ids=[f"{path}={json.dumps(value)[:20]}" for path, value in BAD])
def test_invalid_value_is_rejected_by_schema_and_loader(path: str, value: Any) -> None:
    config = changed(path, value)
    assert not loads(config)
    assert not CHECK.is_valid(config)


NODES = st.sampled_from([-2, -1, 0, 1, 2, 3, "q", "A", "B", "C", "sink", "", 1.5, None])
EDGES = st.lists(
    st.one_of(
        st.tuples(NODES, NODES).map(list),
        st.tuples(NODES, NODES, st.sampled_from([None, "contains:x", "regex:(", "regex:a", "x:y", 1])).map(list),
    ),
    max_size=4,
)
AGENTS = st.lists(
    st.fixed_dictionaries(
        {"name": st.sampled_from(["A", "B", "Q", "all", "", 1]), "system_prompt": st.sampled_from(["Answer.", "", 1])},
        optional={"max_new_tokens": st.sampled_from([1, 0, 10**6, 10**6 + 1, 2.5, None]), "x": st.just(1)},
    ),
    max_size=3,
)


@given(
    st.fixed_dictionaries(
        {"agents": AGENTS, "edges": EDGES},
        optional={
            "max_turns": st.sampled_from([1, 3, 0, None]),
            "min_turns": st.sampled_from([1, 2, 0]),
            "history": st.sampled_from(["inputs", "private", "x"]),
            "policies": st.sampled_from([None, {"*": "tiny"}, {"A": "tiny"}, {}]),
        },
    )
)
def test_every_config_that_loads_conforms_to_the_schema(config: dict[str, Any]) -> None:
    if loads(config):
        CHECK.validate(config)


def test_new_command_writes_a_template_that_the_check_command_accepts(tmp_path: Any) -> None:
    file, picture = tmp_path / "mas.yaml", tmp_path / "mas.svg"
    run = CliRunner(env={"COLUMNS": "200"}).invoke
    assert run(app, ["new", str(file)]).exit_code == 0
    CHECK.validate(yaml.safe_load(file.read_text("utf-8")))
    done = run(app, ["check", str(file), "--svg", str(picture)])
    assert done.exit_code == 0, done.output
    assert "my-agents: no errors; 3 agents" in done.output
    assert "Editor ◄────┴──┴──╯" in done.output
    assert "sees   the question, Solver, Critic (if contains:REVISE:)" in done.output
    assert "writes Editor (if contains:REVISE:), sink if no agent is left to act" in done.output
    assert "contains:REVISE:" in picture.read_text("utf-8")
    again = run(app, ["new", str(file)])
    assert again.exit_code == 2 and "exists" in again.output


def test_every_commented_setting_of_the_template_loads(tmp_path: Any) -> None:
    from importlib import resources

    text = (resources.files("mas_gym") / "template.yaml").read_text("utf-8")
    for comment, setting in (("# max_turns", "max_turns"), ("# min_turns", "min_turns"), ("# history", "history")):
        assert comment in text
        text = text.replace(comment, setting)
    for line in ("# policies:", "#   Critic", '#   "*"'):
        assert line in text
        text = text.replace(line, line.replace("# ", "", 1))
    mas = mas_gym.load_mas(yaml.safe_load(text))
    assert (mas.max_turns, mas.min_turns, mas.history, len(mas.policies)) == (6, 2, "inputs", 2)


def test_check_reports_all_errors_together(tmp_path: Any) -> None:
    config = {"agents": [{"name": f"A{i}"} for i in range(30)], "edges": [["q", "A0"]]}
    file = tmp_path / "mas.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["check", str(file)])
    assert done.exit_code == 2
    assert "errors" in done.output
    for i in range(30):
        assert f"agents[{i}].system_prompt" in done.output


def test_check_prints_the_schema() -> None:
    assert json.loads(CliRunner().invoke(app, ["check", "--schema"]).output) == json_schema()


def test_agent_names_in_a_config_are_escaped(tmp_path: Any) -> None:
    config = {"agents": [{"name": "\x1b[2J<b>&", "system_prompt": "x"}], "edges": [[-1, 0]]}
    file, picture = tmp_path / "mas.json", tmp_path / "mas.svg"
    file.write_text(json.dumps(config), encoding="utf-8")
    done = CliRunner().invoke(app, ["check", str(file), "--svg", str(picture)])
    assert done.exit_code == 0 and "\x1b" not in done.output
    drawn = picture.read_text("utf-8")
    assert "<b>" not in drawn and "\x1b" not in drawn


def test_graph_with_cycles_is_drawn() -> None:
    from search.pages.graph_drawing import graph_svg, graph_text

    mas = mas_gym.load_mas({**GOOD, "edges": [["q", "A"], ["A", "B"], ["B", "A"]]})
    assert graph_text(mas).splitlines()[2].startswith("A ◄") and graph_text(mas).count("◄") == 2
    assert graph_svg(mas).count('class="edge') == 3
