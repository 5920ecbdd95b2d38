"""Deferred imports of a package's public names, and hooks that run when another library is imported."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return a package's ``__getattr__`` and ``__dir__`` (PEP 562), and its ``__all__``.

    The public names are the imports ``NAME as NAME`` in the package's ``__init__``. They are written once, in a block
    ``if TYPE_CHECKING:`` that editors and type checkers read, and each is imported on first access.
    """
    module = sys.modules[package]
    home = public_imports(Path(module.__file__ or ""))

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(home))}")
        value = getattr(import_module(home[name]), name)
        setattr(module, name, value)
        return value

    return get, lambda: sorted({*vars(module), *home}), sorted(home)


def public_imports(path: Path) -> dict[str, str]:
    """Return the names that a file imports as ``NAME as NAME``, with their modules, without importing them."""
    return {
        alias.name: node.module
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        if alias.asname == alias.name
    }


def when_imported(module: str, act: Callable[[], None]) -> None:
    """Call a function once a module has been imported: now, or when other code imports it.

    Extending a library this way does not import the library.
    """
    if module in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _ImportFinder(module, act))


class _ImportFinder:
    """Finds one module through the other finders, and calls a function after the module is imported."""

    def __init__(self, module: str, act: Callable[[], None]) -> None:
        self._module, self._act = module, act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's spec; None for every other module."""
        if fullname != self._module:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def executed(module: ModuleType) -> None:
                execute(module)
                self._act()

            spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec
