"""The rooms and their arrows: who may import whom, and how large a file may grow."""

import ast
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("mas_gym", "search", "rewardmodels")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@cache
def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
    return names


def tops(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported(path)}


FRONT_DOORS = tuple(ROOT / "mas_gym" / name for name in ("cli", "service", "report"))


def is_front_door(path: Path) -> bool:
    return any(door in path.parents for door in FRONT_DOORS)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_arrows_point_down(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    if package == "mas_gym" and not is_front_door(path):
        assert not tops(path) & {"search", "rewardmodels"}
    if package == "search":
        assert not tops(path) & {"torch", "transformers", "rewardmodels"}
    if not is_front_door(path):
        assert not any(name.startswith("search.service") for name in imported(path))


def test_nothing_imports_the_command_line() -> None:
    scripts = [path for folder in ("benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")]
    assert len(scripts) > 20
    importers = [
        str(path.relative_to(ROOT))
        for path in [*FILES, *scripts]
        if FRONT_DOORS[0] not in path.parents and any(name.startswith("mas_gym.cli") for name in imported(path))
    ]
    assert not importers


FLOORS = [
    "mas_gym",
    "mas_gym.tiny",
    "mas_gym.tasks",
    "mas_gym.policies",
    "mas_gym.tasks.grading.judge",
    "mas_gym.tasks.catalogue",
    "mas_gym.envs.env",
    "mas_gym.programs",
    "mas_gym.critics",
    "mas_gym.envs.batching",
    "mas_gym.envs.wrappers",
    "mas_gym.envs.aec",
    "mas_gym.envs.vector",
    "mas_gym.envs.sb3",
    "mas_gym.testing",
    "search",
    "search.planners",
    "search.setup",
    "search.store",
    "search.engine",
    "search.compare",
    "rewardmodels.data",
    "rewardmodels.model",
    "rewardmodels.training",
    "rewardmodels.verifiers",
    "rewardmodels",
    "search.pages",
    "search.service",
    "mas_gym.cli",
]
"""From the ground up: a module imports from its own floor and from those below."""


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


@cache
def modules_imported(path: Path) -> set[str]:
    """Return the project's modules that a file imports anywhere, for type checking too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update(name if name in MODULES else node.module for name in names)
    return (found & set(MODULES)) - {module_of(path)}


def floor(module: str) -> int:
    return max((len(name), i) for i, name in enumerate(FLOORS) if module == name or module.startswith(name + "."))[1]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nobody_imports_from_a_floor_above(path: Path) -> None:
    module = module_of(path)
    # A package's __init__ is its front, and may show whatever the package holds.
    own = f"{module}." if path.name == "__init__.py" else "nothing"
    above = {name for name in modules_imported(path) if floor(name) > floor(module) and not name.startswith(own)}
    assert not above


def test_no_import_circle() -> None:
    left = {module: modules_imported(path) for module, path in MODULES.items()}
    while free := [module for module, imports in left.items() if not imports & set(left)]:
        for module in free:
            del left[module]
    assert not {module: imports & set(left) for module, imports in left.items()}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 600
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or node.lineno) - node.lineno <= 62, f"{node.name} at line {node.lineno}"


@pytest.mark.parametrize("package", ["mas_gym", "search", "mas_gym.cli"])
def test_importing_needs_no_torch(package: str) -> None:
    heavy = "{'torch', 'transformers', 'datasets', 'matplotlib', 'sympy'}"
    code = f"import sys, {package}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def absent_without_extras() -> list[str]:
    """Return the top-level modules here that `pip install mas-gym` alone does not bring."""
    brought, waiting = set(), ["mas-gym"]
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name not in brought:
            brought.add(name)
            needed = [Requirement(line) for line in metadata.requires(name) or []]
            waiting += [one.name for one in needed if not one.marker or one.marker.evaluate({"extra": ""})]
    return [
        module
        for module, owners in metadata.packages_distributions().items()
        if module.isidentifier() and not {canonicalize_name(owner) for owner in owners} & brought
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    ["--help", "envs", "critics", "policies", "planners", "tasks", "demo -n 1", "eval -n 1", "critics --help"],
)
def test_without_extras_commands_run_or_say_what_to_install(words: str, tmp_path: Path) -> None:
    absent = absent_without_extras()
    assert {"torch", "transformers", "pytest"} <= set(absent)
    code = (
        f"import sys\nsys.modules.update(dict.fromkeys({absent!r}))\n"
        f"from mas_gym.cli import main\nsys.argv[1:] = {words.split()!r}\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    shown = done.stdout + done.stderr
    assert "Traceback" not in shown
    assert done.returncode == 0 or "pip install 'mas-gym[" in " ".join(shown.replace("│", "").split())


def test_a_critic_is_described_without_torch() -> None:
    code = (
        "import sys\n"
        "from rewardmodels import load_critic\n"
        "found = load_critic('ensemble:tiny-masprm,tiny-masprm', lazy=True)\n"
        "print(found.name, found.terminal_only, 'torch' in sys.modules, 'transformers' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["masprm+masprm", "False", "False", "False"]


def test_no_unsafe_loading() -> None:
    unsafe = {"eval", "exec", "pickle.load", "pickle.loads", "yaml.load", "yaml.unsafe_load", "marshal.loads"}
    # The process in the sandbox runs code by design.
    sandbox = ("mas_gym/tasks/grading/code_runner.py", "exec")
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and (path.relative_to(ROOT).as_posix(), ast.unparse(node.func)) != sandbox:
                assert ast.unparse(node.func) not in unsafe, f"{path.relative_to(ROOT)}:{node.lineno}"
