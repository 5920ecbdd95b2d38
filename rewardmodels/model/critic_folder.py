"""The folder format of a critic: a plain transformers folder with two more files, and the validation of its contents.

``critic.json`` (`CriticInfo`) is written last, so a folder that contains it is complete. ``README.md``
is the model card. A LoRA run also saves ``adapter/`` for peft; the folder itself contains the merged
weights, so any program that loads transformers models can load it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from mas_gym.errors import DataError, DataNotFoundError, TrainingError, need, shown, whole_number
from mas_gym.internal.json_types import JSONMapping, JSONObject
from mas_gym.internal.suggestions import choice
from mas_gym.internal.whole_files import finish_replacing, replace_files, write_file
from mas_gym.policies.folder_checks import check_model, read_object
from mas_gym.policies.model_files import SUFFIXES
from rewardmodels.data.cards import LOADING, facts_table, markdown, metadata
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
        settings: Hyperparameters.
        data: Counts of the training data.
        metrics: Metrics on held-out problems.
        versions: Package versions used in training.
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


def read_info(folder: Path) -> CriticInfo:
    """Read and check ``critic.json``.

    Raises:
        DataNotFoundError: There is no such folder.
        DataError: The folder contains no finished critic, or one of a different version.
        ConfigError: A value is invalid.
    """
    if not folder.is_dir():
        raise DataNotFoundError(f"no critic at {folder}: expected a folder that training wrote")
    try:
        finish_replacing(folder, META)
    except OSError as error:
        raise DataError(f"cannot finish an interrupted replacement of the critic in {folder}: {error}") from error
    path = folder / META
    if not path.exists():
        raise DataError(
            f"expected {META} in {folder}, found none: training has not finished; pass the folder given as --out, or "
            "run the training again to resume from its last checkpoint"
        )
    data = read_object(path)
    try:
        versions = (data["schema"], data["text_format"])
        info = CriticInfo(**{name: data[name] for name in CriticInfo.__slots__})
    except KeyError as error:
        raise DataError(f"cannot read {path}: the field {error} is missing; train the critic again") from error
    if versions != (SCHEMA, FORMAT):
        raise DataError(
            f"expected a critic of schema {SCHEMA} and text format {FORMAT} in {folder}, got {shown(versions[0])} and "
            f"{shown(versions[1])}; load it with the release that trained it, or train it again"
        )
    for name, kind in _TYPES.items():
        if not isinstance(found := getattr(info, name), kind):
            raise DataError(f"{path}: {name}: expected {_NOUNS[kind]}, got {shown(found)}; train the critic again")
    if not all(isinstance(task, str) for task in info.tasks):
        raise DataError(f"{path}: tasks: expected names, got {shown(info.tasks)}; train the critic again")
    for name, graph in info.graphs.items():
        if not isinstance(graph, dict) or not all(isinstance(graph.get(key), list) for key in ("agents", "edges")):
            raise DataError(
                f"{path}: graphs: expected agents and edges of {shown(name)}, got {shown(graph)}; train the "
                "critic again"
            )
        graph.setdefault("name", name)
    choice(f"{path}: kind", info.kind, tuple(HEADS))
    choice(f"{path}: head", info.head, tuple(HEADS[info.kind]))
    choice(f"{path}: view", info.view, get_args(View))
    whole_number(f"{path}: max_length", info.max_length, at_least=64)
    return info


_TYPES = {"graphs": dict, "tasks": list, "base": str} | dict.fromkeys(("settings", "data", "metrics", "versions"), dict)
_NOUNS = {dict: "an object", list: "a list", str: "a text"}


_BESIDE = (META, "metrics.json", "run.json", "questions.json")
_SUFFIXES = frozenset(SUFFIXES) - {".jinja", ".py"}


def load_folder(folder: Path, dtype: torch.dtype | str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, CriticInfo]:
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
    if model.dtype.itemsize == 2:
        # In 16 bits, many siblings would have equal logits.
        model.score.float()
    return model.eval(), tokenizer, info


def folder_digest(folder: Path) -> str:
    """Return a digest of the contents of the files that determine a model's scores: weights, config, tokenizer.

    Raises:
        DataError: A file cannot be read.
    """
    found = blake2b(digest_size=16)
    try:
        for path in sorted(folder.iterdir()):
            if path.suffix not in _SUFFIXES or path.name in _BESIDE:
                continue
            with path.open("rb") as file:
                found.update(path.name.encode() + b"\0" + file_digest(file, "blake2b").digest())
    except OSError as error:
        raise DataError(f"cannot read {folder}: {error}; copy the folder again from its source") from error
    return found.hexdigest()


def check_folder(folder: Path) -> None:
    """Reject a folder without a config, or with one that `mas_gym.policies.folder_checks.check_model` rejects.

    Raises:
        DataError: There is no config, or it is damaged.
        ConfigError: A file refers to a place outside the folder.
    """
    read_object(folder / "config.json")
    check_model(folder)


def digest_of_weights(folder: Path) -> str:
    """Return the digests of a folder's safetensors files, joined by hyphens."""
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            found.append(file_digest(file, "blake2b").hexdigest()[:32])
    return "-".join(found)


