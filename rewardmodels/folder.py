"""A critic on disk: a plain transformers folder with two files more.

``critic.json`` says what the critic is and for which graphs and view; it is
written last, so a folder that has it is whole. ``README.md`` is the model card.
A LoRA run also keeps ``adapter/`` for peft; the folder itself holds the merged
weights, so that anything that loads transformers models loads it.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from dataclasses import dataclass, replace
from hashlib import file_digest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mas_gym.errors import DataError, DataNotFoundError, TrainingError
from rewardmodels.backbone import load_scalar, load_tokenizer, need, quiet
from rewardmodels.serialise import FORMAT, View

if TYPE_CHECKING:
    import torch

META = "critic.json"
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class CriticInfo:
    """What a saved critic is.

    Attributes:
        kind: ``"masprm"`` or ``"orm"``.
        head: The loss that it was trained with.
        view: What it sees of a state.
        max_length: The most tokens of a state.
        graphs: The systems that it was trained on, by name.
        tasks: The tasks that it was trained on.
        base: The backbone's name.
        settings: Every hyper-parameter.
        data: Counts of what it was trained on.
        metrics: What was measured on held-out problems.
        versions: Of the packages that trained it.
        weights: Fingerprint of the weights, so that a run store can tell critics apart.
    """

    kind: str
    head: str
    view: View
    max_length: int
    graphs: dict[str, dict[str, object]]
    tasks: list[str]
    base: str
    settings: dict[str, Any]
    data: dict[str, Any]
    metrics: dict[str, Any]
    versions: dict[str, str]
    weights: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able form of ``critic.json``."""
        fields = {name: getattr(self, name) for name in CriticInfo.__slots__}
        return {"schema": SCHEMA, "text_format": FORMAT, "value": "tanh(logit)", **fields}


def read_info(folder: Path) -> CriticInfo:
    """Read ``critic.json``.

    Raises:
        DataNotFoundError: There is no such folder.
        DataError: The folder holds no critic, or one of another version.
    """
    if not folder.is_dir():
        raise DataNotFoundError(f"no critic at {folder}: expected a folder that training wrote")
    try:
        data = json.loads((folder / META).read_text(encoding="utf-8"))
        versions = (data["schema"], data["text_format"])
        if versions != (SCHEMA, FORMAT):
            raise DataError(
                f"expected a critic of schema {SCHEMA} and text format {FORMAT} in {folder}, got {versions[0]} and "
                f"{versions[1]}; load it with the release that trained it, or train it again"
            )
        return CriticInfo(**{name: data[name] for name in CriticInfo.__slots__})
    except FileNotFoundError as error:
        raise DataError(
            f"expected {META} in {folder}: this is not a critic that training finished; point to the folder given as "
            "--out, or run the training again to go on from its last checkpoint"
        ) from error
    except (KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {folder / META}: {error!r}; train the critic again") from error


def load_folder(folder: Path, dtype: torch.dtype) -> tuple[Any, Any, CriticInfo]:
    """Load model, tokenizer and description of a saved critic.

    Raises:
        DataNotFoundError: There is no such folder.
        DataError: Something in it is missing, damaged or of another version.
    """
    info = read_info(folder)
    tokenizer = load_tokenizer(str(folder))
    model = load_scalar(str(folder), dtype, tokenizer.pad_token_id, new_head=False)
    return model.eval(), tokenizer, info


def _weights(folder: Path) -> str:
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            found.append(file_digest(file, "blake2b").hexdigest()[:32])
    return "-".join(found)


def save_folder(model: Any, tokenizer: Any, folder: Path, info: CriticInfo, card: str) -> CriticInfo:
    """Write a critic; what was there before stays until everything is written.

    Returns:
        The description as written, with the fingerprint of the weights.

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
    """Return a plain model with the adapters added to the weights; a 4-bit backbone is written out as it computes."""
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
