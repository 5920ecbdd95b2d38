"""A critic on disk: a plain transformers folder with two more files.

``critic.json`` (`rewardmodels.model.info`) is written last, so a folder that has it is
complete. ``README.md`` is the model card. A LoRA run also keeps ``adapter/`` for peft;
the folder itself holds the merged weights, so anything that loads transformers models
can load it.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mas_gym.errors import ConfigError, DataError, TrainingError
from rewardmodels.model.backbone import load_scalar, load_tokenizer, need, quiet
from rewardmodels.model.info import META, CriticInfo, read_info, read_object, show

if TYPE_CHECKING:
    import torch

_BESIDE = (META, "metrics.json", "run.json")
_SUFFIXES = (".safetensors", ".json", ".model", ".txt")
_HEADER = 2**27
_LARGEST = 2**31
_LAYERS = re.compile(r"(?!max_).*layers?")


def load_folder(folder: Path, dtype: torch.dtype) -> tuple[Any, Any, CriticInfo]:
    """Load model, tokenizer and description of a saved critic.

    Raises:
        DataNotFoundError: There is no such folder.
        DataError: Something in it is missing, damaged or of another version.
        ConfigError: A value in it is not what it should be.
    """
    info = read_info(folder)
    check_folder(folder)
    tokenizer = load_tokenizer(str(folder))
    model = load_scalar(str(folder), dtype, tokenizer.pad_token_id, new_head=False)
    for parameter in model.parameters():
        # Else they stay mapped to the file, and change when it is overwritten.
        parameter.data = parameter.data.clone()
    return model.eval(), tokenizer, info


def digest(folder: Path) -> str:
    """Return a digest of the contents of the files that determine a model's scores: weights, config, tokenizer.

    Raises:
        DataError: A file cannot be read.
    """
    found = blake2b(digest_size=16)
    try:
        for path in _files(folder):
            with path.open("rb") as file:
                found.update(path.name.encode() + b"\0" + file_digest(file, "blake2b").digest())
    except OSError as error:
        raise DataError(f"cannot read {folder}: {error}; copy the folder again from its source") from error
    return found.hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES and path.name not in _BESIDE)


def check_folder(folder: Path) -> None:
    """Refuse a folder that would make transformers wait, allocate without limit, or read outside of it.

    Raises:
        DataError: A file is not regular, or no JSON object.
        ConfigError: A file names weights outside the folder, or a config has impossible sizes, with every fault.
    """
    for path in _files(folder):
        if not path.is_file():
            raise DataError(f"expected {path} to be a regular file; copy the folder again from its source")
    faults = []
    if (folder / "adapter_config.json").exists():
        faults.append("adapter_config.json: expected merged weights, got an adapter; merge it with peft, then save")
    tensors = sum(_tensors(path) for path in folder.glob("*.safetensors"))
    if not tensors:
        raise DataError(f"expected weights in safetensors files in {folder}, found none; train the critic again")
    if (folder / "config.json").exists():
        faults += _config_faults(read_object(folder / "config.json"), tensors)
    for path in folder.glob("*.index.json"):
        shards = read_object(path).get("weight_map")
        names = set(map(str, shards.values())) if isinstance(shards, dict) else {show(shards)}
        faults += [
            f"{path.name}: weight_map: expected files of this folder, got {show(name)}"
            for name in sorted(names)
            if not name or Path(name).name != name or not (folder / name).is_file()
        ]
    if faults:
        remedy = "Save the model again, or copy it from its source"
        raise ConfigError(f"{folder}: {'; '.join(faults)}. {remedy}", tuple(faults))


def _config_faults(config: dict[str, Any], tensors: int) -> Iterator[str]:
    """Yield what is impossible in a ``config.json`` beside weights of this many tensors."""
    for key, value in _integers(config):
        if not -_LARGEST <= value < _LARGEST:
            yield f"config.json: {key}: expected an integer of at most 31 bits, got {show(value)}"
        elif _LAYERS.fullmatch(key) and value > max(tensors, 1):
            yield f"config.json: {key}: expected at most {tensors}, the number of tensors in the weights, got {value}"
        elif key == "num_labels" and value != 1:
            yield f"config.json: num_labels: expected 1, got {value}"
    for key in ("attn_implementation", "_attn_implementation", "transformers_weights"):
        # Names of kernels on a hub, whose code would run, and of other files.
        if "/" in str(config.get(key, "")):
            yield f"config.json: {key}: expected no path or repository, got {show(config[key])}"


def _integers(value: Any, key: str = "") -> Iterator[tuple[str, int]]:
    """Yield every integer of a JSON value with the key that it stands under."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _integers(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _integers(item, key)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield key, value


