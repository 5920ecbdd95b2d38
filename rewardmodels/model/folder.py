"""The folder format of a critic: a plain transformers folder with two more files, and the validation of its contents.

``critic.json`` (`CriticInfo`) is written last, so a folder that contains it is complete. ``README.md``
is the model card. A LoRA run also saves ``adapter/`` for peft; the folder itself contains the merged
weights, so any program that loads transformers models can load it.

A folder may come from an untrusted source, so no value is used before its type, range and length are
checked. All errors of a file are reported together.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from mas_gym.errors import ConfigError, DataError, DataNotFoundError, TrainingError, need, shown
from mas_gym.internal.json_types import JSONMapping, JSONObject
from mas_gym.systems.validation import MAX_TURNS
from rewardmodels.data.dataset import LOOPS, DataKind
from rewardmodels.data.encode import FORMAT, View
from rewardmodels.model.backbone import has_adapters, load_scalar, load_tokenizer, quiet
from search.results.run_info import RECORDED

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


META = "critic.json"
SCHEMA = 1

HEADS: dict[str, dict[str, DataKind]] = {
    "masprm": {"bt": "pairs", "mse": "points"},
    "orm": {"bce": "outcomes", "mse": "outcomes"},
}
"""Heads by kind of critic, each with the kind of training set for it."""

MAX_LENGTH = 2**20
"""Largest ``max_length``, in tokens."""

_BYTES = 2**24
_NAMES = 10_000
_WEIGHTS = re.compile(r"[0-9a-f]{32}(-[0-9a-f]{32})*|")


@dataclass(frozen=True, slots=True)
class CriticInfo:
    """Description of a saved critic.

    Attributes:
        kind: ``"masprm"`` or ``"orm"``.
        head: The loss that it was trained with.
        view: Part of a state that it reads.
        max_length: Longest state, in tokens.
        graphs: The MAS graphs that it was trained on, by name, each with its agents, edges and loops.
        tasks: The tasks that it was trained on.
        base: Name of the backbone.
        settings: Hyper-parameters.
        data: Counts of the training data.
        metrics: Metrics on held-out problems.
        versions: Package versions used in training.
        weights: Digest of the weights that training wrote. The identity of a loaded critic is always computed from the
            current files, never read from this field.
    """

    kind: str
    head: str
    view: View
    max_length: int
    graphs: dict[str, dict[str, object]]
    tasks: list[str]
    base: str
    settings: JSONObject
    data: JSONObject
    metrics: JSONObject
    versions: dict[str, str]
    weights: str = ""

    def to_dict(self) -> JSONObject:
        """Return the JSON-able form of ``critic.json``."""
        return {"schema": SCHEMA, "text_format": FORMAT, "value": "tanh(logit)", **asdict(self)}


def read_info(folder: Path) -> CriticInfo:
    """Read and check ``critic.json``.

    Raises:
        DataNotFoundError: There is no such folder.
        DataError: The folder contains no finished critic, or one of a different version.
        ConfigError: A value is invalid; the message lists all errors.
    """
    if not folder.is_dir():
        raise DataNotFoundError(f"no critic at {folder}: expected a folder that training wrote")
    path = folder / META
    if not path.exists():
        raise DataError(
            f"expected {META} in {folder}, found none: training has not finished; pass the folder given as --out, or "
            "run the training again to resume from its last checkpoint"
        )
    data = read_object(path)
    try:
        versions = (data["schema"], data["text_format"])
        fields = {name: data[name] for name in CriticInfo.__slots__}
    except KeyError as error:
        raise DataError(f"cannot read {path}: the field {error} is missing; train the critic again") from error
    if versions != (SCHEMA, FORMAT) or not all(type(version) is int for version in versions):
        raise DataError(
            f"expected a critic of schema {SCHEMA} and text format {FORMAT} in {folder}, got {shown(versions[0])} and "
            f"{shown(versions[1])}; load it with the release that trained it, or train it again"
        )
    faults = tuple(_faults(fields))
    if faults:
        raise ConfigError(
            f"{path}: {'; '.join(faults)}. Copy the critic's folder again from its source, or train it again", faults
        )
    return CriticInfo(**fields)


def read_object(path: Path) -> JSONObject:
    """Read a JSON object from a regular file of bounded size.

    Raises:
        DataError: The path is not a regular file, is too large, or does not contain a JSON object.
    """
    remedy = "copy the folder again from its source, or train the critic again"
    try:
        # A pipe or a device would block or never end.
        if not path.is_file():
            raise DataError(f"expected {path} to be a regular file; {remedy}")
        if path.stat().st_size > _BYTES:
            raise DataError(f"expected at most {_BYTES:,} bytes in {path}, got {path.stat().st_size:,}; {remedy}")
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else shown(str(error))
        raise DataError(f"cannot read {path}: {reason}; {remedy}") from error
    if not isinstance(found, dict):
        raise DataError(f"expected a JSON object in {path}, got {shown(found)}; {remedy}")
    return found


def _faults(fields: JSONMapping) -> Iterator[str]:
    """Yield one line per invalid field, with the expected and the actual value."""
    heads = HEADS.get(fields["kind"], {}) if isinstance(fields["kind"], str) else {}
    expected: dict[str, tuple[Callable[[object], bool], str]] = {
        "kind": (lambda v: isinstance(v, str) and v in HEADS, _either(HEADS)),
        "head": (lambda v: isinstance(v, str) and (v in heads or not heads), _either(heads or ["a string"])),
        "view": (lambda v: isinstance(v, str) and v in ("full", "local"), _either(["full", "local"])),
        "max_length": (_is_length, f"an integer from 64 to {MAX_LENGTH}"),
        "graphs": (
            _are_graphs,
            'an object of graphs, each with "name", "agents" (names) and "edges" (pairs of indices), and '
            '"max_turns", "min_turns" and "history" if it has loops',
        ),
        "tasks": (lambda v: _is_list(v, _is_name), "a list of task names"),
        "base": (_is_base, "the name of a model or a hub id, not a path"),
        "settings": (_is_object, "an object"),
        "data": (_is_object, "an object"),
        "metrics": (_is_object, "an object"),
        "versions": (lambda v: _is_object(v) and all(map(_is_name, v.values())), "an object of version strings"),
        "weights": (lambda v: isinstance(v, str) and bool(_WEIGHTS.fullmatch(v)), "32 hexadecimal digits per file"),
    }
    for name, (good, what) in expected.items():
        if not good(fields[name]):
            yield f"{name}: expected {what}, got {shown(fields[name])}"


def _either(names: Iterable[str]) -> str:
    return " or ".join(f'"{name}"' for name in names)


def _is_int(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_length(value: object) -> bool:
    return _is_int(value, 64, MAX_LENGTH)


def _is_name(value: object) -> TypeGuard[str]:
    # Lone surrogates cannot be tokenized or printed.
    return isinstance(value, str) and 0 < len(value) <= 1000 and not any("\ud800" <= c <= "\udfff" for c in value)


def _is_base(value: object) -> bool:
    if not _is_name(value) or "\\" in value:
        return False
    parts = value.split("/")
    return len(parts) <= 2 and not {"", ".", ".."} & set(parts)


def _is_list(value: object, good: Callable[[object], bool]) -> TypeGuard[list[object]]:
    return isinstance(value, list) and len(value) <= _NAMES and all(map(good, value))


def _is_object(value: object) -> TypeGuard[JSONObject]:
    return isinstance(value, dict) and all(map(_is_name, value))


def _are_graphs(value: object) -> bool:
    return _is_object(value) and 0 < len(value) <= _NAMES and all(map(_is_graph, value.values()))


def _is_graph(value: object) -> bool:
    """Return whether a value has the form of `rewardmodels.data.dataset.graph_of`."""
    required = {"name", "agents", "edges"}
    if not isinstance(value, dict) or not required <= set(value) <= required | set(LOOPS):
        return False
    if not all(_is_int(value.get(turns, 1), 1, MAX_TURNS) for turns in ("max_turns", "min_turns")):
        return False
    if value.get("history", "inputs") not in ("inputs", "private"):
        return False
    agents = value["agents"]
    if not _is_name(value["name"]) or not _is_list(agents, _is_name) or not agents:
        return False
    sink = len(agents)

    def is_edge(edge: object) -> bool:
        if not isinstance(edge, list) or not all(_is_int(v, -1, sink) for v in edge[:2]):
            return False
        return len(edge) == 2 or (len(edge) == 3 and isinstance(edge[2], str))

    return _is_list(value["edges"], is_edge)


_BESIDE = (META, "metrics.json", "run.json")
_SUFFIXES = (".safetensors", ".json", ".model", ".txt")
_HEADER = 2**27
_LARGEST = 2**31
_LAYERS = re.compile(r"(?!max_).*layers?")


def load_folder(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, CriticInfo]:
    """Load model, tokenizer and description of a saved critic.

    Raises:
        DataNotFoundError: There is no such folder.
        DataError: A file is missing or damaged, or has a different version.
        ConfigError: A value is invalid.
    """
    info = read_info(folder)
    check_folder(folder)
    tokenizer = load_tokenizer(str(folder))
    model = load_scalar(str(folder), dtype, tokenizer.pad_token_id, new_head=False)
    for parameter in model.parameters():
        # Otherwise the weights stay mapped to the file, and change when it is overwritten.
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


def check_folder(folder: Path, labels: int = 1) -> None:
    """Reject a folder that could make transformers block, allocate without limit, or read outside of it.

    Args:
        folder: A folder with a transformers model.
        labels: The largest allowed ``num_labels`` in its config.

    Raises:
        DataError: A file is not a regular file or not a JSON object.
        ConfigError: A file refers to weights outside the folder, or a config has impossible sizes; lists all errors.
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
        faults += _config_faults(read_object(folder / "config.json"), tensors, labels)
    for path in folder.glob("*.index.json"):
        shards = read_object(path).get("weight_map")
        names = set(map(str, shards.values())) if isinstance(shards, dict) else {shown(shards)}
        faults += [
            f"{path.name}: weight_map: expected files of this folder, got {shown(name)}"
            for name in sorted(names)
            if not name or Path(name).name != name or not (folder / name).is_file()
        ]
    if faults:
        remedy = "Save the model again, or copy it from its source"
        raise ConfigError(f"{folder}: {'; '.join(faults)}. {remedy}", tuple(faults))


