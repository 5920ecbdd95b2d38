"""Identity: it contains everything that determines a result; objects without an identity are rejected by their path."""

from __future__ import annotations

import functools
import importlib
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import search
from mas_gym.errors import IdentityError
from mas_gym.internal.identity import digest_of, identity_of
from mas_gym.policies import ScriptedPolicy, load_policy
from mas_gym.tasks.base import Problem
from search import MCTS


class Mode(Enum):
    WIDE = 8
    NARROW = 1


@dataclass(frozen=True)
class Inner:
    width: int
    mode: Mode = Mode.WIDE


@dataclass(frozen=True)
class Outer:
    parts: tuple[Inner, ...]
    options: dict[Any, Any] = field(default_factory=dict)


class Plain:
    def __init__(self, widths: Any) -> None:
        self.widths = widths


class Stating:
    def __init__(self, *parts: Any) -> None:
        self.parts, self.lock = parts, threading.Lock()

    def identity(self) -> Any:
        return {"parts": self.parts}


def base(value: Any) -> int:
    return int(value) + 1


class Stateless:
    pass


class Other:
    pass


class Revised:
    def __init__(self, revision: int) -> None:
        self.revision, self.calls = revision, threading.Lock()


def revised_closure(k: int) -> Any:
    def inner(x: int) -> int:
        return x + k

    inner.revision = k  # type: ignore[attr-defined]
    return inner


def makes_a_class(k: Any) -> Any:
    class Planner:
        def plan(self) -> Any:
            return k

    return Planner()


DIFFERENT = {
    "int and float": (1, 1.0),
    "int and bool": (1, True),
    "text and number": ("1", 1),
    "no number and its text": (math.nan, "nan"),
    "infinities": (math.inf, -math.inf),
    "bytes": (b"a", b"b"),
    "bytes and text": (b"a", "a"),
    "paths": (Path("a"), "a"),
    "enums": (Mode.WIDE, Mode.NARROW),
    "lists": ([1, 2], [2, 1]),
    "nesting": ([[1], 2], [1, [2]]),
    "keys of two types": ({1: "a"}, {"1": "a"}),
    "odd keys": ({(1, 2): "a", None: 1}, {(1, 3): "a", None: 1}),
    "a set and a mapping": ({1}, {"set": [1]}),
    "a path and a mapping": (Path("a"), {"path": "a"}),
    "an enum and a mapping": (Mode.WIDE, {"class": "Mode", "name": "WIDE", "value": 8}),
    "dataclasses": (Inner(1), Inner(8)),
    "nested dataclasses": (Outer((Inner(1), Inner(2))), Outer((Inner(1), Inner(3)))),
    "a dataclass's mapping": (Outer((), {"a": Inner(1)}), Outer((), {"a": Inner(1, Mode.NARROW)})),
    "planners": (MCTS(8, 3), MCTS(8, 4)),
    "members of one that states itself": (Stating(Inner(1)), Stating(Inner(2))),
    "classes without state": (Stateless(), Other()),
    "revisions of objects": (Revised(1), Revised(2)),
    "revisions of closures": (revised_closure(1), revised_closure(2)),
    "methods": (Inner(1).__repr__, Inner(2).__repr__),
    "numbers of NumPy": (np.int64(1), np.float32(1.5)),
    "lambdas": (lambda x: x + 1, lambda x: x + 2),
    "lambdas of one line": tuple([lambda x: x + 1, lambda x: x + 2]),
    "nested lambdas of one line": (lambda x: lambda y: y, (lambda x: lambda y: y)(1)),
    "partials": (functools.partial(base, 1), functools.partial(base, 2)),
    "keywords of partials": (functools.partial(int, base=2), functools.partial(int, base=8)),
    "builtins": (len, max),
    "types": (int, float),
    "scripted policies": (ScriptedPolicy(lambda r, s: "a"), ScriptedPolicy(lambda r, s: "b")),
}


@pytest.mark.parametrize("pair", DIFFERENT.values(), ids=DIFFERENT)
def test_identity_differs_for_different_behavior(pair: tuple[Any, Any]) -> None:
    first, second = map(identity_of, pair)
    assert digest_of(first) != digest_of(second)
    assert [digest_of(identity_of(part)) for part in pair] == [digest_of(first), digest_of(second)]