def _tensors(path: Path) -> int:
    """Return how many tensors the header of a safetensors file lists."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size) if size < _HEADER else b"")
        return len(header.keys() - {"__metadata__"})
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        raise DataError(
            f"cannot read the weights in {path}: the file is cut off or damaged; copy or train it again"
        ) from error


def _weights(folder: Path) -> str:
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            found.append(file_digest(file, "blake2b").hexdigest()[:32])
    return "-".join(found)


def save_folder(model: Any, tokenizer: Any, folder: Path, info: CriticInfo, card: str) -> CriticInfo:
    """Write a critic; an earlier one stays until everything is written.

    Returns:
        The description as written, with the digest of the weights.

    Raises:
        TrainingError: The disk is full or cannot be written.
    """
    fresh = folder / ".saving"
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        with quiet():
            if hasattr(model, "get_base_model"):
                model.save_pretrained(fresh / "adapter", save_embedding_layers=False)
                (fresh / "adapter" / "README.md").unlink(missing_ok=True)
                model = merged(model)
            model.save_pretrained(fresh)
            tokenizer.save_pretrained(fresh)
        (fresh / "README.md").write_text(card, encoding="utf-8")
        info = replace(info, weights=_weights(fresh))
        text = json.dumps(info.to_dict(), indent=2, ensure_ascii=False)
        (fresh / META).write_text(text + "\n", encoding="utf-8")
        (folder / META).unlink(missing_ok=True)
        for path in sorted(fresh.iterdir(), key=lambda path: path.name == META):
            target = folder / path.name
            if target.is_dir():
                shutil.rmtree(target)
            os.replace(path, target)
        fresh.rmdir()
    except Exception as error:
        shutil.rmtree(fresh, ignore_errors=True)
        raise TrainingError(
            f"cannot write the critic to {folder}: {error}. Its checkpoints are kept; free some space and run the same "
            "command again"
        ) from error
    return info


def merged(model: Any) -> Any:
    """Return a plain model with the adapters merged into the weights; a 4-bit backbone is dequantized."""
    from transformers import AutoModelForSequenceClassification

    base = model.get_base_model()
    state: dict[str, torch.Tensor] = {}
    for name, module in base.named_modules():
        if hasattr(module, "base_layer") and hasattr(module, "get_delta_weight"):
            state[f"{name}.weight"] = _written_out(module.base_layer.weight) + module.get_delta_weight("default")
            if module.base_layer.bias is not None:
                state[f"{name}.bias"] = module.base_layer.bias
        elif hasattr(module, "modules_to_save"):
            state |= {f"{name}.{key}": value for key, value in module.modules_to_save["default"].state_dict().items()}
    wrapped = ("lora_", "base_layer", "modules_to_save", "original_module", "quant_", "absmax", "nested_")
    plain = {k: v for k, v in base.state_dict().items() if not any(mark in k for mark in wrapped)}
    config = copy.deepcopy(base.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    dtype = base.score.modules_to_save["default"].weight.dtype
    whole = AutoModelForSequenceClassification.from_config(config, dtype=dtype)
    whole.load_state_dict({k: v.to(dtype) for k, v in {**plain, **state}.items()}, strict=True)
    return whole.eval()


def _written_out(weight: Any) -> torch.Tensor:
    if type(weight).__name__ == "Params4bit":
        dequantized: torch.Tensor = need("bitsandbytes", "4-bit training").functional.dequantize_4bit(
            weight.data, weight.quant_state
        )
        return dequantized
    return weight.data
