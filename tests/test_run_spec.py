"""The description of a run: one list of settings, and the rules for options that depend on each other."""

import inspect
from dataclasses import fields
from typing import Any

import pytest
import typer

import search
from mas_gym.cli import app
from mas_gym.errors import ConfigError
from search.compare import compare
from search.option_rules import EXCLUDED, NEEDED
from search.runs import RunSettings

SETTINGS = {field.name for field in fields(search.RunSpec)}


def test_arguments_of_run_are_the_settings_of_a_spec() -> None:
    loaded = {*RunSettings.__annotations__} - {"program", "recorded", "prices"}
    assert loaded | {"planner", "problems", "source"} == SETTINGS
    shown = inspect.signature(search.run).parameters
    assert shown.keys() == {*RunSettings.__annotations__, "planner", "problems"}
    assert shown["concurrency"].default == 64


def test_rules_name_existing_options() -> None:
    root: Any = typer.main.get_command(app)
    options = {option.name for command in (root, *root.commands.values()) for option in command.params}
    named = {*EXCLUDED, *NEEDED, *NEEDED.values(), *(name for names in EXCLUDED.values() for name in names)}
    assert not named - options - {*RunSettings.__annotations__}


@pytest.mark.parametrize(
    ("call", "arguments", "reason"),
    [
        (search.run, {"concurency": 2}, "did you mean 'concurrency'?"),
        (compare, {"mas": "rpsv", "seed": 1}, "unknown argument 'seed'"),
        (search.run, {"recorded": "logs.db", "mas": "rpsv"}, "recorded=: cannot be combined with mas="),
        (search.run, {"mas": "rpsv"}, "expected a policy"),
    ],
)
def test_wrong_arguments_are_rejected_by_name(call: Any, arguments: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        call("single", [], **arguments)