def _config_faults(config: JSONObject, tensors: int, labels: int) -> Iterator[str]:
    """Yield the faults of a ``config.json``, given the number of tensors in the weights."""
    for key, value in _integers(config):
        if not -_LARGEST <= value < _LARGEST:
            yield f"config.json: {key}: expected an integer of at most 31 bits, got {shown(value)}"
        elif _LAYERS.fullmatch(key) and value > max(tensors, 1):
            yield f"config.json: {key}: expected at most {tensors}, the number of tensors in the weights, got {value}"
        elif key == "num_labels" and not 1 <= value <= labels:
            yield f"config.json: num_labels: expected {'1' if labels == 1 else f'1 to {labels}'}, got {value}"
    for key in ("attn_implementation", "_attn_implementation", "transformers_weights"):
        # These fields name hub kernels, which contain code that would run, and other files.
        if "/" in str(config.get(key, "")):
            yield f"config.json: {key}: expected no path or repository, got {shown(config[key])}"


def _integers(value: object, key: str = "") -> Iterator[tuple[str, int]]:
    """Yield every integer of a JSON value with its key."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _integers(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _integers(item, key)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield key, value


def _tensors(path: Path) -> int:
    """Return the number of tensors in the header of a safetensors file."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size) if size < _HEADER else b"")
        return len(header.keys() - {"__metadata__"})
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        raise DataError(
            f"cannot read the weights in {path}: the file is truncated or damaged; copy or train it again"
        ) from error


