"""What tells one local model from another in a response cache."""

from __future__ import annotations

from pathlib import Path


def model_stamp(model: str) -> str:
    """Return a text that changes when the files of a model folder do; a hub id is returned as it is."""
    folder = Path(model)
    if not folder.is_dir():
        return model
    files = sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".json", ".jinja", ".model"))
    return "|".join(f"{file.name}:{file.stat().st_size}:{file.stat().st_mtime_ns}" for file in files)
