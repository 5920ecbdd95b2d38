"""MAS-Gym: multi-agent LLM systems as Gymnasium environments.

Importing this package registers the environments as soon as gymnasium is also imported. Everything
else is imported on first access, so the import is fast and needs no optional package.

======================  ==========================================================
``load_mas``            a multi-agent system: a shipped name, a YAML path or a dict
``load_task``           a dataset of problems with its grader
``MASEnv``              the environment behind every registered id
``Dynamics``            the pure transition model of the environment
``CandidateChoice``     the environment as a ``Discrete(n)`` choice among proposals
``CandidateFeatures``   the same choice with numeric features instead of texts
``DenseReward``         reward shaping with a critic's values; leaves the optimal policy unchanged
``MASVectorEnv``        a vector environment that batches policy and critic requests
``aec_env``             the environment as a PettingZoo AEC environment
``mas_gym.testing``     checks for your own configs, policies, critics and planners
======================  ==========================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mas_gym.internal.lazy import lazy_names, when_imported

if TYPE_CHECKING:
    from mas_gym.envs.aec import aec_env
    from mas_gym.envs.env import MASEnv, Snapshot
    from mas_gym.envs.spaces import Records, Unicode
    from mas_gym.envs.vector import MASVectorEnv
    from mas_gym.envs.wrappers import CandidateChoice, CandidateFeatures, DenseReward
    from mas_gym.programs import recorded
    from mas_gym.systems.conditions import Condition
    from mas_gym.systems.dynamics import Dynamics
    from mas_gym.systems.graph import MAS, Agent, Edge, Q
    from mas_gym.systems.loading import load_mas, mas_names
    from mas_gym.systems.prompts import ChatMessage, chat_messages
    from mas_gym.systems.state import Action, LocalView, MASState, Message, Turn
    from mas_gym.tasks import load_task

__version__: str
_HOMES = {
    "mas_gym.envs.aec": "aec_env",
    "mas_gym.envs.env": "MASEnv Snapshot",
    "mas_gym.envs.spaces": "Records Unicode",
    "mas_gym.envs.vector": "MASVectorEnv",
    "mas_gym.envs.wrappers": "CandidateChoice CandidateFeatures DenseReward",
    "mas_gym.programs": "recorded",
    "mas_gym.systems.dynamics": "Dynamics",
    "mas_gym.systems.conditions": "Condition",
    "mas_gym.systems.graph": "Agent Edge MAS Q",
    "mas_gym.systems.loading": "load_mas mas_names",
    "mas_gym.systems.prompts": "ChatMessage chat_messages",
    "mas_gym.systems.state": "Action LocalView MASState Message Turn",
    "mas_gym.tasks": "load_task",
}

__all__ = [
    "MAS",
    "Action",
    "Agent",
    "CandidateChoice",
    "CandidateFeatures",
    "ChatMessage",
    "Condition",
    "DenseReward",
    "Dynamics",
    "Edge",
    "LocalView",
    "MASEnv",
    "MASState",
    "MASVectorEnv",
    "Message",
    "Q",
    "Records",
    "Snapshot",
    "Turn",
    "Unicode",
    "aec_env",
    "chat_messages",
    "load_mas",
    "load_task",
    "mas_names",
    "recorded",
]


ENVIRONMENTS = {
    "MAS-GSM8K-v0": ("gsm8k", "rpsv"),
    "MAS-GSM8K-Single-v0": ("gsm8k", "single"),
    "MAS-GSM8K-Refine-v0": ("gsm8k", "refine"),
    "MAS-GSM8K-Consensus-v0": ("gsm8k", "consensus"),
    "MAS-GSM8K-DyLAN-v0": ("gsm8k", "dylan"),
    "MAS-MATH-v0": ("math", "rpsv"),
    "MAS-MATH-Handoff-v0": ("math", "handoff"),
    "MAS-MMLU-v0": ("mmlu", "debate"),
    "MAS-LogiQA-v0": ("logiqa", "logic"),
    "MAS-GPQA-v0": ("gpqa", "debate"),
    "MAS-Arithmetic-v0": ("arithmetic", "rpsv"),
    "MAS-Arithmetic-Single-v0": ("arithmetic", "single"),
    "MAS-Arithmetic-Refine-v0": ("arithmetic", "refine"),
    "MAS-Arithmetic-Consensus-v0": ("arithmetic", "consensus"),
    "MAS-Arithmetic-DyLAN-v0": ("arithmetic", "dylan"),
    "MAS-Ordering-v0": ("ordering", "logic"),
    "MAS-Ordering-Debate-v0": ("ordering", "debate"),
    "MAS-Game24-v0": ("game24", "game24"),
}
"""Every registered id with its task and MAS; both can be overridden in ``gym.make``."""


CUSTOM = "MAS-Custom-v0"
"""The id for your own problems, as in ``gym.make("MAS-Custom-v0", task="my.csv")``."""

PROGRAM = "MAS-Program-v0"
"""The id of an environment for any agent program: ``gym.make(PROGRAM, program="my_agents.py:solve", task=...)``."""


def register_environments() -> None:
    """Register every id once; the first ``gym.make`` imports the environment."""
    from gymnasium.envs.registration import register, registry

    doors: Any = {"entry_point": "mas_gym.envs.env:MASEnv", "vector_entry_point": "mas_gym.envs.vector:make_vector"}
    for env_id, (task, mas) in ENVIRONMENTS.items():
        if env_id not in registry:
            register(env_id, **doors, kwargs={"task": task, "mas": mas})
    if CUSTOM not in registry:
        register(CUSTOM, **doors)
    if PROGRAM not in registry:
        register(PROGRAM, entry_point="mas_gym.programs.program_env:ProgramEnv")


when_imported("gymnasium.envs.registration", register_environments)


_public, __dir__ = lazy_names(__name__, _HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name on first access; ``__version__`` is ``"unknown"`` if the package is not installed."""
    return _installed() if name == "__version__" else _public(name)


def _installed() -> str:
    from importlib import metadata

    try:
        return metadata.version("mas-gym")
    except metadata.PackageNotFoundError:
        return "unknown"