def digest_of_weights(folder: Path) -> str:
    """Return the digests of a folder's safetensors files, joined by hyphens."""
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            found.append(file_digest(file, "blake2b").hexdigest()[:32])
    return "-".join(found)


def save_folder(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, info: CriticInfo, card: str
) -> CriticInfo:
    """Write a critic; an earlier one is kept until everything is written.

    Returns:
        The description as written, with the digest of the weights.

    Raises:
        TrainingError: The disk is full or cannot be written.
    """

    def write(fresh: Path) -> None:
        nonlocal model, info
        with quiet():
            if has_adapters(model):
                model.save_pretrained(fresh / "adapter", save_embedding_layers=False)
                (fresh / "adapter" / "README.md").unlink(missing_ok=True)
                model = merged(model)
            model.save_pretrained(fresh)
            tokenizer.save_pretrained(fresh)
        (fresh / "README.md").write_text(card, encoding="utf-8")
        info = replace(info, weights=digest_of_weights(fresh))
        text = json.dumps(info.to_dict(), indent=2, ensure_ascii=False)
        (fresh / META).write_text(text + "\n", encoding="utf-8")

    replace_files(folder, write, META, "critic")
    return info


def replace_files(folder: Path, write: Callable[[Path], None], mark: str, what: str) -> None:
    """Write a model into a folder; the files of an earlier one are kept until everything is written.

    Args:
        folder: The folder; its other files are kept.
        write: Writes everything into a given folder.
        mark: The file that marks a complete model; it is removed first and moved last.
        what: Description of the model, for error messages.

    Raises:
        TrainingError: The disk is full or cannot be written.
    """
    fresh = folder / ".saving"
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        write(fresh)
        (folder / mark).unlink(missing_ok=True)
        for path in sorted(fresh.iterdir(), key=lambda path: path.name == mark):
            target = folder / path.name
            if target.is_dir():
                shutil.rmtree(target)
            os.replace(path, target)
        fresh.rmdir()
    except Exception as error:
        shutil.rmtree(fresh, ignore_errors=True)
        raise TrainingError(
            f"cannot write the {what} to {folder}: {error}. Its checkpoints are kept; free some space and run the same "
            "command again"
        ) from error


