"""Training of a critic: from problems to searches, trees, examples, and a folder that `load_critic` loads."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mas_gym.errors import ConfigError, DataError, need
from mas_gym.internal.json_types import JSONObject
from mas_gym.tasks.base import Same
from rewardmodels.data.dataset import Example, LabeledTree, RewardData, collect, histogram, split, stored_trees
from rewardmodels.data.encode import Encoder, View
from rewardmodels.model.backbone import (
    add_lora,
    base_path,
    can_share,
    keep_layout,
    load_scalar,
    load_tokenizer,
    quantize_config,
    quiet,
    window_of,
)
from rewardmodels.model.critic_folder import META, CriticInfo, model_card, read_info, save_folder, write_whole
from rewardmodels.model.training_questions import write_questions
from rewardmodels.training.config import SMALL, CriticKind, Head, TrainingConfig, config_for
from search.compare.comparison_runs import Start, drain, start_here
from search.planners.registry import load_planner
from search.progress import Progress
from search.setup import RunSpec
from search.store import RunInfo, open_store
from search.store.run_identity import engine_identity

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rewardmodels.data.dataset import DataKind
    from rewardmodels.training.frozen_backbone import FrozenBackbone

RUN = "run.json"
CHECKPOINTS = "checkpoints"
CURVES = "curves"


class Trained(NamedTuple):
    """A finished training run.

    Attributes:
        folder: The critic, for `rewardmodels.load_critic`.
        info: Its description, with the metrics on held-out problems.
        history: Metrics of each evaluation, with its ``step``.
    """

    folder: Path
    info: CriticInfo
    history: list[JSONObject]


def train(
    data: RewardData,
    out: str | Path,
    base: str = "tiny",
    points: RewardData | None = None,
    device: str | None = None,
    log: Callable[[str], None] = lambda line: None,
    **overrides: Any,
) -> Trained:
    """Train a critic on mined examples (paper, Sec. "MASPRM training", App. "ORM").

    Repeating the call resumes from the last checkpoint and gives the same result; a finished run
    returns at once.

    Args:
        data: Pairs for head ``"bt"``, points for MASPRM's ``"mse"``, outcomes for ORM.
        out: Folder of the critic; also contains ``checkpoints`` and TensorBoard ``curves``.
        base: ``"tiny"``, or a folder or hub id of a decoder.
        points: Labeled states of the same trees, for the calibration and the anchor of a Bradley-Terry critic.
        device: ``"cpu"`` or ``"cuda"``; None uses a GPU if there is one.
        log: Receives progress lines.
        overrides: Fields of `TrainingConfig`; the defaults are `TINY` or `PAPER`, depending on the backbone's size.

    Raises:
        ConfigError: A setting is invalid, or ``out`` belongs to another run.
        DataError: The examples or the backbone cannot be used.
        TrainingError: The loss is not finite, or the disk is full.
        MissingDependencyError: A package is not installed.
    """
    need("tensorboard", "training")
    need("accelerate", "training")
    import torch

    out = Path(out)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer, config = open_backbone(base, device, overrides)
    if config.data_kind != data.kind:
        raise ConfigError(
            f"expected {config.data_kind} for kind {config.kind!r} and head {config.head!r}, got {data.kind}; "
            f"call rewardmodels.collect(trees, kind={config.data_kind!r})"
        )
    if config.view != data.view:
        raise ConfigError(
            f"expected examples with view {config.view!r}, got {data.view!r}; "
            f"call rewardmodels.collect(trees, view={config.view!r})"
        )
    if config.anchor and (points is None or points.kind != "points"):
        raise ConfigError(
            "anchor: expected labeled states, got none; collect the same trees again with kind='points', and pass the "
            "result as points="
        )
    if data.kind != "outcomes" and (single := data.continuations.get(1)):
        log(
            f"{single:,} of {sum(data.continuations.values()):,} recorded states have one continuation: their target "
            "is the outcome of one sample; --min-continuations 2 excludes them"
        )
    prints = [part.fingerprint() for part in (data, points if config.anchor else None) if part is not None]
    claim_folder(out, out / RUN, {"settings": asdict(config), "data": prints, "base": base})
    if (out / META).exists():
        log(f"{out} is already trained")
        metrics = json.loads((out / "metrics.json").read_text(encoding="utf-8"))
        return Trained(out, read_info(out), metrics["history"])
    if not config.frozen:
        return _run(model, tokenizer, config, data, points, out, base, device, log)
    from rewardmodels.training.frozen_backbone import FrozenBackbone

    encoder = Encoder(tokenizer, config.max_length, config.view)
    return train_frozen(FrozenBackbone(model, encoder, tokenizer.pad_token_id, log), config, data, points, out, base)


def open_backbone(
    base: str, device: str, overrides: Mapping[str, object]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, TrainingConfig]:
    """Load a backbone ready for training, with a new head and, if configured, NF4 and LoRA adapters.

    Returns:
        The model on the device, its tokenizer, and the config, with ``max_length`` limited to its context window.

    Raises:
        ConfigError: A setting is invalid.
        DataError: The backbone cannot be used.
        MissingDependencyError: A package is not installed.
    """
    import torch
    from transformers import AutoConfig

    from mas_gym.policies.local.packed_linear import fast_bfloat16

    # bitsandbytes warns about missing hub kernels, which are not needed here.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    source = base_path(base)
    tokenizer = load_tokenizer(source)
    # The backbone's window limits max_length; its size determines the defaults.
    torch.manual_seed(overrides.get("seed", 42))
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = load_scalar(source, dtype, tokenizer.pad_token_id, new_head=True)
    parameters = sum(p.numel() for p in model.parameters())
    config = config_for(parameters, overrides)
    window = window_of(AutoConfig.from_pretrained(source, trust_remote_code=False).get_text_config())
    if window is not None:
        config = replace(config, max_length=min(config.max_length, window))
    if config.nf4:
        # Memory for two copies is not required.
        del model
        torch.manual_seed(config.seed)
        model = load_scalar(source, dtype, tokenizer.pad_token_id, new_head=True, quantization=quantize_config(dtype))
        keep_layout(model)
    if config.frozen and parameters > SMALL and (device != "cpu" or fast_bfloat16()):
        model = model.bfloat16()
    model.score.float()
    if config.frozen:
        model.requires_grad_(False)
    elif config.lora_rank:
        model = add_lora(model, config.lora_rank, config.lora_alpha, config.lora_dropout)
    else:
        model = model.float()
    return model.to(device), tokenizer, config


def claim_folder(out: Path, mark: Path, run: JSONObject) -> None:
    """Claim a folder for one training run, by writing the run's description to its file ``mark``.

    Args:
        out: The folder.
        mark: The file.
        run: Everything that determines the result, JSON-serializable.

    Raises:
        ConfigError: The folder belongs to another run or contains other files.
        TrainingError: The folder cannot be written to.
    """
    if mark.exists():
        before = json.loads(mark.read_text(encoding="utf-8"))
        if changed := [key for key in run if before.get(key) != run[key]]:
            raise ConfigError(
                f"{out} belongs to another training run (different {', '.join(changed)}); choose another folder, or "
                "delete this one"
            )
    elif out.exists() and any(path.is_file() and not path.name.startswith(f".{mark.name}.") for path in out.rglob("*")):
        raise ConfigError(f"expected an empty folder or one with a training run, got {out}; choose another folder")
    else:
        write_whole(mark, json.dumps(run, indent=2))


def _run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: TrainingConfig,
    data: RewardData,
    points: RewardData | None,
    out: Path,
    base: str,
    device: str,
    log: Callable[[str], None],
) -> Trained:
    from mas_gym.policies.local.forward import threads_for
    from rewardmodels.training.checkpoints import Curves
    from rewardmodels.training.metrics import point_metrics
    from rewardmodels.training.trainer import CriticTrainer, HeldOut, StepData, arguments, bundles, schedule

    learned, held, anchors, labeled = _divided(config, data, points)
    encoder = Encoder(tokenizer, config.max_length, config.view)
    pad, share = tokenizer.pad_token_id, can_share(model, tokenizer.pad_token_id)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    found = bundles([*learned.examples, *anchors], encoder, config.batch_size, config.max_tokens)
    order = schedule(found, config.batch_size, config.epochs, config.seed)
    rest = (config.max_tokens, pad, dtype, share)
    held_out = HeldOut(bundles(held.examples, encoder, config.batch_size, config.max_tokens), *rest)
    _log_shortened(encoder, log)
    log(
        f"{len(learned)} {data.kind} of {data.trees} trees for training, {len(held)} held out; {len(order)} steps; "
        f"{'shared prefixes are encoded once' if share else 'states are encoded separately'}"
    )
    with quiet(), threads_for(sum(p.numel() for p in model.parameters())):
        trainer = CriticTrainer(
            config,
            StepData(found, order, *rest),
            held_out,
            model=model,
            args=arguments(config, out / CHECKPOINTS, len(order), device),
            callbacks=[Curves(out / CURVES, log)],
        )
        trainer.resume(log)
    metrics = held_out.metrics(model, config)
    if labeled:
        calibrated = HeldOut(bundles(labeled, encoder, config.batch_size, config.max_tokens), *rest)
        metrics["points"] = point_metrics(calibrated.examples, calibrated.logits(model)[0])
    info = _info(config, data, learned, held, base, metrics, sum(bundle.tokens for bundle in found))
    logged = trainer.state.log_history
    history = [{"step": one["step"], **one["held_out"]} for one in logged if "held_out" in one]
    if trainer.is_world_process_zero():
        _save(model, tokenizer, out, info, data, history)
    trainer.accelerator.wait_for_everyone()
    return Trained(out, info, history)


def train_frozen(
    backbone: FrozenBackbone, config: TrainingConfig, data: RewardData, points: RewardData | None, out: Path, base: str
) -> Trained:
    """Train the head of a backbone that has possibly encoded states for other heads; the data are those of `train`."""
    from rewardmodels.training.frozen_backbone import train_head

    learned, held, anchors, labeled = _divided(config, data, points)
    metrics = train_head(backbone, config, [*learned.examples, *anchors], held.examples, labeled)
    _log_shortened(backbone.encoder, backbone.log)
    info = _info(config, data, learned, held, base, metrics, backbone.tokens)
    _save(backbone.model, backbone.encoder.tokenizer, out, info, data, [])
    return Trained(out, info, [])


def _divided(
    config: TrainingConfig, data: RewardData, points: RewardData | None
) -> tuple[RewardData, RewardData, Sequence[Example], Sequence[Example]]:
    """Return training and held-out examples and, for pairs, the labeled states of both parts of the problems."""
    learned, held = split(data, config.held_out)
    if points is None or data.kind != "pairs":
        return learned, held, (), ()
    anchors, labeled = split(points, config.held_out)
    return learned, held, anchors.examples if config.anchor else (), labeled.examples


def _save(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    info: CriticInfo,
    data: RewardData,
    history: list[JSONObject],
) -> None:
    write_whole(out / "metrics.json", json.dumps({"final": info.metrics, "history": history}, indent=2))
    write_questions(out, data.questions)
    save_folder(model, tokenizer, out, info, model_card(info))


def _info(
    config: TrainingConfig,
    data: RewardData,
    learned: RewardData,
    held: RewardData,
    base: str,
    metrics: JSONObject,
    tokens: int,
) -> CriticInfo:
    counts = {
        "trees": data.trees,
        data.kind: len(learned),
        f"{data.kind} held out": len(held),
        "problems": len({(e.task, e.problem_id) for e in data.examples}),
        "tokens per epoch": tokens,
        "states by recorded continuations behind the target": {str(k): n for k, n in data.continuations.items()},
        "rows by": histogram(learned),
    }
    tasks = list(dict.fromkeys(e.task for e in data.examples))
    name = base if base == "tiny" or not Path(base).exists() else Path(base).name
    return CriticInfo(
        config.kind,
        config.head,
        config.view,
        config.max_length,
        data.graphs,
        tasks,
        name,
        asdict(config),
        counts,
        metrics,
        _versions(),
    )


def _log_shortened(encoder: Encoder, log: Callable[[str], None]) -> None:
    if encoder.shortened:
        log(
            f"{encoder.shortened:,} states are longer than max_length ({encoder.max_length} tokens): their oldest "
            "parts are left out, and the end of the newest message is kept"
        )


def _versions() -> dict[str, str]:
    found = {}
    for package in ("mas-gym", "torch", "transformers", "peft", "bitsandbytes"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


ROLLOUTS = "mcts:40,3"
"""The paper's search for training data."""


