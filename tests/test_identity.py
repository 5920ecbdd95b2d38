"""Identity: it contains everything that determines a result; objects without an identity are rejected by their path."""

from __future__ import annotations

import functools
import importlib
import math
import os
import subprocess
import sys
import threading
import types
import venv
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mas_gym.errors import IdentityError
from mas_gym.internal.identity import digest_of, identity_of
from mas_gym.internal.source_files import file_of
from mas_gym.policies import ScriptedPolicy
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


class Slotted:
    __slots__ = ("depth", "widths")

    def __init__(self, widths: Any) -> None:
        self.widths = widths


class Both(Slotted):
    def __init__(self, widths: Any, more: Any) -> None:
        super().__init__(widths)
        self.more = more


class Stating:
    def __init__(self, *parts: Any) -> None:
        self.parts, self.lock = parts, threading.Lock()

    def identity(self) -> Any:
        return {"parts": self.parts}


def base(value: Any) -> int:
    return int(value) + 1


def makes_a_class(k: Any) -> Any:
    class Planner:
        def plan(self) -> Any:
            return k

    return Planner()


def decorator(k: int) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def inner(*args: Any) -> Any:
            return function(*args) + k

        return inner

    return decorate


def changed_class(width: int) -> Any:
    class Changed:
        pass

    Changed.width = width  # type: ignore[attr-defined]
    return Changed()


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
    "arrays": (np.arange(3), np.arange(3)[::-1]),
    "types of arrays": (np.zeros(3, np.float32), np.zeros(3, np.float64)),
    "dataclasses": (Inner(1), Inner(8)),
    "nested dataclasses": (Outer((Inner(1), Inner(2))), Outer((Inner(1), Inner(3)))),
    "a dataclass's mapping": (Outer((), {"a": Inner(1)}), Outer((), {"a": Inner(1, Mode.NARROW)})),
    "planners": (MCTS(8, 3), MCTS(8, 4)),
    "plain objects": (Plain([1]), Plain([8, 8, 8, 8])),
    "plain objects in objects": (Plain(Plain([1])), Plain(Plain([2]))),
    "slots": (Slotted([1]), Slotted([8, 8, 8, 8])),
    "slots and attributes": (Both([1], 2), Both([1], 3)),
    "slots below": (Both([1], 2), Both([2], 2)),
    "classes with the same fields": (Plain([1]), Slotted([1])),
    "members of one that states itself": (Stating(Plain(1)), Stating(Plain(2))),
    "lambdas": (lambda x: x + 1, lambda x: x + 2),
    "lambdas of one line": tuple([lambda x: x + 1, lambda x: x + 2]),
    "nested lambdas of one line": (lambda x: lambda y: x + y, (lambda x: lambda y: x + y)(1)),
    "closures": tuple(map(lambda k: lambda x: x + k, (1, 2))),
    "classes made by functions": (makes_a_class(1), makes_a_class([8])),
    "classes that were changed": (changed_class(1), changed_class(8)),
    "defaults": tuple((lambda k: lambda x, k=k: x + k)(k) for k in (1, 2)),
    "partials": (functools.partial(base, 1), functools.partial(base, 2)),
    "keywords of partials": (functools.partial(int, base=2), functools.partial(int, base=8)),
    "bound methods": ([1].append, [2].append),
    "methods that are no functions": tuple(types.MethodType(functools.partial(base, k), 1) for k in (1, 2)),
    "decorated functions": (decorator(1)(base), decorator(2)(base)),
    "decorated and not": (base, decorator(0)(base)),
    "builtins": (len, max),
    "types": (int, float),
    "scripted policies": (ScriptedPolicy(lambda r, s: "a"), ScriptedPolicy(lambda r, s: "b")),
}


@pytest.mark.parametrize("pair", DIFFERENT.values(), ids=DIFFERENT)
def test_identity_differs_for_different_behaviour(pair: tuple[Any, Any]) -> None:
    first, second = map(identity_of, pair)
    assert digest_of(first) != digest_of(second)
    assert [digest_of(identity_of(part)) for part in pair] == [digest_of(first), digest_of(second)]


EQUAL = {
    "order of keys": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "order of a set": ({"a", "b", "c"}, {"c", "b", "a"}),
    "two instances": (Plain([1]), Plain([1])),
    "two of slots": (Slotted([1]), Slotted([1])),
    "tuple and list": ((1, 2), [1, 2]),
    "two closures": tuple((lambda k: lambda x: x + k)(1) for _ in range(2)),
    "what is left out": (Stating(1), Stating(1)),
}


@pytest.mark.parametrize("pair", EQUAL.values(), ids=EQUAL)
def test_identity_is_equal_for_equal_behaviour(pair: tuple[Any, Any]) -> None:
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
    def __init__(self):
        self.widths = [1]
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


def test_identity_of_recursive_code_is_defined(users: Any) -> None:
    class Node:
        def child(self) -> Any:
            return Node(), SELF, recursive

    assert digest_of(identity_of(Node())) == digest_of(identity_of(Node()))


class Itself:
    def other(self) -> Any:
        return SELF


SELF = Itself()


def recursive(n: int) -> Any:
    return recursive(n - 1) if n else SELF


def test_identity_of_code_without_a_file_is_defined() -> None:
    def typed(text: str) -> Any:
        # As at a prompt: the source is not to be had.
        names: dict[str, Any] = {"__name__": "typed_by_hand"}
        exec(text, names)
        return names["f"]

    first, second = typed("def f(x):\n    return x + 1"), typed("def f(x):\n    return x + 2")
    assert digest_of(identity_of(first)) != digest_of(identity_of(second))


