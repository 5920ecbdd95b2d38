"""A policy wrapper that returns equal replies to equal requests, so that the rows of a comparison are paired.

Each sample has a seed, but some servers ignore seeds or batch requests, which changes their samples. Without a response
cache, two searches that request the same sample would compare different messages, and pay for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mas_gym.internal.event_loop import together
from mas_gym.policies.base import AsyncPolicy, Choice, SamplingReply, SamplingRequest
from mas_gym.policies.cache import sample_key
from mas_gym.systems.prompts import ChatMessage


class SharedSamples(AsyncPolicy):
    """Remembers the replies of a policy in memory; a repeated reply has the same costs as the first one.

    Single samples are shared if they are independent, else whole replies.
    """

    def __init__(self, policy: AsyncPolicy) -> None:
        self.stand_for(policy)
        self.independent_samples = policy.independent_samples
        self.chooses = policy.chooses
        self._inner = policy
        self._replies: dict[tuple[str, ...], SamplingReply] = {}

    async def sample_async(self, request: SamplingRequest) -> SamplingReply:
        """Return the reply to one request. Raises `mas_gym.errors.PolicyError`."""
        if self.independent_samples is not True:
            return await self._remembered(request)
        replies = await together(self._remembered(replace(request, seeds=(seed,))) for seed in request.seeds)
        samples = tuple(sample for reply in replies for sample in reply.samples)
        counts = ((reply.prompt_tokens, reply.cached_tokens, reply.dropped_tokens) for reply in replies)
        return SamplingReply(samples, *map(sum, zip(*counts, strict=True)))

    async def choose_async(self, messages: Sequence[ChatMessage], words: Sequence[str]) -> Choice:
        """Return the inner policy's choice. Raises `mas_gym.errors.PolicyError`."""
        return await self._inner.choose_async(messages, words)

    async def _remembered(self, request: SamplingRequest) -> SamplingReply:
        key = tuple(sample_key(request, seed) for seed in request.seeds)
        if key not in self._replies:
            self._replies[key] = await self._inner.sample_async(request)
        return self._replies[key]