def save_folder(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, info: CriticInfo, card: str
) -> None:
    """Write a critic; an earlier one is kept until everything is written.

    Raises:
        TrainingError: The disk is full or cannot be written to.
    """

    def write(fresh: Path) -> None:
        with quiet():
            write_model(model, tokenizer, fresh, card, merged)
        stated = {"schema": SCHEMA, "text_format": FORMAT, "value": "tanh(logit)", **asdict(info)}
        text = json.dumps(stated, indent=2, ensure_ascii=False)
        (fresh / META).write_text(text + "\n", encoding="utf-8")

    save_files(folder, write, META, "critic")


def write_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    card: str,
    merge: Callable[[PreTrainedModel], PreTrainedModel],
) -> None:
    """Write a model, its tokenizer and its card; ``merge`` merges adapters into the weights."""
    if has_adapters(model):
        model.save_pretrained(folder / "adapter", save_embedding_layers=False)
        (folder / "adapter" / "README.md").unlink(missing_ok=True)
        model = merge(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(card, encoding="utf-8")


def save_files(folder: Path, write: Callable[[Path], None], mark: str, what: str) -> None:
    """Write a model with `replace_files`; ``what`` describes it. Raises `TrainingError`."""
    try:
        replace_files(folder, write, mark)
    except Exception as error:
        raise TrainingError(
            f"cannot write the {what} to {folder}: {error}. The checkpoints are kept; free some space and run the same "
            "command again"
        ) from error


def write_whole(path: Path, text: str) -> None:
    """Write a file completely or not at all.

    Raises:
        TrainingError: The disk is full or cannot be written to.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, text)
    except OSError as error:
        raise TrainingError(f"cannot write {path}: {error}; free some space and run the same command again") from error


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
    """Return the card as Markdown, with the metadata header that model hubs read."""
    name = {"masprm": "A process reward model (MASPRM)", "orm": "An outcome reward model (ORM)"}[info.kind]
    sees = (
        "the whole routed transcript"
        if info.view == "full"
        else "the local view of the agent that wrote the last message"
    )
    states = "every state after an action" if info.kind == "masprm" else "only terminal states"
    return markdown(
        metadata(
            library_name="transformers",
            pipeline_tag="text-classification",
            tags="[mas-gym, reward-model, multi-agent]",
        ),
        f"# {name} for {', '.join(info.tasks)} on {', '.join(info.graphs)}",
        f"Scores {states} of a multi-agent system in [-1, 1]: `tanh` of the logit of a sequence classifier on "
        f"the backbone {info.base}. Its input is {sees}, in MAS-Gym's text format 1, up to "
        f"{info.max_length} tokens. It was trained on {_TARGETS[info.head]}.",
        LOADING,
        "`AutoModelForSequenceClassification.from_pretrained` also loads it.",
        "## Graphs",
        "\n".join(map(_graph_line, info.graphs.values())),
        "## Training data",
        facts_table(info.data),
        "## On held-out problems",
        facts_table(info.metrics),
        "## Settings",
        facts_table(info.settings),
        "## Versions",
        facts_table(info.versions),
        "## Limits",
        f"The labels are {_source(info)}. No human judgments were used: a score "
        "estimates how often these agents reach a right answer from a state. The critic was not evaluated on other "
        "graphs, agents or tasks; MAS-Gym rejects other graphs without `force=True`.",
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
