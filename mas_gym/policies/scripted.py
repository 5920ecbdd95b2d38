"""A policy that takes its messages from a function, for tests and examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mas_gym.policies.base import Policy, Sample, SamplingReply, SamplingRequest

Script = Callable[[SamplingRequest, int], str | Sample]


class ScriptedPolicy(Policy):
    """A policy that calls ``script(request, seed)`` for each sample.

    If the script returns a string, each word counts as one token with log-probability -1.

    Args:
        script: A pure function, so that the same request gets the same reply.
        name: Name shown in reports.
        max_batch: As in `mas_gym.policies.Policy`.

    Examples:
        >>> from mas_gym.systems.prompts import ChatMessage
        >>> policy = ScriptedPolicy(lambda request, seed: f"{request.agent} says {seed % 10}")
        >>> request = SamplingRequest((ChatMessage("user", "14 + 3?"),), seeds=(17, 18), agent="Solver")
        >>> [sample.text for sample in policy.sample([request])[0].samples]
        ['Solver says 7', 'Solver says 8']
    """

    def __init__(self, script: Script, name: str = "scripted", max_batch: int = 256) -> None:
        self.script, self.name, self.max_batch = script, name, max_batch

    def identity(self) -> dict[str, str | Script]:
        """Return the name and the script."""
        return {"name": self.name, "script": self.script}

    def sample(self, requests: Sequence[SamplingRequest]) -> list[SamplingReply]:
        """Return the reply to every request, in order."""
        return [self._reply(request) for request in requests]

    def _reply(self, request: SamplingRequest) -> SamplingReply:
        prompt = sum(len(message.content.split()) for message in request.messages)
        return SamplingReply(tuple(_sample(self.script(request, seed)) for seed in request.seeds), prompt)


def _sample(said: str | Sample) -> Sample:
    if isinstance(said, Sample):
        return said
    tokens = max(1, len(said.split()))
    return Sample(said.strip(), tokens, -float(tokens), "stop")
