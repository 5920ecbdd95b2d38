"""What the files of a model may name: only other files beside them, never code, another model or another place.

Models come from strangers, and transformers follows the names in their files. Names outside the model would also be
outside its identity.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from mas_gym.errors import ConfigError, DataError, is_number, shown
from mas_gym.internal.json_types import JSONObject
from mas_gym.internal.whole_files import finish_replacing
from mas_gym.policies.model_files import SUFFIXES

_CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_ADAPTER = "adapter_config.json"
_TOKENIZER = "tokenizer_config.json"
_ATTENTION = (None, "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")
_EXPERTS = (None, "eager", "batched_mm", "grouped_mm")
_REMEDY = "save the model again with save_pretrained, or copy it from its source"


def check_model(model: str | Path) -> None:
    """Check that a model's files name no other model, no code, and no files outside its folder.

    Args:
        model: A folder or hub id.

    Raises:
        ConfigError: A file names something else.
        DataError: A file cannot be read.
    """
    folder = Path(model)
    if folder.is_dir():
        try:
            finish_replacing(folder, _CONFIG)
        except OSError as error:
            raise DataError(f"cannot finish an interrupted replacement of the model in {folder}: {error}") from error
    if _find(model, _ADAPTER) is not None:
        raise ConfigError(
            f"{model}: {_ADAPTER}: expected merged weights, got an adapter, whose base model would not be part of the "
            "model's identity; merge them with peft: PeftModel.from_pretrained(base, adapter).merge_and_unload()"
            ".save_pretrained(folder)"
        )
    _check_config(model, _read(model, _CONFIG))
    names = _read(model, _INDEX).get("weight_map", {})
    wrong = [name for name in names.values() if not _is_weights(name)] if isinstance(names, dict) else [names]
    if wrong:
        raise ConfigError(
            f"{model}: {_INDEX}: expected names of *.safetensors files in the folder, got {shown(wrong[0])}; {_REMEDY}"
        )
    if (tokenizer := _find(model, _TOKENIZER)) is not None:
        _check_tokenizer(tokenizer.parent, _read(model, _TOKENIZER))


def _check_config(model: str | Path, config: JSONObject) -> None:
    for part in _parts(config):
        for key, known in {"attn_implementation": _ATTENTION, "experts_implementation": _EXPERTS}.items():
            # Other names are kernels on the hub: code that would run.
            for kinds in (part.get(key), part.get(f"_{key}")):
                for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
                    if kind not in known:
                        raise ConfigError(
                            f"{model}: {_CONFIG}: {key}: expected one of {', '.join(map(str, known[1:]))}, got "
                            f"{shown(kind)}; {_REMEDY}"
                        )
        name = part.get("transformers_weights")
        if name is not None and not _is_weights(name):
            raise ConfigError(
                f"{model}: {_CONFIG}: transformers_weights: expected the name of a *.safetensors file in the folder, "
                f"got {shown(name)}; {_REMEDY}"
            )


def _check_tokenizer(folder: Path, config: JSONObject) -> None:
    longest = config.get("model_max_length")
    if longest is not None and not is_number(longest):
        raise ConfigError(
            f"{folder}: {_TOKENIZER}: model_max_length: expected a number, got {shown(longest)}; {_REMEDY}"
        )
    for part in _parts(config):
        for key, value in part.items():
            for name in value if isinstance(value, list) else [value]:
                if key.endswith(("_file", "_files")) and isinstance(name, str) and _is_elsewhere(folder, name):
                    raise ConfigError(
                        f"{folder}: {_TOKENIZER}: {key}: expected the name of a file in the folder that ends in one of "
                        f"{', '.join(SUFFIXES)}, got {shown(name)}; {_REMEDY}"
                    )


def _is_elsewhere(folder: Path, name: str) -> bool:
    """Return whether a name is that of a file which is not part of the model's identity."""
    if name == Path(name).name and Path(name).suffix in SUFFIXES:
        return False
    # Configs often state a path on the author's machine; only a path that exists here could be read.
    return os.path.exists(folder / name) or os.path.exists(name)


def _is_weights(name: object) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors") and not set(name) & set("/\\:\0")


def _parts(config: object) -> Iterator[JSONObject]:
    left = [config]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            yield one
            left += one.values()
        elif isinstance(one, list):
            left += one


def read_object(path: Path) -> JSONObject:
    """Return the JSON object in a file of a model's folder. Raises `DataError`."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"cannot read {path}: {shown(str(error))}; {_REMEDY}") from error
    if not isinstance(found, dict):
        raise DataError(f"expected a JSON object in {path}, got {shown(found)}; {_REMEDY}")
    return found


def _read(model: str | Path, name: str) -> JSONObject:
    path = _find(model, name)
    return {} if path is None else read_object(path)


def _find(model: str | Path, name: str) -> Path | None:
    if Path(model).is_dir():
        path = Path(model) / name
        return path if path.exists() else None
    from transformers.utils import cached_file

    missing = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    try:
        found = cached_file(str(model), name, **missing)
    except OSError:
        # There is no such model, which loading it reports.
        return None
    return None if found is None else Path(found)