PRINTS = """
import sys
sys.path.insert(0, {tests!r})
from mas_gym.internal.identity import digest_of, identity_of
names = {{"__name__": "typed_by_hand"}}
exec("def f(x):\\n    return x in {{'a', 'b', 'c', 'd'}}", names)
import test_identity
parts = [test_identity.DIFFERENT["scripted policies"][0], names["f"], {{"a", "b", "c"}}, test_identity.makes_a_class(1)]
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
    part = Plain([])
    part.widths.append(part)
    return part


def deep() -> Any:
    part: list[Any] = []
    for _ in range(100_000):
        part = [part]
    return part


class Raising:
    def identity(self) -> Any:
        raise ValueError("no model is loaded")


REFUSED = {
    "a lock": (Plain([1, threading.Lock()]), r"Plain\.widths\[1\]: .* _thread.lock"),
    "a generator": (Outer((), {"g": (x for x in [])}), r"Outer\.options\['g'\]: .* builtins.generator"),
    "a module": (functools.partial(base, math), r"partial\.args\[0\]: .* builtins.module"),
    "a closure over a lock": ((lambda lock: lambda: lock)(threading.Lock()), r"function\.closure\['lock'\]"),
    "a class over a lock": (makes_a_class(threading.Lock()), r"plan\.k: .* _thread.lock"),
    "a slot": (Slotted({3: threading.Lock()}), r"Slotted\.widths\[3\]"),
    "a cycle": (loop(), r"Plain\.widths\[0\] refers back to itself"),
    "a depth without end": (deep(), r"list is nested too deeply"),
    "one that fails": (Plain(Raising()), r"Plain\.widths\.identity\(\) raised ValueError: no model is loaded"),
    "a member of one that states itself": (Stating(threading.Lock()), r"Stating\.identity\(\)\['parts'\]\[0\]"),
}


@pytest.mark.parametrize(("part", "message"), REFUSED.values(), ids=REFUSED)
def test_identity_error_names_the_attribute_path(part: Any, message: str) -> None:
    with pytest.raises(IdentityError, match=message):
        identity_of(part)


def test_object_referenced_twice_is_not_reported_as_a_cycle() -> None:
    part = Plain([1])
    assert identity_of([part, part]) == [identity_of(part)] * 2


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
    path = [str(Path(__file__).parents[1]), *([str(folder)] if where == "PYTHONPATH" else [])]

    def searched(**environment: str) -> tuple[int, str]:
        run = subprocess.run(
            [sys.executable, "-B", "-c", SEARCHES, str(sites)],
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
    assert calls == 3 and "because the program's variable agents.py: MODEL was 'small', now 'large'" in said
    (tmp_path / "prompts.py").write_text("PLAN = 'Plan it: '")
    calls, said = searched()
    assert calls == 3 and said.endswith("because the program's file prompts.py changed\n")
    install(folder, WIDGETS, "1.1")
    calls, said = searched()
    assert calls == 3 and said.endswith("because the program's package widgets-dist was '1.0', now '1.1'\n")


def wheel(folder: Path, version: str) -> Path:
    """Build the distribution that `install` installs."""
    path = folder / f"widgets_dist-{version}-py3-none-any.whl"
    described = {
        "METADATA": f"Metadata-Version: 2.1\nName: widgets-dist\nVersion: {version}\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("widgets/__init__.py", WIDGETS)
        for name, text in described.items():
            archive.writestr(f"widgets_dist-{version}.dist-info/{name}", text)
    return path


@pytest.mark.slow
def test_stored_searches_are_reused_with_a_pip_user_install(tmp_path: Path) -> None:
    pytest.importorskip("pip", reason="pip is not installed")
    # The user's packages are not visible in an ordinary virtual environment.
    venv.create(tmp_path / "venv", system_site_packages=True)
    python = tmp_path / "venv" / "bin" / "python"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)]),
        "PYTHONUSERBASE": str(tmp_path / "user"),
    }
    (tmp_path / "agents.py").write_text(AGENTS)
    (tmp_path / "prompts.py").write_text("PLAN = 'Plan: '")

    def run(*command: object) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(list(map(str, command)), env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done

    def installed(version: str) -> None:
        pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
        run(*pip, "install", "--user", "--no-index", "--no-deps", wheel(tmp_path, version))

    def searched() -> tuple[int, str]:
        done = run(python, "-B", "-c", SEARCHES, tmp_path)
        return int(done.stdout), done.stderr

    installed("1.0")
    assert searched() == (3, "")
    assert searched() == (0, "")
    installed("1.1")
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
    stated = identity_of(np.zeros(1))
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


def test_main_block_of_a_script_does_not_change_the_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file, start = tmp_path / "script_part.py", "def plan():\n    return 1\n\nif __name__ == '__main__':\n    "
    file.write_text(start + "print(plan())\n")
    plan = importlib.import_module("script_part").plan
    before = identity_of(plan)
    file.write_text(start + "import test_identity\n    print(test_identity, plan())\n")
    assert identity_of(plan) == before
    file.write_text(start + "print(plan())\nprint(2)\n")
    assert identity_of(plan) != before
    monkeypatch.delitem(sys.modules, "script_part")


def test_file_is_read_once_for_many_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    monkeypatch.setattr(
        "mas_gym.internal.identity._content", lambda file: reads.append(file) or Path(file).read_bytes()
    )
    identity_of([Inner(i) for i in range(100)])
    assert len(reads) == len(set(reads)) > 0


def test_file_of_returns_none_for_a_package_that_is_not_installed() -> None:
    assert file_of("no_such_package.part") is None
    assert file_of("email.mime.text") is not None
