"""Find the local files and the installed packages behind a Python file, without executing any of them."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b
from importlib import metadata
from itertools import takewhile
from pathlib import Path

from mas_gym.errors import IdentityError

SHIPPED = ("mas_gym", "search", "rewardmodels")
_STANDARD = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))


def file_of(module: str) -> Path | None:
    """Return the file of an imported module; None if it has none, as at a prompt or in a notebook."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return Path(os.path.abspath(file)) if isinstance(file, str) and os.path.isfile(file) else None


def packages_of(file: Path, package: str) -> dict[str, str] | None:
    """Return the versions of the distributions that provide a top-level package, which contains a file.

    The result is empty for the standard library, and None for local files.
    """
    if not {"site-packages", "dist-packages"}.isdisjoint(file.parts):
        names = _distributions(tuple(sys.path)).get(package, ())
        return {name: metadata.version(name) for name in names}
    return {} if str(file).startswith(_STANDARD) else None


@lru_cache(maxsize=1)
def _distributions(path: tuple[str, ...]) -> dict[str, list[str]]:
    return dict(metadata.packages_distributions())


def files_behind(file: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the digests of a file and of the local modules that it imports, and the versions of imported packages.

    A digest's key is the path relative to the folder that the file is imported from. Imports in functions count too.

    Raises:
        IdentityError: A file cannot be read.
    """
    parents = list(takewhile(Path.is_file, (folder / "__init__.py" for folder in file.parents)))
    root = file.parents[len(parents)]
    files: dict[str, str] = {}
    packages: dict[str, str] = {}
    left = list({file, *parents})
    seen = set(left)
    while left:
        path = left.pop()
        try:
            content = path.read_bytes()
        except OSError as error:
            raise IdentityError(
                f"the file {path} cannot be read ({error.strerror}); make it readable, or run without a store"
            ) from error
        key = Path(os.path.relpath(path, root))
        files[key.as_posix()] = blake2b(content, digest_size=16).hexdigest()
        for name in _imports(content, ".".join(key.parent.parts)) if path.suffix == ".py" else ():
            top = name.partition(".")[0]
            for found in _files_of(name) if top not in SHIPPED else ():
                versions = packages_of(found, top)
                packages |= versions or {}
                if versions is None and found not in seen:
                    seen.add(found)
                    left.append(found)
    return files, packages


@lru_cache(maxsize=1024)
def _imports(content: bytes, package: str) -> list[str]:
    """Return the dotted names that a file imports; a name imported from a module may be a module too."""
    names: list[str] = []
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return names


def _files_of(name: str) -> Iterator[Path]:
    """Yield the existing files that importing a dotted name would execute."""
    top, *parts = name.split(".")
    try:
        # Finding a submodule would import its package, so only the top-level module is found this way.
        spec = importlib.util.find_spec(top)
    except ValueError:
        return
    if spec is None:
        return
    if spec.has_location and spec.origin:
        yield Path(os.path.abspath(spec.origin))
    folders = [Path(os.path.abspath(folder)) for folder in spec.submodule_search_locations or ()]
    for part in parts:
        candidates = [folder / end for folder in folders for end in (f"{part}/__init__.py", f"{part}.py")]
        yield from (path for path in candidates if path.is_file())
        folders = [folder / part for folder in folders]