EQUAL = {
    "order of keys": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "order of a set": ({"a", "b", "c"}, {"c", "b", "a"}),
    "two instances": (Outer((), {1: 2}), Outer((), {1: 2})),
    "two of a revision": (Revised(1), Revised(1)),
    "tuple and list": ((1, 2), [1, 2]),
    "two closures": (revised_closure(1), revised_closure(1)),
    "numbers of NumPy": (np.int64(1), 1),
    "what is left out": (Stating(1), Stating(1)),
}


@pytest.mark.parametrize("pair", EQUAL.values(), ids=EQUAL)
def test_identity_is_equal_for_equal_behavior(pair: tuple[Any, Any]) -> None:
    first, second = map(identity_of, pair)
    assert digest_of(first) == digest_of(second)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=6) | st.sampled_from(["set", "class", "bytes"]), inner, max_size=3)
        | st.dictionaries(st.integers() | st.text(), inner, max_size=3)
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(repr(a) == repr(b))


@given(VALUES, VALUES)
def test_identities_are_equal_if_and_only_if_values_are_equal(a: Any, b: Any) -> None:
    assert (digest_of(identity_of(a)) == digest_of(identity_of(b))) is same(a, b)


# ---- source of users' code

MODULE = """
import functools
import helper
from helper import other
LIMITS = {limits}

def plain(x):
    return helper.step(x)

def imported(x):
    return other(x)

def constant(x):
    return LIMITS[x]

@functools.lru_cache
def cached(x):
    return helper.step(x)

class Planner:
    '''A planner.'''
    bound = {bound}
    def plan(self, model, root, rng):
        return self._go(x for x in range(3))
    def _go(self, xs):
        return [helper.step(x) for x in xs]

class Derived(Planner):
    pass

class Lazy:
    @functools.cached_property
    def table(self):
        return helper.step(1)
    @property
    def depth(self):
        return other(2)
"""
HELPER = """
def step(x):
    return x + {step}

def other(x):
    return deeper(x)

def deeper(x):
    return x * {deep}
"""


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    monkeypatch.syspath_prepend(tmp_path)

    def forget() -> None:
        for name in ("mine", "helper"):
            sys.modules.pop(name, None)

    def load(limits: Any = (1, 2), bound: int = 4, step: int = 1, deep: int = 2) -> Any:
        (tmp_path / "mine.py").write_text(MODULE.format(limits=limits, bound=bound))
        (tmp_path / "helper.py").write_text(HELPER.format(step=step, deep=deep))
        forget()
        importlib.invalidate_caches()
        sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
        try:
            return importlib.import_module("mine")
        finally:
            sys.dont_write_bytecode = before

    yield load
    forget()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("plain", {"step": 2}),
        ("imported", {"deep": 3}),
        ("constant", {"limits": (1, 3)}),
        ("cached", {"step": 2}),
        ("Planner", {"step": 2}),
        ("Planner", {"bound": 5}),
        ("Derived", {"step": 2}),
        ("Derived", {"bound": 5}),
        ("Lazy", {"step": 2}),
        ("Lazy", {"deep": 3}),
    ],
)
def test_changed_code_changes_the_identity(users: Any, name: str, change: dict[str, Any]) -> None:
    def stated(**settings: Any) -> str:
        part = getattr(users(**settings), name)
        return digest_of(identity_of(part() if isinstance(part, type) else part))

    before = stated()
    assert stated() == before
    assert stated(**change) != before
    assert stated() == before


PRINTS = """
import sys
sys.path.insert(0, {tests!r})
from mas_gym.internal.identity import digest_of, identity_of
import test_identity
parts = [test_identity.DIFFERENT["scripted policies"][0], {{"a", "b", "c"}}, test_identity.Revised(1)]
print(digest_of(identity_of(parts)))
"""


def test_identity_is_equal_in_every_process() -> None:
    code = PRINTS.format(tests=str(Path(__file__).parent))
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1


# ---- rejected objects


def loop() -> Any:
    part: list[Any] = []
    part.append(part)
    return part


def typed() -> Any:
    names: dict[str, Any] = {"__name__": "typed_by_hand"}
    exec("def f(x):\n    return x + 1", names)
    return names["f"]


class Raising:
    def identity(self) -> Any:
        raise ValueError("no model is loaded")


