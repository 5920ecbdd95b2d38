"""Agent training: reads examples and saves folders that `load_policy` loads."""

from __future__ import annotations

import json
import logging
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mas_gym.errors import ConfigError, DataError, PromptTooLongError, need
from mas_gym.internal.json_types import JSONObject
from rewardmodels.agents.config import AgentConfig, agent_config
from rewardmodels.agents.examples import CreditedSample, Demonstration, Example, Preference
from rewardmodels.data.cards import PLACEHOLDER, facts_table, markdown, metadata
from rewardmodels.data.dataset import fingerprint
from rewardmodels.model.backbone import base_path, load_pretrained, load_tokenizer, quiet
from rewardmodels.model.critic_folder import digest_of_weights, save_files, write_model, write_whole
from rewardmodels.training.train_critic import RUN, claim_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger("rewardmodels.agents")

STATE = "training"
"""Folder next to the weights with the state of the run: its settings, checkpoints, metrics and TensorBoard curves.

The model's folder contains nothing else, so that its identity depends only on the model.
"""
METRICS = "metrics.json"
ALL = "*"
_PACKAGES = ("mas-gym", "trl", "transformers", "torch")
_EXAMPLES = {"sft": Demonstration, "dpo": Preference, "grpo": CreditedSample}


class TrainedAgents(NamedTuple):
    """Trained agents.

    Attributes:
        folders: Model folder by agent; ``"*"`` stands for all agents.
        others: Base model of the agents without examples.
        metrics: Training data, loss, and digest of the ``weights`` of each model.
    """

    folders: dict[str, Path]
    others: str
    metrics: dict[str, JSONObject]

    @property
    def policy(self) -> str:
        """The agents as a policy spec for ``--policy`` and `mas_gym.policies.load_policy`."""
        return policy_spec({ALL: self.others, **{agent: str(folder) for agent, folder in self.folders.items()}})


def policy_spec(models: Mapping[str, str]) -> str:
    """Return the policy spec for a mapping from agents to models; ``"*"`` stands for all other agents.

    >>> policy_spec({"*": "tiny", "Solver": "models/agents/Solver"})
    '{"*": "tiny", "Solver": "transformers:models/agents/Solver"}'
    """
    specs = {agent: model if model == "tiny" else f"transformers:{model}" for agent, model in models.items()}
    return specs[ALL] if list(specs) == [ALL] else json.dumps(specs)


def train_agents(
    examples: Sequence[Example],
    out: str | Path,
    method: str,
    base: str | Mapping[str, str] = "tiny",
    device: str | None = None,
    log: Callable[[str], None] = lambda line: None,
    **overrides: Any,
) -> TrainedAgents:
    """Train agents on the results of searches.

    Repeating the call resumes from the last checkpoint and gives the same weights; a finished run returns immediately.

    Args:
        examples: The method's examples, from `rewardmodels.agents.examples`.
        out: Folder of the model; with ``adapters="per-agent"``, it contains one model folder per agent.
        method: ``"sft"``, ``"dpo"`` or ``"grpo"``.
        base: ``"tiny"``, or a folder or hub id; with ``adapters="per-agent"`` also a mapping from agents to bases.
        device: ``"cpu"`` or ``"cuda"``; None uses a GPU if there is one.
        log: Receives progress lines.
        overrides: Fields of `AgentConfig`; the other fields depend on the method and the size of the base model.

    Raises:
        ConfigError: A setting is invalid, or ``out`` belongs to another run.
        DataError: The examples or the base cannot be used.
        TrainingError: The loss is not finite, or the disk is full.
        MissingDependencyError: A package is not installed.
    """
    for package in ("trl", "accelerate", "tensorboard"):
        need(package, "training agents", "agents")
    import torch

    if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {device!r}: expected a GPU, found none; leave out --device to train on the CPU")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    # Both are checked before a model is loaded.
    agent_config(method, 0, overrides)
    if wrong := next((one for one in examples if not isinstance(one, _EXAMPLES[method])), None):
        raise ConfigError(
            f"method {method!r}: expected examples of type {_EXAMPLES[method].__name__}, got {wrong!r:.80}"
        )
    if not examples:
        raise DataError("expected examples to learn from, got none")
    parts: dict[str, list[Example]] = {ALL: list(examples)}
    if overrides.get("adapters") == "per-agent":
        parts = defaultdict(list)
        for example in examples:
            parts[example.agent].append(example)
    elif not isinstance(base, str):
        raise ConfigError("expected one base model for shared weights, got a mapping; pass adapters='per-agent'")
    found = TrainedAgents({}, base if isinstance(base, str) else base.get(ALL, "tiny"), {})
    for agent, own in parts.items():
        folder = Path(out) if agent == ALL else Path(out) / re.sub(r"[^\w.-]", "_", agent)
        start = base if isinstance(base, str) else base.get(agent, found.others)
        if agent != ALL:
            log(f"{agent}: {len(own):,} examples")
        found.folders[agent] = folder
        found.metrics[agent] = _train_one(own, folder, method, start, device, log, overrides)
    return found


