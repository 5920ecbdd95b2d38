"""Untrusted MAS configs: any file or dict soon loads or raises a short `ConfigError`."""

import json
import string
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mas_gym.errors import ConfigError
from mas_gym.systems.graph import MAS
from mas_gym.systems.loading import load_mas
from mas_gym.systems.validation import MOST_SHOWN
from tests.hostile.growth import assert_linear

SECONDS = 10.0
HEAD = "agents: [{name: A, system_prompt: Speak.}]\nedges: [[q, A]]\n"


def refused(text: str, tmp_path, suffix: str = ".yaml") -> str:
    path = tmp_path / f"own{suffix}"
    path.write_text(text, encoding="utf-8", newline="")
    begin = time.process_time()
    with pytest.raises(ConfigError) as caught:
        load_mas(path)
    assert time.process_time() - begin < SECONDS
    message = str(caught.value)
    assert len(message) < 10_000
    assert message.isprintable() or "\n" in message
    return message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: [a", "own.yaml: line 1: "),
        ("name: " + "[" * 100_000, "own.yaml: "),
        ("name: &a [*a]", "own.yaml: line 1: YAML anchors and aliases are not supported"),
        ("name: !!python/object/apply:os.system [ls]", "own.yaml: line 1: could not determine a constructor"),
        ("name: {{ title }}", "own.yaml: line 1: a key must be a plain word"),
        ("a: 1\n---\nb: 2\n", "own.yaml: line 2: expected a single document"),
        ("name: 'x", "own.yaml: line 1: "),
        ("", "expected a mapping with agents and edges, got None"),
        ("- 1\n- 2\n", "expected a mapping with agents and edges, got [1, 2]"),
        ("agents: 1\nagents: 2\n", "own.yaml: line 2: the key 'agents' occurs twice in one mapping"),
        ("? [a, b]\n: 1\n", "own.yaml: line 1: a key must be a plain word"),
        ("a: \x07\n", "control characters are not allowed"),
    ],
    ids=lambda value: value[:24],
)
def test_hostile_file_error_names_line_and_reason(text: str, expected: str, tmp_path) -> None:
    assert expected in refused(text, tmp_path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"agents":' * 100_000, "1" * 100_000, '{"agents": 1e999999}'])
def test_hostile_json_is_rejected(text: str, tmp_path) -> None:
    assert refused(text, tmp_path, ".json")


@pytest.mark.slow
def test_config_with_many_edges_is_read_in_linear_time(tmp_path) -> None:
    names = 500
    agents = "".join(f"- {{name: A{i}, system_prompt: x}}\n" for i in range(names))
    pairs = [[i, j] for i in range(names) for j in range(i + 1, names)]
    most = 95_000
    for count in (most // 4, most):
        edges = [*([-1, i] for i in range(names)), *pairs[-count:]]
        text = f"agents:\n{agents}edges: {json.dumps(edges, separators=(',', ':'))}\n"
        (tmp_path / f"{count}.yaml").write_text(text, encoding="utf-8")

    def read(count: int) -> None:
        # A file of this size has no room for the edges of the first agents, so the graph is rejected after it was read.
        with pytest.raises(ConfigError, match="no agent reads A0, and A1 acts after it"):
            load_mas(tmp_path / f"{count}.yaml")

    assert_linear(read, most)


def test_many_faults_give_a_short_message(tmp_path) -> None:
    edges = ", ".join(f"[Agnt, B{i}]" for i in range(40_000))
    message = refused(f"agents: [{{name: Agent, system_prompt: x}}]\nedges: [[q, Agent], {edges}]\n", tmp_path)
    assert message.splitlines()[0] == "MAS config 'own' has 80000 errors:"
    assert "did you mean 'Agent'?" in message.splitlines()[1]
    assert message.splitlines()[-1] == f"  ... and {80_000 - MOST_SHOWN} more; correct these first"
    assert len(message.splitlines()) == MOST_SHOWN + 2


def nested(depth: int) -> list:
    data: list = []
    for _ in range(depth):
        data = [data]
    return data


def endless() -> dict:
    data: dict = {"name": "A"}
    data["system_prompt"] = data["agents"] = [data]
    return data


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "make",
    [
        lambda: 10**100_000,
        lambda: -(10**100_000),
        lambda: nested(100_000),
        endless,
        Unprintable,
        lambda: "x" * 10**7,
        lambda: "\x1b[2J",
        lambda: "\ud800",
        lambda: [1] * 10**5,
    ],
    ids=["integer", "negative", "nested", "endless", "unprintable", "long", "escape", "surrogate", "wide"],
)
def test_hostile_dict_errors_are_short_and_escaped(make) -> None:
    value = make()
    agent = {"name": "A", "system_prompt": "Speak."}
    for config in (
        {"agents": value, "edges": value},
        {"agents": [value], "edges": [value]},
        {"agents": [{**agent, "max_new_tokens": value}], "edges": [[value, value, value]]},
        {"agents": [{**agent, "name": value, "system_prompt": value}], "schema": value, "edges": [[-1, 0]]},
        {"agents": [agent], "edges": [[-1, 0]], "policies": {"A": value, "B": value, 10**5000: 1}, 10**5000: 1},
        value,
    ):
        with pytest.raises(Exception) as caught:
            load_mas(config)
        assert isinstance(caught.value, ConfigError | LookupError | FileNotFoundError)
        assert len(str(caught.value)) < 10_000
        assert "\x1b" not in str(caught.value)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.sampled_from("[]{}:,-&*!?|>'\"#%@` \n\tab01.~<=") | st.sampled_from(string.printable), max_size=60))
def test_arbitrary_text_is_read_or_rejected(tmp_path, text: str) -> None:
    path = tmp_path / "any.yaml"
    path.write_text(HEAD + text, encoding="utf-8", newline="")
    try:
        assert isinstance(load_mas(path), MAS)
    except ConfigError as error:
        assert str(error)