REFUSED = {
    "attributes": (Stating(Plain(1)), r"Stating\.identity\(\)\['parts'\]\[0\]: .*Plain with state; .*revision"),
    "a lock": ([1, threading.Lock()], r"list\[1\]: .*_thread\.lock with state"),
    "a generator": (Outer((), {"g": (x for x in [])}), r"Outer\.options\['g'\]: .*generator with state"),
    "a module": (functools.partial(base, math), r"partial\.args\[0\]: .*module with state"),
    "an array": (Outer((), {"a": np.zeros(3)}), r"Outer\.options\['a'\]: .*ndarray with state"),
    "a closure": ((lambda k: lambda: k)(1), r"captured values, got .*<lambda> \(k\); set its attribute revision"),
    "default values": (lambda x, k=1: x + k, r"got .*<lambda> \(default values\)"),
    "a local class": (makes_a_class(1), r"at the top level of its file, got .*makes_a_class\.<locals>\.Planner"),
    "code without a file": (typed(), r"expected code in a file, got typed_by_hand\.f without one"),
    "a method of a builtin object": ([1].append, r"method with state"),
    "a cycle": (loop(), r"list contains itself"),
    "one that fails": ([Raising()], r"list\[0\]\.identity\(\) raised ValueError: no model is loaded"),
}


@pytest.mark.parametrize(("part", "message"), REFUSED.values(), ids=REFUSED)
def test_identity_error_names_the_attribute_path(part: Any, message: str) -> None:
    with pytest.raises(IdentityError, match=message):
        identity_of(part)


# ---- installed distributions, in any folder

WIDGETS = """
class Graph:
    def __init__(self):
        self.nodes, self.ids = {}, {id(self), id(type(self))}
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Graph
"""
AGENTS = """
import os
import widgets
from prompts import PLAN

GRAPH = widgets.Graph()
MODEL = os.environ.get("MODEL", "small")
CACHE = {}

class Node(widgets.Graph):
    graph = GRAPH
    make = widgets.Graph().anything

def solve(question, client):
    CACHE[question] = MODEL, GRAPH, Node
    messages = [{"role": "user", "content": PLAN + question}]
    return client.chat.completions.create(model="m", messages=messages).choices[0].message.content

solve.revision = MODEL
"""
SEARCHES = """
import site, sys
site.addsitedir(sys.argv[1])
import search
from mas_gym.policies import ScriptedPolicy
from mas_gym.programs import Program
from mas_gym.tasks.base import Problem

policy = ScriptedPolicy(lambda request, seed: f"Final Answer: {seed % 3}")
program = Program("agents.py:solve", agents=["Agent"])
plans = search.run("sc:3", [Problem("a", "What?", "1")], program=program, policy=policy, store="runs.db")
assert list(plans)[0].error is None
print(plans.usage.agent_calls)
"""


def install(folder: Path, code: str, version: str, record: bool = True) -> None:
    """Put a distribution of one package into a folder, as installers do."""
    info = folder / "widgets_dist.dist-info"
    for path in (folder / "widgets", info):
        path.mkdir(parents=True, exist_ok=True)
    (folder / "widgets" / "__init__.py").write_text(code)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: widgets-dist\nVersion: {version}\n")
    if record:
        (info / "RECORD").write_text("widgets/__init__.py,,\nwidgets_dist.dist-info/METADATA,,\n")
    else:
        (info / "top_level.txt").write_text("widgets\n")


