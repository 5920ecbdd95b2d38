"""Find the file, the distribution and the imports of a module without importing it."""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, lru_cache
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import NamedTuple

STANDARD = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
_NAMES = (ast.Name, ast.Attribute)
_SCRIPT = "__name__ == '__main__'"


def shown_file(module: str, file: str) -> str:
    """Return a file's path relative to the folder that it is imported from."""
    path = Path(file)
    parts = module.split(".")
    return "/".join([*(parts if path.stem == "__init__" else parts[:-1]), path.name])


def file_of(module: str) -> str | None:
    """Return a module's file without importing it; None if it has no file."""
    loaded = sys.modules.get(module)
    if loaded is not None:
        file = getattr(loaded, "__file__", None)
        return os.path.abspath(file) if isinstance(file, str) and os.path.isfile(file) else None
    spec = _spec_of(module)
    return spec.origin if spec is not None and spec.has_location and spec.origin else None


def _spec_of(module: str) -> ModuleSpec | None:
    """Find a module as an import would, but without importing its packages."""
    package = module.rpartition(".")[0]
    folders = None
    if package:
        if (loaded := sys.modules.get(package)) is not None:
            folders = vars(loaded).get("__path__")
        elif (above := _spec_of(package)) is not None:
            folders = above.submodule_search_locations
        if folders is None:
            return None
    for finder in sys.meta_path:
        if module and (spec := finder.find_spec(module, folders)) is not None:
            return spec
    return None


def is_standard(module: str, file: str | None) -> bool:
    """Whether a module is part of the standard library; a user's file may have the same name."""
    known = module.partition(".")[0] in sys.stdlib_module_names
    return known and (file is None or file.startswith(STANDARD))


def distributions_of(file: str) -> dict[str, str]:
    """Return the versions of the installed distributions, in any location, that a file belongs to.

    A distribution that is installed in editable mode does not list its code, so this code counts as user code.
    """
    for folder in Path(file).parents:
        top = file[len(str(folder)) :].strip(os.sep).split(os.sep)[0]
        found = _recorded(str(folder)).get(top)
        if found:
            return {str(dist.name): str(dist.version) for dist in found}
    return {}


@cache
def _recorded(folder: str) -> dict[str, list[metadata.Distribution]]:
    """Return the distributions installed in a folder, keyed by the files and folders that they installed there."""
    found: dict[str, list[metadata.Distribution]] = {}
    for dist in metadata.distributions(path=[folder]):
        record = dist.read_text("RECORD")
        if record is not None:
            tops = {line.partition(",")[0].strip('"').partition("/")[0] for line in record.splitlines()}
        elif os.path.basename(folder) in ("site-packages", "dist-packages"):
            # Packages of the operating system have no record.
            names = (dist.read_text("top_level.txt") or str(dist.name).replace("-", "_")).split()
            tops = {*names, *(f"{name}.py" for name in names)}
        else:
            tops = set()
        for top in tops - {"..", "__pycache__"}:
            found.setdefault(top, []).append(dist)
    return found


class Import(NamedTuple):
    """An import: its level if it is relative, its module, and the imported names."""

    level: int
    module: str
    names: tuple[str, ...]


class Code(NamedTuple):
    """Facts about the code of a file.

    Attributes:
        imports: Its imports.
        later: The imports that might not run: those in functions and under conditions.
        used: The names that its functions use.
        literals: The variables with literal values.
        script: The lines under ``if __name__ == "__main__":``.
    """

    imports: frozenset[Import] = frozenset()
    later: frozenset[Import] = frozenset()
    used: frozenset[str] = frozenset()
    literals: Mapping[str, object] = types.MappingProxyType({})
    script: frozenset[int] = frozenset()

    @staticmethod
    def imported(module: str, file: str, imports: Iterable[Import]) -> Iterator[str]:
        """Yield the modules that a module imports, and the names imported from them, which may also be modules."""
        package = module if Path(file).stem == "__init__" else module.rpartition(".")[0]
        for level, name, names in imports:
            above = ".".join(package.split(".")[: len(package.split(".")) - level + 1]) if level else ""
            base = ".".join(filter(None, (above, name)))
            yield base
            yield from (f"{base}.{part}" for part in names)


NO_CODE = Code()


@lru_cache(maxsize=1024)
def parse_source(content: bytes) -> Code:
    """Parse a file; the result is empty if the content is not valid Python."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError):
        return NO_CODE
    scripts = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == _SCRIPT]
    script = {line for node in scripts for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    tree.body = [node for node in tree.body if node not in scripts]
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    ]
    unsure = [node for node in ast.walk(tree) if isinstance(node, ast.If | ast.Try)]
    within = {inner for node in functions for inner in ast.walk(node)}
    used = {node.id if isinstance(node, ast.Name) else node.attr for node in within if isinstance(node, _NAMES)}
    later = {found for node in (*functions, *unsure) for inner in ast.walk(node) for found in _imports(inner)}
    imports = {found for node in ast.walk(tree) for found in _imports(node)} - later
    return Code(frozenset(imports), frozenset(later), frozenset(used), dict(_literals(tree)), frozenset(script))


def _imports(node: ast.AST) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(0, alias.name, ()) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield Import(node.level, node.module or "", tuple(alias.name for alias in node.names))


def _literals(tree: ast.Module) -> Iterator[tuple[str, object]]:
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        with suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            value = ast.literal_eval(node.value)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((target.id, value) for target in targets if isinstance(target, ast.Name))
