"""Allowed imports between packages, and the cost of an import."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from importlib import import_module, metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import search
from mas_gym.internal.lazy import public_imports
from mas_gym.policies import ScriptedPolicy
from mas_gym.tasks import Problem

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


def test_nothing_imports_the_command_line() -> None:
    scripts = [path for folder in ("benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")]
    assert len(scripts) > 20
    importers = [
        str(path.relative_to(ROOT))
        for path in [*FILES, *scripts]
        if ROOT / "mas_gym" / "cli" not in path.parents
        and any(name.startswith("mas_gym.cli") for name in imported(path))
    ]
    assert not importers


ORDER = [
    "mas_gym.errors",
    "mas_gym.internal",
    "mas_gym.systems",
    "mas_gym.plugins",
    "mas_gym.tiny",
    "mas_gym.policies",
    "mas_gym.tasks",
    "mas_gym.logs",
    "mas_gym.critics",
    "mas_gym.envs",
    "mas_gym.programs",
    "mas_gym.testing",
    "mas_gym",
    "search.costs",
    "search.tree",
    "search.plan",
    "search.pages",
    "search.progress",
    "search.credit",
    "search.grading",
    "search.prices",
    "search.protocol",
    "search.critics",
    "search.calibrated_critics",
    "search.planners",
    "search.option_rules",
    "search.setup",
    "search.models",
    "search.results",
    "search.store",
    "search.engine",
    "search.tracing",
    "search.runs",
    "search.engine.ray_actors",
    "search.critic_registry",
    "search.compare",
    "search",
    "search.report",
    "search.service",
    "rewardmodels.data",
    "rewardmodels.model",
    "rewardmodels.hub",
    "rewardmodels.tiny_critics",
    "rewardmodels.verifiers",
    "rewardmodels.training",
    "rewardmodels.agents",
    "rewardmodels",
    "mas_gym.cli",
]
"""Packages and modules, lowest first: each imports only from itself and from those before it."""


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


@cache
def modules_imported(path: Path) -> frozenset[str]:
    """Return the project's modules that a file imports: in functions, for type checking and by string too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update(name if name in MODULES else node.module for name in names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found.update(argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and ":" in node.value:
            # "package.module:attribute" names an object that is imported later.
            found.add(node.value.partition(":")[0])
    return frozenset((found & set(MODULES)) - {module_of(path)})


def place(module: str) -> int:
    fitting = [i for i, name in enumerate(ORDER) if module == name or module.startswith(name + ".")]
    return max(fitting, key=lambda i: len(ORDER[i]))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_import_only_lower_packages(path: Path) -> None:
    module = module_of(path)
    # A package's __init__ re-exports the package's names.
    own = f"{module}." if path.name == "__init__.py" else "nothing"
    above = {name for name in modules_imported(path) if place(name) > place(module) and not name.startswith(own)}
    assert not above


def test_search_does_not_import_torch() -> None:
    files = [path for path in FILES if path.is_relative_to(ROOT / "search")]
    assert files and not [path for path in files if tops(path) & {"torch", "transformers"}]


def test_modules_have_no_import_cycle() -> None:
    left = {module: modules_imported(path) for module, path in MODULES.items()}
    while free := [module for module, imports in left.items() if not imports & set(left)]:
        for module in free:
            del left[module]
    assert not {module: imports & set(left) for module, imports in left.items()}


LAZY = [
    module for module, path in MODULES.items() if public_imports(path) and hasattr(import_module(module), "__all__")
]


@pytest.mark.parametrize("package", LAZY)
def test_lazy_names_differ_from_submodules(package: str) -> None:
    # Importing a submodule sets the attribute of this name. `search` imports `search.compare` itself, before that.
    folder = ROOT.joinpath(*package.split("."))
    submodules = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    names = set(import_module(package).__all__)
    assert names & submodules == ({"compare"} if package == "search" else set())
    missing = [name for name in names if name != "TransformersPolicy" and name not in dir(import_module(package))]
    assert not missing


def test_importing_the_compare_module_does_not_replace_the_function() -> None:
    code = "import search, search.compare; from search.compare import select; print(callable(search.compare))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


