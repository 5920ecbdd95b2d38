"""The files of a local model, and the digest that identifies them."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from hashlib import blake2b, file_digest
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from mas_gym.errors import PolicyError

SUFFIXES = (".safetensors", ".json", ".jinja", ".model", ".txt", ".codes", ".spm", ".tokenizer", ".py")
"""Suffixes of the files that determine a model's output: weights, configs, templates, vocabularies and code."""

_READERS = 8
_importing = threading.Lock()


class ModelFile(NamedTuple):
    """The state of a file when it was listed: path, size in bytes, and modification time in nanoseconds."""

    path: Path
    size: int
    changed: int


class ModelSource:
    """A model's folder, file or hub id with a list of its files; create it before loading the model."""

    def __init__(self, model: str) -> None:
        """List a file, or the files of a folder, without reading them."""
        self._model, folder = model, Path(model)
        self._files: tuple[ModelFile, ...] | None = None
        if folder.is_file():
            self._files = (_listed(folder),)
        elif folder.is_dir():
            paths = [*sorted(folder.iterdir()), *sorted(folder.glob("additional_chat_templates/*.jinja"))]
            self._files = tuple(_listed(path) for path in paths if path.suffix in SUFFIXES)

    def check(self) -> None:
        """Raise `PolicyError` if a listed file has been changed or removed since."""
        for file in self._files or ():
            if not file.path.is_file() or _listed(file.path) != file:
                raise PolicyError(f"{file.path} changed after the model was loaded; load the model again")

    def identity(self) -> dict[str, str]:
        """Return a digest of the names and contents of the files, or a hub model's id and commit.

        The digest does not depend on the machine or the folder's path. The first call reads the files, in parallel.

        Raises:
            PolicyError: A file was changed or removed after it was listed, or the hub model cannot be found.
        """
        if self._files is None:
            return {"model": self._model, "commit": _commit(self._model)}
        self.check()
        with ThreadPoolExecutor(_READERS) as pool:
            contents = pool.map(_content, self._files)
            names = "".join(f"{file.path.name}:{content}|" for file, content in zip(self._files, contents, strict=True))
        return {"files": blake2b(names.encode(), digest_size=16).hexdigest()}


def import_models() -> None:
    """Import the modules that all transformers models share, without scikit-learn, which only assisted decoding uses.

    This saves 100 MiB and one second per process. scikit-learn is hidden only from transformers, and only while its
    assisted decoding is imported, so other threads import scikit-learn as usual.
    """
    utils: Any = import_module("transformers.utils")
    with _importing:
        available, loaded = utils.is_sklearn_available, "sklearn" in sys.modules
        utils.is_sklearn_available = lambda: loaded
        try:
            import_module("transformers.generation.candidate_generator")
        finally:
            utils.is_sklearn_available = available
    import_module("transformers.modeling_utils")


def _listed(path: Path) -> ModelFile:
    found = path.stat()
    return ModelFile(path.absolute(), found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=4096)
def _content(file: ModelFile) -> str:
    with file.path.open("rb") as stream:
        return file_digest(stream, lambda: blake2b(digest_size=16)).hexdigest()


def _commit(model: str) -> str:
    from transformers.utils import cached_file

    try:
        config = cached_file(model, "config.json")
    except OSError as error:
        raise PolicyError(f"expected a local folder or a reachable model on the hub, got {model!r}: {error}") from error
    # The hub's cache stores each commit in a folder named after it.
    return Path(str(config)).parent.name
