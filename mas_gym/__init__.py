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
    from mas_gym.envs.aec import aec_env as aec_env
    from mas_gym.envs.env import MASEnv as MASEnv
    from mas_gym.envs.env import Snapshot as Snapshot
    from mas_gym.envs.spaces import Records as Records
    from mas_gym.envs.spaces import Unicode as Unicode
    from mas_gym.envs.vector import MASVectorEnv as MASVectorEnv
    from mas_gym.envs.wrappers import CandidateChoice as CandidateChoice
    from mas_gym.envs.wrappers import CandidateFeatures as CandidateFeatures
    from mas_gym.envs.wrappers import DenseReward as DenseReward
    from mas_gym.programs import recorded as recorded
    from mas_gym.systems.conditions import Condition as Condition
    from mas_gym.systems.dynamics import Dynamics as Dynamics
    from mas_gym.systems.graph import MAS as MAS
    from mas_gym.systems.graph import Agent as Agent
    from mas_gym.systems.graph import Edge as Edge
    from mas_gym.systems.graph import Q as Q
    from mas_gym.systems.loading import load_mas as load_mas
    from mas_gym.systems.loading import mas_names as mas_names
    from mas_gym.systems.prompts import ChatMessage as ChatMessage
    from mas_gym.systems.prompts import chat_messages as chat_messages
    from mas_gym.systems.state import Action as Action
    from mas_gym.systems.state import LocalView as LocalView
    from mas_gym.systems.state import MASState as MASState
    from mas_gym.systems.state import Message as Message
    from mas_gym.systems.state import Turn as Turn
    from mas_gym.tasks import load_task as load_task

__version__: str


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


_public, __dir__, __all__ = lazy_names(__name__)


def __getattr__(name: str) -> Any:
    """Import a public name on first access; ``__version__`` is ``"unknown"`` if the package is not installed."""
    return _installed() if name == "__version__" else _public(name)


def _installed() -> str:
    from importlib import metadata

    try:
        return metadata.version("mas-gym")
    except metadata.PackageNotFoundError:
        return "unknown"