def _train_one(
    examples: Sequence[Example],
    out: Path,
    method: str,
    base: str,
    device: str,
    log: Callable[[str], None],
    overrides: Mapping[str, object],
) -> JSONObject:
    import torch

    from mas_gym.policies.local.forward import threads_for

    # bitsandbytes warns about missing hub kernels, which are not needed here.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    source = base_path(base)
    tokenizer = load_tokenizer(source)
    dtype = torch.float32 if device == "cpu" or not overrides.get("lora_rank", 1) else torch.bfloat16
    model, _ = load_pretrained("AutoModelForCausalLM", source, dtype)
    parameters = model.num_parameters()
    config = agent_config(method, parameters, dict(overrides))
    settings = {
        "settings": asdict(config),
        "data": fingerprint(str(len(examples)), examples),
        "base": base,
        "start": digest_of_weights(Path(source)) if Path(source).is_dir() else source,
    }
    state = out / STATE
    claim_folder(out, state / RUN, settings)
    if (state / METRICS).exists():
        log(f"{out} is already trained")
        return dict(json.loads((state / METRICS).read_text(encoding="utf-8")))
    rows = _encoded(examples, tokenizer, model)
    counts = dict(Counter(example.agent for example in examples))
    card = _card(config, base, counts, len(rows), {name: version(name) for name in _PACKAGES})
    with quiet(), threads_for(parameters):
        history, drift = _fit(config, rows, model.to(device), tokenizer, out, device, card, log)
    metrics: JSONObject = {
        "weights": digest_of_weights(out),
        "examples": len(examples),
        "skipped, too long": len(examples) - len(rows),
        "examples by agent": counts,
        "drift at sampling": drift,
        "history": history,
    }
    if os.environ.get("RANK", "0") == "0":
        write_whole(state / METRICS, json.dumps(metrics, indent=2))
    return metrics


def _fit(
    config: AgentConfig,
    rows: list[dict[str, Any]],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    device: str,
    card: str,
    log: Callable[[str], None],
) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Train, save the model, and return the logged losses and the drift of the log-probabilities."""
    from rewardmodels.agents.trl_trainers import CreditTrainer, make_trainer
    from rewardmodels.training.checkpoints import Curves

    curves = Curves(out / STATE / "curves", log)
    trainer = make_trainer(config, rows, model, tokenizer, out / STATE / "checkpoints", device, curves)
    drift: dict[str, float] = {}
    if isinstance(trainer, CreditTrainer):
        drift = trainer.drift(rows, config.max_rows)
        log(
            "log-probabilities at sampling differ from the training forward pass by "
            f"{drift['mean']:.2g} nats per token on average, {drift['largest']:.2g} at most"
        )
        if drift["mean"] > config.max_drift:
            logger.warning(
                "log-probabilities at sampling differ from the training forward pass by %.3g nats per token, more than "
                "max_drift=%g: the samples come from other weights than the base, or the engine's numerics differ",
                drift["mean"],
                config.max_drift,
            )
    trainer.resume(log)
    history = [
        {key: value for key, value in line.items() if isinstance(value, int | float)}
        for line in trainer.state.log_history
        if "loss" in line
    ]
    if trainer.is_world_process_zero():
        trained = trainer.accelerator.unwrap_model(trainer.model)

        def write(fresh: Path) -> None:
            write_model(trained, tokenizer, fresh, card, lambda adapted: adapted.merge_and_unload())

        save_files(out, write, "config.json", "model")
    trainer.accelerator.wait_for_everyone()
    return history, drift


def _encoded(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
) -> list[dict[str, object]]:
    """Return the rows of a trainer; rows that exceed the model's context window are omitted."""
    from mas_gym.policies.local.chat import ChatFormat
    from mas_gym.policies.local.transformers import context_window

    window = context_window(model)
    format = ChatFormat(tokenizer, window)

    def said(text: str) -> list[int]:
        return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    rows: list[dict[str, Any]] = []
    for one in examples:
        if isinstance(one, CreditedSample):
            prompt, ends = list(one.trace.prompt), [list(one.trace.completion)]
            row = {"completion_ids": ends[0], "logprobs": list(one.trace.logprobs), "advantage": one.advantage}
        else:
            texts = [one.text] if isinstance(one, Demonstration) else [one.chosen, one.rejected]
            ends = [said(text) for text in texts]
            try:
                prompt = format.encode(one.prompt, max(map(len, ends))).ids
            except PromptTooLongError:
                continue
            row = {"chosen_ids": ends[0], "rejected_ids": ends[-1]}
        if len(prompt) + max(map(len, ends)) > window:
            continue
        if isinstance(one, Demonstration):
            rows.append({"input_ids": prompt + ends[0], "labels": [-100] * len(prompt) + ends[0]})
        else:
            rows.append({"prompt_ids": prompt, **row})
    if not rows:
        raise DataError(
            f"expected examples that fit the model's context window of {window} tokens, got only longer examples; use "
            "shorter examples or a model with a larger window"
        )
    return rows


_LEARNED = {
    "sft": "the messages of the best correct transcripts that search found (expert iteration)",
    "dpo": "pairs of replies to one prompt; the preferred reply led to correct answers more often in search",
    "grpo": "messages sampled by the agents, with an advantage for each message as credit",
}


def _card(config: AgentConfig, base: str, agents: dict[str, int], rows: int, versions: dict[str, str]) -> str:
    """Return the card as Markdown, with the metadata header that model hubs read."""
    credit = f" Credit: `{config.credit}`." if config.method == "grpo" else ""
    return markdown(
        metadata(
            library_name="transformers",
            pipeline_tag="text-generation",
            tags="[mas-gym, multi-agent, trl]",
        ),
        f"# Agents trained by {config.method.upper()}: {', '.join(agents)}",
        f"Trained from {base} with TRL on {rows:,} rows: {_LEARNED[config.method]}.{credit} Correctness was "
        "determined by the reference answers of the training split.",
        f"```console\nmas-gym eval --policy transformers:{PLACEHOLDER}\n```",
        "The folder contains complete weights, which transformers and vLLM can load"
        + ("; `adapter/` contains only the LoRA adapter." if config.lora_rank else "."),
        "## Examples",
        facts_table(agents),
        "## Settings",
        facts_table(asdict(config)),
        "## Versions",
        "\n".join(f"- {package} {number}" for package, number in versions.items()),
        "## Limits",
        "The agents were trained with one task, graph and set of prompts, and were not evaluated with others.",
    )