@pytest.mark.parametrize("package", ["mas_gym", "search", "mas_gym.cli"])
def test_import_does_not_load_torch(package: str) -> None:
    heavy = "{'torch', 'transformers', 'datasets', 'matplotlib', 'sympy'}"
    code = f"import sys, {package}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("words", "unused"),
    [
        ("--version", "rich numpy yaml search rewardmodels mas_gym.systems mas_gym.cli.evaluate"),
        ("status RUNS", "numpy gymnasium rewardmodels search.planners search.results.summary mas_gym.cli.evaluate"),
        ("view --help", "numpy gymnasium search rewardmodels mas_gym.cli.evaluate mas_gym.cli.train"),
        ("planners", "numpy gymnasium torch rewardmodels mas_gym.cli.evaluate mas_gym.cli.train"),
    ],
)
def test_commands_import_only_required_modules(words: str, unused: str, tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    problem = Problem("p", "What is 1 + 1?", "2")
    list(search.run("single", [problem], mas="single", policy=ScriptedPolicy(lambda *_: "2"), store=store))
    code = (
        "import sys\nfrom mas_gym.cli import main\n"
        f"sys.argv[1:] = {words.replace('RUNS', str(store)).split()!r}\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        f"print(sorted(set({unused!r}.split()) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


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
def test_commands_without_extras_run_or_raise_an_error_with_the_missing_extra(words: str, tmp_path: Path) -> None:
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


def test_lazy_critic_is_described_without_importing_torch() -> None:
    code = (
        "import sys\n"
        "from rewardmodels import load_critic\n"
        "found = load_critic('ensemble:tiny-masprm,tiny-masprm', lazy=True)\n"
        "print(found.name, found.terminal_only, 'torch' in sys.modules, 'transformers' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["masprm+masprm", "False", "False", "False"]


def test_getattr_and_hasattr_are_rare() -> None:
    # Base classes declare attributes with defaults. The remaining calls inspect users' objects and other libraries.
    probes = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr")
    ]
    assert len(probes) <= 38, probes


def test_public_names_are_unique() -> None:
    # Commands have the names of the functions that they call, generators of tasks have one set of functions, and the
    # rest are entry points of processes.
    shared = {"main", "run", "serve", "__getattr__"}
    found = defaultdict(list)
    for path in FILES:
        place = path.relative_to(ROOT).as_posix()
        if place.startswith(("mas_gym/cli/", "mas_gym/tasks/procedural/")):
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_":
                found[node.name].append(place)
    twice = {name: places for name, places in found.items() if len(set(places)) > 1 and name not in shared}
    assert not twice


def annotations(path: Path) -> Iterator[ast.expr]:
    """Yield the annotations of parameters, results and variables, and the values of type aliases."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.arg) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            yield node.returns
        elif isinstance(node, ast.AnnAssign):
            yield node.annotation
            if ast.unparse(node.annotation) == "TypeAlias" and node.value is not None:
                yield node.value


def test_annotations_rarely_use_any() -> None:
    # What is left mostly passes settings on, or describes objects of other libraries and the values of JSON.
    found = [
        f"{path.relative_to(ROOT)}:{name.lineno}"
        for path in FILES
        for annotation in annotations(path)
        for name in ast.walk(annotation)
        if isinstance(name, ast.Name) and name.id == "Any"
    ]
    assert len(found) <= 333, found


def test_unsafe_loading_is_not_used() -> None:
    unsafe = {"eval", "exec", "pickle.load", "pickle.loads", "yaml.load", "yaml.unsafe_load", "marshal.loads"}
    # The process in the sandbox runs code by design.
    sandbox = ("mas_gym/tasks/grading/code_runner.py", "exec")
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and (path.relative_to(ROOT).as_posix(), ast.unparse(node.func)) != sandbox:
                assert ast.unparse(node.func) not in unsafe, f"{path.relative_to(ROOT)}:{node.lineno}"


SATELLITES = {"program", "recorded", "recording", "arm", "price", "usd", "otel", "span", "telemetry", "world", "ray"}
"""Words for features that the core must not know."""


def words_of(path: Path) -> set[str]:
    """Return the words of a module's identifiers, in the singular."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        found = [getattr(node, name, None) for name in ("id", "attr", "arg", "name", "module", "asname")]
        names.update(name for name in found if isinstance(name, str))
    return {
        word.removesuffix("s")
        for name in names
        for word in re.findall(r"[a-z]+", re.sub("([A-Z])", r"_\1", name).lower())
    }


OWN_FILES = ("search/engine/ray_actors.py", "search/planners/chosen_arms.py")

CORE = [
    path
    for path in FILES
    if re.match(
        r"search/(engine/|planners/|protocol|tree|setup|models/base)|mas_gym/systems/",
        path.relative_to(ROOT).as_posix(),
    )
    and path.relative_to(ROOT).as_posix() not in OWN_FILES
]


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(ROOT)))
def test_core_names_no_satellite(path: Path) -> None:
    assert not words_of(path) & SATELLITES
