"""What tells one local model from another: in a response cache, and in a store that a run is resumed from."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

_SUFFIXES = (".safetensors", ".json", ".jinja", ".model")
_WHOLE = 2**20
_BLOCKS = 64
_BLOCK = 4096


def model_stamp(model: str) -> str:
    """Return a digest of a model folder's files, equal on every machine; a hub id is returned as it is.

    Large files are sampled: their sizes and 64 blocks spread over them.
    """
    folder = Path(model)
    if not folder.is_dir():
        return model
    digest = blake2b(digest_size=16)
    for file in sorted(file for file in folder.iterdir() if file.suffix in _SUFFIXES):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}|".encode())
        with file.open("rb") as stream:
            if size <= _WHOLE:
                digest.update(stream.read())
                continue
            for block in range(_BLOCKS):
                stream.seek(block * (size - _BLOCK) // (_BLOCKS - 1))
                digest.update(stream.read(_BLOCK))
    return digest.hexdigest()
