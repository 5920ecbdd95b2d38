"""The model card of trained agents."""

from __future__ import annotations

from rewardmodels.agents.config import AgentConfig
from rewardmodels.data.cards import PLACEHOLDER, facts_table, markdown, metadata

_LEARNED = {
    "sft": "the messages of the best correct transcripts that search found (expert iteration)",
    "dpo": "pairs of replies to one prompt; the preferred reply led to correct answers more often in search",
    "grpo": "messages sampled by the agents, with an advantage for each message as credit",
}


def agent_card(config: AgentConfig, base: str, agents: dict[str, int], rows: int, versions: dict[str, str]) -> str:
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
        facts_table(config.to_dict()),
        "## Versions",
        "\n".join(f"- {package} {number}" for package, number in versions.items()),
        "## Limits",
        "The agents were trained with one task, graph and set of prompts, and were not evaluated with others.",
    )