@pytest.mark.parametrize("where", ["PYTHONPATH", "a .pth file", "without a record"])
def test_stored_searches_are_reused_with_an_overlay_install(tmp_path: Path, where: str) -> None:
    folder, sites = tmp_path / "overlay" / "site-packages", tmp_path / "sites"
    install(folder, WIDGETS, "1.0", record=where != "without a record")
    sites.mkdir()
    (sites / "overlay.pth").write_text("" if where == "PYTHONPATH" else f"{folder}\n")
    (tmp_path / "agents.py").write_text(AGENTS)
    (tmp_path / "prompts.py").write_text("PLAN = 'Plan: '")
    (tmp_path / "start.py").write_text(SEARCHES)
    path = [str(Path(__file__).parents[1]), *([str(folder)] if where == "PYTHONPATH" else [])]

    def searched(**environment: str) -> tuple[int, str]:
        run = subprocess.run(
            [sys.executable, "-B", "start.py", str(sites)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr
        return int(run.stdout), run.stderr

    assert searched(PYTHONHASHSEED="1") == (3, "")
    assert searched(PYTHONHASHSEED="2") == (0, "")
    if where != "PYTHONPATH":
        return
    install(folder, WIDGETS + "\nEDITED = 1\n", "1.0")
    assert searched() == (0, "")
    calls, said = searched(MODEL="large")
    assert calls == 3 and "revision was 'small', now 'large'" in said
    (tmp_path / "prompts.py").write_text("PLAN = 'Plan it: '")
    calls, said = searched()
    assert calls == 3 and said.endswith("because the program's file prompts.py changed\n")
    install(folder, WIDGETS, "1.1")
    calls, said = searched()
    assert calls == 3 and said.endswith("because the program's package widgets-dist was '1.0', now '1.1'\n")


def test_editable_install_is_identified_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site-packages", "", "1.0")
    (tmp_path / "site-packages" / "widgets" / "__init__.py").unlink()
    (tmp_path / "site-packages" / "widgets").rmdir()
    record = tmp_path / "site-packages" / "widgets_dist.dist-info" / "RECORD"
    record.write_text("__editable__.widgets.pth,,\nwidgets_dist.dist-info/METADATA,,\n")
    source = tmp_path / "project"
    (source / "widgets_dev").mkdir(parents=True)
    (source / "widgets_dist.egg-info").mkdir()
    (source / "widgets_dist.egg-info" / "PKG-INFO").write_text("Name: widgets-dist\nVersion: 1.0\n")
    (source / "widgets_dist.egg-info" / "top_level.txt").write_text("widgets_dev\n")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    monkeypatch.syspath_prepend(source)
    found = []
    for bound in (1, 1, 2):
        (source / "widgets_dev" / "__init__.py").write_text("from .inner import Wide")
        (source / "widgets_dev" / "inner.py").write_text(f"class Wide:\n    bound = {bound}\n")
        importlib.invalidate_caches()
        found.append(identity_of(importlib.import_module("widgets_dev").Wide()))
        for name in ("widgets_dev", "widgets_dev.inner"):
            monkeypatch.delitem(sys.modules, name)
    assert found[0] == found[1] != found[2]
    assert found[0]["files"].keys() == {"widgets_dev/__init__.py", "widgets_dev/inner.py"}
    assert "packages" not in found[0]


def test_identity_of_an_installed_class_names_its_distribution() -> None:
    stated = identity_of(np.ndarray)
    assert stated["packages"] == {"numpy": np.__version__}


def test_lazy_import_does_not_change_the_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lazy_part.py").write_text("def plan():\n    import lazy_other\n    return lazy_other.plan()\n")
    other = tmp_path / "lazy_other.py"
    other.write_text("SIZE = len('four')\ndef plan():\n    return SIZE\n")
    plan = importlib.import_module("lazy_part").plan
    before = identity_of(plan)
    assert plan() == 4 and identity_of(plan) == before
    other.write_text("SIZE = 5\n")
    assert identity_of(plan) != before
    for name in ("lazy_part", "lazy_other"):
        monkeypatch.delitem(sys.modules, name)


COUNTING = """
from mas_gym.policies import ScriptedPolicy
calls = []

class Counting:
    name, max_batch = "counting", 8
    def __init__(self, answer):
        self.answer, self.calls = answer, []
    def sample(self, requests):
        calls.append(len(requests))
        self.calls.append(len(requests))
        return ScriptedPolicy(lambda request, seed: f"Final Answer: {self.answer}").sample(requests)

def make(answer):
    def script(request, seed):
        calls.append(1)
        return f"Final Answer: {answer}"
    return ScriptedPolicy(script)
"""


@pytest.mark.parametrize("name", ["Counting", "make"])
def test_policy_that_counts_its_calls_in_a_module_variable_resumes(tmp_path: Path, name: str) -> None:
    file = tmp_path / "counting.py"
    file.write_text(COUNTING)

    def calls(answer: int, count: int) -> int:
        problems = [Problem(str(number), f"{number}?", "1") for number in range(count)]
        policy = load_policy(f"{file}:{name}:{answer}")
        plans = search.run("sc:2", problems, mas="single", policy=policy, store=tmp_path / "runs.db")
        assert {plan.answer for plan in plans} == {str(answer)}
        return plans.usage.agent_calls

    assert [calls(1, 2), calls(1, 3), calls(2, 3), calls(1, 3)] == [4, 2, 6, 0]
    file.write_text(COUNTING + "\n# edited\n")
    assert calls(1, 3) == 6
