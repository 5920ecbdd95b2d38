"""Policies generate the messages of agents; `mas_gym.policies.base` documents the interface.

Importing this package loads neither a model nor torch; `load_policy` imports torch only for policies that need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mas_gym.internal.lazy import lazy_names

if TYPE_CHECKING:
    from mas_gym.policies.base import (
        AsyncPolicy,
        Policy,
        Sample,
        SamplingReply,
        SamplingRequest,
        SamplingSession,
        StreamingPolicy,
    )
    from mas_gym.policies.batch_queue import as_policy
    from mas_gym.policies.cache import RecordedPolicy, RecordingPolicy
    from mas_gym.policies.local.transformers import TransformersPolicy
    from mas_gym.policies.registry import known_policies, load_policy
    from mas_gym.policies.scripted import ScriptedPolicy

_HOMES = {
    "mas_gym.policies.base": (
        "AsyncPolicy Policy Sample SamplingReply SamplingRequest SamplingSession StreamingPolicy"
    ),
    "mas_gym.policies.batch_queue": "as_policy",
    "mas_gym.policies.cache": "RecordedPolicy RecordingPolicy",
    "mas_gym.policies.registry": "known_policies load_policy",
    "mas_gym.policies.scripted": "ScriptedPolicy",
}

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
]

_public, __dir__ = lazy_names(__name__, _HOMES)


def __getattr__(name: str) -> Any:
    if name == "TransformersPolicy":
        from mas_gym.policies.registry import local_module

        return local_module().TransformersPolicy
    return _public(name)
