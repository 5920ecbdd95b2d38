"""The Gymnasium ids, each a pair of a task and a multi-agent system."""

from __future__ import annotations

from gymnasium.envs.registration import register, registry

ENVIRONMENTS = {
    "MAS-GSM8K-v0": ("gsm8k", "rpsv"),
    "MAS-GSM8K-Single-v0": ("gsm8k", "single"),
    "MAS-GSM8K-Refine-v0": ("gsm8k", "refine"),
    "MAS-GSM8K-Consensus-v0": ("gsm8k", "consensus"),
    "MAS-GSM8K-DyLAN-v0": ("gsm8k", "dylan"),
    "MAS-MATH-v0": ("math", "rpsv"),
    "MAS-MMLU-v0": ("mmlu", "debate"),
    "MAS-LogiQA-v0": ("logiqa", "logic"),
    "MAS-Arithmetic-v0": ("arithmetic", "rpsv"),
    "MAS-Arithmetic-Single-v0": ("arithmetic", "single"),
    "MAS-Arithmetic-Refine-v0": ("arithmetic", "refine"),
    "MAS-Arithmetic-Consensus-v0": ("arithmetic", "consensus"),
    "MAS-Arithmetic-DyLAN-v0": ("arithmetic", "dylan"),
    "MAS-Ordering-v0": ("ordering", "logic"),
    "MAS-Ordering-Debate-v0": ("ordering", "debate"),
}
"""Every registered id with its task and MAS; both can be overridden in ``gym.make``."""


def register_environments() -> None:
    """Register every id once; the first ``gym.make`` imports the environment."""
    for env_id, (task, mas) in ENVIRONMENTS.items():
        if env_id not in registry:
            register(env_id, entry_point="mas_gym.env:MASEnv", kwargs={"task": task, "mas": mas})
