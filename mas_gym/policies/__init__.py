"""Policies generate the messages of agents; `mas_gym.policies.base` documents the interface.

Importing this package loads neither a model nor torch; `load_policy` imports torch only for policies that need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mas_gym.policies.base import (
    AsyncPolicy,
    Policy,
    Sample,
    SamplingReply,
    SamplingRequest,
    SamplingSession,
    StreamingPolicy,
    as_policy,
)
from mas_gym.policies.cache import RecordedPolicy, RecordingPolicy
from mas_gym.policies.registry import known_policies, load_policy
from mas_gym.policies.scripted import ScriptedPolicy
from mas_gym.policies.sessions import open_session

if TYPE_CHECKING:
    from mas_gym.policies.local.transformers import TransformersPolicy


def __getattr__(name: str) -> Any:
    # Torch and transformers are an optional extra and take seconds to import.
    if name == "TransformersPolicy":
        from mas_gym.policies.registry import local_module

        return local_module().TransformersPolicy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AsyncPolicy",
    "Policy",
    "RecordedPolicy",
    "RecordingPolicy",
    "Sample",
    "SamplingReply",
    "SamplingRequest",
    "SamplingSession",
    "ScriptedPolicy",
    "StreamingPolicy",
    "TransformersPolicy",
    "as_policy",
    "known_policies",
    "load_policy",
    "open_session",
]
