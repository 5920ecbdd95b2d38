"""Your own policy: any function from a chat prompt to a text can generate the agents' messages.

Replace ``write`` by a call to your model or API. For a service with many open requests at once,
define ``async def sample_async(self, request)`` instead of ``sample``; see `mas_gym.policies.AsyncPolicy`.
Run ``python examples/own_policy.py``, or use it from the command line:
``mas-gym eval --policy examples/own_policy.py:Calculator --planner sc:5``.
"""

import random
import re

import mas_gym
import search
from mas_gym.policies import Sample, SamplingReply


class Calculator:
    """Adds or subtracts the numbers of the question, and sometimes forgets one."""

    name = "calculator"
    max_batch = 64

    def sample(self, requests):
        """Return a reply to every request, in order, with one sample per seed."""
        return [SamplingReply(tuple(self._sample(request, seed) for seed in request.seeds)) for request in requests]

    def _sample(self, request, seed):
        text = self.write(request.messages[-1].content, random.Random(seed))
        # The log-probability is None, because a calculator has none; policy likelihood cannot be used.
        return Sample(text, tokens=len(text.split()), logprob=None, finish_reason="stop")

    def write(self, prompt: str, rng: random.Random) -> str:
        """Return one message. It depends only on the prompt and the seed, so runs can be repeated."""
        words = re.findall(r"\b(loses|gives|eats)\b|(\d+)", prompt)
        total, sign = 0, 1
        for lost, number in words:
            if lost:
                sign = -1
            elif rng.random() < 0.9:
                total, sign = total + sign * int(number), 1
        return f"Final Answer: {total}"


def main(problems: int = 50) -> None:
    """Run it as a single agent, once and with a majority vote over five samples."""
    task = mas_gym.load_task("arithmetic", split="test")[:problems]
    for planner in ("single", "sc:5"):
        plans = list(search.run(planner, task, mas="single", policy=Calculator()))
        print(f"{planner:7} {sum(bool(plan.correct) for plan in plans)} of {len(plans)} right")


if __name__ == "__main__":
    main()