def grow(
    spec: RunSpec,
    planner: str = ROLLOUTS,
    listen: Callable[[Progress], None] | bool = False,
    start: Start = start_here,
) -> BaseException | None:
    """Search the problems of a training split with the true reward, and save the trees in the spec's store.

    Args:
        spec: Problems, system, policy, seed and store.
        planner: The planner's short form.
        listen: Called with every progress update; True for a progress bar.
        start: Starts the run.

    Returns:
        The exception that ended the searches early; None if every tree is in the store.
    """
    searches = start(replace(spec, planner=load_planner(planner), training=True, progress=listen), "")
    return drain(searches, lambda plan: None)


def trees(spec: RunSpec, first: int | None = None) -> Iterator[LabeledTree]:
    """Read the trees that `grow` stored for a policy, system, sampling, seed and problems; other trees are skipped.

    Args:
        spec: The spec given to `grow`.
        first: Number of leading problems whose trees are read; all by default.

    Raises:
        DataError: The store contains no training run of this policy and system with this sampling and seed.
    """
    assert spec.store is not None
    wanted = {problem.id for problem in spec.problems[: first or len(spec.problems)]}
    for info in grown(spec):
        for item in stored_trees(Path(spec.store), info.run):
            if item.problem_id in wanted:
                yield item


