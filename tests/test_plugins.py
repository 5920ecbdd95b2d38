"""The grammar of specs, and registered names of every kind of part."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

import mas_gym
import search
from mas_gym.cli import app
from mas_gym.cli.option_values import read_pairs
from mas_gym.errors import ConfigError, MASGymError, MissingDependencyError, UnknownNameError
from mas_gym.internal.identity import identity_of
from mas_gym.plugins import Registry, Spec, write_settings
from mas_gym.policies import ScriptedPolicy, known_policies, load_policy
from mas_gym.programs import load_program
from mas_gym.tasks.grading.graders import make_grader
from rewardmodels import known_critics, load_critic

# ---- grammar

HOSTILE_SPECS = [
    *("", ":", "#", "::", "x:", "#a=1", "x#", "x#=1", "x#a", "x#a=[", "x#a=1&a=2", "x:a=1,2", "x:a=1,a=2", ".py:"),
    *("a.py:", "a.py:b:c:d#e=f", "\x00", "x:\x00", "~nobody/x", "/" * 5000, "x" * 5000, "none.py:\x1b[31m"),
    "x#a=!!python/name:os.system",
]


@given(st.text(alphabet="ab.py:#=,& /\n") | st.text(), st.booleans())
@example("judge:my.py:make", True)
@example("x#a.py:b", False)
def test_parsing_the_text_of_a_spec_returns_the_same_spec(text: str, registered: bool) -> None:
    spec = Spec.parse(text, lambda name: registered)
    assert Spec.parse(str(spec), lambda name: registered) == spec


NAMES = st.from_regex(r"[a-z][a-z0-9_-]{0,8}", fullmatch=True)
TEXTS = st.from_regex(r"[a-z][A-Za-z0-9./@_-]{0,8}", fullmatch=True)


@given(
    NAMES,
    TEXTS,
    st.dictionaries(NAMES, TEXTS),
    st.sampled_from(["", "my.py", "a b/x.y.py", "/home/c#/my.py", "C:/my.py"]),
)
def test_spec_with_all_parts_is_restored_from_its_text(
    name: str, argument: str, more: dict[str, str], file: str
) -> None:
    fragment = "&".join(f"{key}={value}" for key, value in more.items())
    spec = Spec(name, argument, fragment, file)
    assert Spec.parse(str(spec)) == spec


VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS


def plain(value: object) -> bool:
    return not isinstance(value, str) or value.casefold() not in ("none", "true", "false", "nan", "inf", "infinity")


@given(st.lists(VALUES.filter(plain)), st.dictionaries(NAMES, VALUES.filter(plain)))
def test_settings_survive_formatting_and_parsing(args: list[Any], kwargs: dict[str, Any]) -> None:
    assert Spec("x", write_settings(args, kwargs)).settings() == (args, kwargs)


@given(st.text(alphabet="a1=,. -") | st.text())
def test_arbitrary_settings_text_is_parsed_or_rejected(text: str) -> None:
    try:
        args, kwargs = Spec("x", text).settings()
    except ConfigError:
        return
    assert len(args) + len(kwargs) <= text.count(",") + 1


def test_settings_method_combines_settings_with_options() -> None:
    assert Spec.parse("x:1,b=two#c=[3, 4]").settings() == ([1], {"b": "two", "c": [3, 4]})
    with pytest.raises(ConfigError, match="'b' is set twice"):
        Spec.parse("x:b=1#b=2").settings()


def test_registered_name_takes_precedence_over_a_file() -> None:
    registry = Registry("part", "no.such.group", {"judge": dict})
    assert registry.parse("judge:my.py:make") == Spec("judge", "my.py:make")
    assert registry.parse("other:my.py:make") == Spec("make", file="other:my.py")


LOADERS: dict[str, Callable[[str], object]] = {
    "planner": search.load_planner,
    "critic": load_critic,
    "policy": load_policy,
    "task": mas_gym.load_task,
    "grader": lambda spec: mas_gym.load_task("arithmetic", grader=spec),
}


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("spec", HOSTILE_SPECS, ids=lambda spec: repr(spec[:12]))
def test_hostile_specs_raise_short_printable_errors(kind: str, spec: str) -> None:
    with pytest.raises(MASGymError) as caught:
        LOADERS[kind](spec)
    text = str(caught.value).replace(spec, "")
    assert len(text) < 700 and "\x00" not in text and "\x1b" not in text


def test_file_without_public_names_is_reported(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("_hidden = 1\n", encoding="utf-8")
    with pytest.raises(UnknownNameError, match=r"empty\.py: 'Mine'; there are none$"):
        search.load_planner(f"{tmp_path / 'empty.py'}:Mine")


@pytest.mark.parametrize("kind", LOADERS)
def test_unknown_name_error_suggests_a_file_or_a_registration(kind: str) -> None:
    group = {"policy": "policies"}.get(kind, f"{kind}s")
    with pytest.raises(UnknownNameError, match=rf"write FILE\.py:NAME or register .* mas_gym\.{group}"):
        LOADERS[kind]("nonsense")


# ---- names of packages

PACKAGE = """
import search
from mas_gym.policies import ScriptedPolicy
from mas_gym.tasks import Problem, ProblemTask


def planner(width=1, *, deep=False):
    made = search.BestOfN(width)
    made.__dict__["deep"] = deep
    return made


class Critic(search.Critic):
    def __init__(self, argument, *, weight=1.0):
        self.argument, self.weight = argument, weight

    def score(self, contexts):
        return [self.weight] * len(contexts)


