"""Policies generate the messages of agents; `mas_gym.policies.base` documents the interface.

Importing this package loads neither a model nor torch; `load_policy` imports torch only for policies that need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mas_gym.internal.lazy import lazy_names

if TYPE_CHECKING:
    from mas_gym.policies.base import AsyncPolicy as AsyncPolicy
    from mas_gym.policies.base import Policy as Policy
    from mas_gym.policies.base import Sample as Sample
    from mas_gym.policies.base import SamplingReply as SamplingReply
    from mas_gym.policies.base import SamplingRequest as SamplingRequest
    from mas_gym.policies.base import SamplingSession as SamplingSession
    from mas_gym.policies.base import StreamingPolicy as StreamingPolicy
    from mas_gym.policies.batch_queue import as_policy as as_policy
    from mas_gym.policies.cache import RecordedPolicy as RecordedPolicy
    from mas_gym.policies.cache import RecordingPolicy as RecordingPolicy
    from mas_gym.policies.local.transformers import TransformersPolicy as TransformersPolicy
    from mas_gym.policies.registry import known_policies as known_policies
    from mas_gym.policies.registry import load_policy as load_policy
    from mas_gym.policies.scripted import ScriptedPolicy as ScriptedPolicy

__getattr__, __dir__, __all__ = lazy_names(__name__)