def merged(model: PreTrainedModel) -> PreTrainedModel:
    """Return a plain model with the adapters merged into the weights; a 4-bit backbone is dequantized."""
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper
    from transformers import AutoModelForSequenceClassification

    base = model.get_base_model()
    state: dict[str, torch.Tensor] = {}
    for name, module in base.named_modules():
        if isinstance(module, LoraLayer):
            state[f"{name}.weight"] = _written_out(module.base_layer.weight) + module.get_delta_weight("default")
            if module.base_layer.bias is not None:
                state[f"{name}.bias"] = module.base_layer.bias
        elif isinstance(module, ModulesToSaveWrapper):
            state |= {f"{name}.{key}": value for key, value in module.modules_to_save["default"].state_dict().items()}
    wrapped = ("lora_", "base_layer", "modules_to_save", "original_module", "quant_", "absmax", "nested_")
    plain = {k: v for k, v in base.state_dict().items() if not any(mark in k for mark in wrapped)}
    config = copy.deepcopy(base.config)
    vars(config).pop("quantization_config", None)
    dtype = base.score.modules_to_save["default"].weight.dtype
    whole = AutoModelForSequenceClassification.from_config(config, dtype=dtype)
    whole.load_state_dict({k: v.to(dtype) for k, v in {**plain, **state}.items()}, strict=True)
    return whole.eval()


def _written_out(weight: torch.Tensor) -> torch.Tensor:
    if type(weight).__name__ == "Params4bit":
        dequantized: torch.Tensor = need("bitsandbytes", "4-bit training").functional.dequantize_4bit(
            weight.data, weight.quant_state
        )
        return dequantized
    return weight.data


_TARGETS = {
    "bt": "preference pairs of sibling states, with the Bradley-Terry loss",
    "mse": "value targets, with the squared error",
    "bce": "right and wrong final answers, with cross-entropy and p = sigmoid(2 logit)",
}


def model_card(info: CriticInfo) -> str:
    """Return the card as Markdown, with the metadata header of model hubs."""
    name = {"masprm": "A process reward model (MASPRM)", "orm": "An outcome reward model (ORM)"}[info.kind]
    sees = (
        "the whole routed transcript"
        if info.view == "full"
        else "the local view of the agent that wrote the last message"
    )
    states = "every state after an action" if info.kind == "masprm" else "only terminal states"
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            "pipeline_tag: text-classification",
            "tags: [mas-gym, reward-model, multi-agent]",
            "---",
            "",
            f"# {name} for {', '.join(info.tasks)} on {', '.join(info.graphs)}",
            "",
            f"Scores {states} of a multi-agent system in [-1, 1]: `tanh` of the logit of a sequence classifier on "
            f"the backbone {info.base}. Its input is {sees}, in MAS-Gym's text format 1, up to "
            f"{info.max_length} tokens. It was trained on {_TARGETS[info.head]}.",
            "",
            "```python",
            "from rewardmodels import load_critic",
            "",
            'critic = load_critic("PATH/TO/THIS/FOLDER")',
            "```",
            "",
            "`AutoModelForSequenceClassification.from_pretrained` also loads it.",
            "",
            "## Graphs",
            "",
            *map(_graph_line, info.graphs.values()),
            "",
            "## Training data",
            "",
            *facts_table(info.data),
            "",
            "## On held-out problems",
            "",
            *facts_table(info.metrics),
            "",
            "## Settings",
            "",
            *facts_table(info.settings),
            "",
            "## Versions",
            "",
            *facts_table(info.versions),
            "",
            "## Limits",
            "",
            f"The labels are {_source(info)}. No human judgements were used: a score "
            "estimates how often these agents reach a right answer from a state. The critic was not evaluated on other "
            "graphs, agents or tasks; MAS-Gym rejects other graphs and views without `force=True`.",
            "",
        ]
    )


def _source(info: CriticInfo) -> str:
    if RECORDED in info.tasks:
        return (
            "outcomes of recorded transcripts of the agents named above: for a state, the mean over its recorded "
            "continuations, which the table above counts"
        )
    return "terminal rewards of a search with the agents named above"


def _graph_line(graph: JSONMapping) -> str:
    loops = [f"{name} {graph[name]}" for name in LOOPS if name in graph]
    return f"- {graph['name']}: {' -> '.join(graph['agents'])}{''.join(f', {text}' for text in loops)}"


def facts_table(values: JSONMapping) -> list[str]:
    """Return names and values as the lines of a Markdown table, for model cards."""
    rows = ["| name | value |", "|---|---|"]
    for name, value in values.items():
        rows += [f"| {key} | {shown} |" for key, shown in _flat(name, value)]
    return rows


def _flat(name: str, value: object) -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [item for key, part in value.items() for item in _flat(f"{name}, {key}", part)]
    if isinstance(value, float):
        return [(name, f"{value:.4g}")]
    if isinstance(value, list | tuple):
        return [(name, " to ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in value))]
    return [(name, str(value))]