def grown(spec: RunSpec) -> list[RunInfo]:
    """Return the training runs in the spec's store that match its policy, system, sampling and seed.

    Raises:
        DataError: There is no such run.
    """
    assert spec.store is not None and spec.policy is not None
    same = {
        "training": True,
        "seed": spec.seed,
        "mas": spec.mas.to_dict(),
        "policy": engine_identity("policy", spec.policy),
        "sampling": asdict(spec.sampling.for_system(spec.mas)),
    }
    with open_store(spec.store) as store:
        runs = [info for info in store.runs() if all(info.config.get(key) == value for key, value in same.items())]
    if not runs:
        raise DataError(
            f"{spec.store}: expected a training run of the policy {spec.policy.name!r} in the system {spec.mas.name!r} "
            "with the given sampling and seed, found none; call grow first"
        )
    return runs


def teach(
    source: Callable[[], Iterator[LabeledTree]],
    out: Path,
    kind: CriticKind,
    head: Head,
    base: str = "tiny",
    view: View = "full",
    /,
    *,
    pairs_per_tree: int = 8,
    same: str | Same | None = None,
    min_continuations: int | None = None,
    log: Callable[[str], None] = lambda line: None,
    **settings: Any,
) -> Trained:
    """Mine trees and train a critic on them, with the arguments of `rewardmodels.collect` and `train`.

    Repeating the call resumes, or returns the trained critic at once. ``source`` is called once per pass.
    """
    wanted = TrainingConfig(kind=kind, head=head).data_kind

    def mined(what: DataKind) -> RewardData:
        return collect(source(), what, view, pairs_per_tree, same, min_continuations)

    data = mined(wanted)
    for name, counts in histogram(data).items():
        log(f"{data.kind} by {name}: " + ", ".join(f"{key} {number:,}" for key, number in counts.items()))
    points = mined("points") if wanted == "pairs" else None
    options = {**settings, "kind": kind, "head": head, "view": view, "points": points, "log": log}
    return train(data, out, base, **options)