def policy(argument, *, loud=False):
    return ScriptedPolicy(lambda request, seed: argument.upper() if loud else argument, name="said")


def task(split, *, size=2):
    return ProblemTask.of([Problem(f"p{i}", f"{i} + 0?", str(i)) for i in range(size)], split=split, mas="single")


def no_task(split):
    return 3


def grade(problem, text):
    return text == "graded"


class Tolerant:
    def __init__(self, answer="graded"):
        self.answer = answer

    def __call__(self, problem, text):
        return text == self.answer


async def program(question, client):
    reply = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": question}])
    return reply.choices[0].message.content
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "extra_parts.py").write_text(PACKAGE)
    info = tmp_path / "extra_parts-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: extra-parts\nVersion: 1\n")
    points = {
        "planners": ["extra = extra_parts:planner"],
        "critics": ["extra = extra_parts:Critic"],
        "policies": ["extra = extra_parts:policy"],
        "tasks": ["extra = extra_parts:task"],
        "graders": ["extra = extra_parts:grade", "tolerant = extra_parts:Tolerant"],
        "programs": ["extra = extra_parts:program"],
    }
    lines = [
        line for group, own in points.items() for line in (f"[mas_gym.{group}]", *own, "broken = no_such_module:x")
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield


@pytest.mark.usefixtures("package")
def test_package_components_load_by_name_with_settings_and_options() -> None:
    assert all({"extra", "broken"} <= set(known()) for known in (known_critics, known_policies))
    assert search.load_planner("extra:3").n == 3  # type: ignore[attr-defined]
    assert search.load_planner("extra:width=4#deep=true").deep  # type: ignore[attr-defined]
    critic: Any = load_critic("extra:some/model#weight=0.5")
    assert (critic.argument, critic.weight) == ("some/model", 0.5)
    assert load_policy("extra:hello#loud=true").name == "said"
    task = mas_gym.load_task("extra:size=3", split="dev")
    assert (len(task), task.split, mas_gym.MASEnv("extra").mas.name) == (3, "dev", "single")
    assert len(mas_gym.load_task("extra", size=5, limit=3)) == 3
    with pytest.raises(ConfigError, match="task 'extra': got an unexpected keyword argument 'color'"):
        mas_gym.load_task("extra", color=1)


@pytest.mark.slow
@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("spec", "answer"), [("extra", "graded"), ("tolerant", "graded"), ("tolerant:answer=7x", "7x")]
)
def test_package_graders_are_loaded_by_name(spec: str, answer: str) -> None:
    task = mas_gym.load_task("extra", grader=spec)
    assert task.grade(task[0], answer).correct and not task.grade(task[0], "else").correct
    assert identity_of(make_grader(spec, task.grader))["identity"]["code"]  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_package_programs_run_by_name() -> None:
    program = load_program("extra")
    assert program.source.name == "extra"
    policy = ScriptedPolicy(lambda request, seed: "Final Answer: 1")
    plans = list(search.run("sc:2", mas_gym.load_task("extra"), program="extra", policy=policy))
    assert [(plan.answer, plan.error) for plan in plans] == [("1", None)] * 2
    with pytest.raises(ConfigError, match="without settings"):
        load_program("extra:3")


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("kind", LOADERS)
def test_import_error_names_the_plugin_and_the_missing_module(kind: str) -> None:
    with pytest.raises(
        MissingDependencyError, match=f"{kind} 'broken' cannot be imported: No module named 'no_such_module'"
    ):
        LOADERS[kind]("broken")


@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_package_components_work_on_the_command_line(tmp_path: Path) -> None:
    words = ["eval", "--task", "extra", "--planner", "extra:2", "--critic", "extra:x", "--policy", "extra:graded"]
    words += ["--grader", "extra", "--json", str(tmp_path / "out.json")]
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(app, words)
    assert shown.exit_code == 0, shown.output
    [row] = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert (row["hit@1"], row["failed"]) == (1.0, 0)


def test_task_from_a_file_is_loaded_with_its_settings(tmp_path: Path) -> None:
    file = tmp_path / "my.py"
    file.write_text(textwrap.dedent(PACKAGE))
    task = mas_gym.load_task(f"{file}:task:size=3", split="train")
    assert (len(task), task.split) == (3, "train")
    with pytest.raises(ConfigError, match=re.escape("expected task(split, *, size=2)")):
        mas_gym.load_task(f"{file}:task:sise=3")
    with pytest.raises(ConfigError, match="expected a task's name or an object with"):
        mas_gym.load_task(f"{file}:no_task")


def test_shipped_task_accepts_settings_in_its_spec() -> None:
    named, given = (
        mas_gym.load_task("arithmetic:difficulty=5,seed=3"),
        mas_gym.load_task("arithmetic", difficulty=5, seed=3),
    )
    assert named[0] == given[0] and identity_of(named) == identity_of(given)
    assert mas_gym.MASEnv("ordering:difficulty=2").mas.name == "logic"
    with pytest.raises(ConfigError, match="settings among difficulty, seed, size, got grading"):
        mas_gym.load_task("arithmetic:grading=paper")


def test_values_of_options_are_numbers_in_each_notation() -> None:
    pairs = ["learning-rate=2e-4", "rate=1e-5", "difficulty=3", "nf4=false", "name='1e3'", "word=e5"]
    expected = {"learning_rate": 2e-4, "rate": 1e-5, "difficulty": 3, "nf4": False, "name": "1e3", "word": "e5"}
    assert read_pairs(pairs) == expected
