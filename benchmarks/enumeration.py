"""Every reply of the tiny agents and the exact expected reward of each state, for the row ``exact`` of `learning`.

At temperature 0.7 and top-p 0.95, each prompt has a few dozen replies. They are found with their probabilities by
branching at every token, so the expected reward of a state is an exact sum over replies. Replies less likely than a
floor are left out, and the remaining probabilities of the prompt are scaled to one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from mas_gym.systems.dynamics import Dynamics
from mas_gym.systems.prompts import ChatMessage, chat_messages
from mas_gym.systems.state import Action, MASState
from mas_gym.tasks.base import Problem, Task

Prompt = tuple[ChatMessage, ...]

TEMPERATURE, TOP_P = 0.7, 0.95
LONGEST = 96


class Reply(NamedTuple):
    """One message that an agent can write."""

    text: str
    tokens: int
    probability: float


class Enumerator:
    """Finds every reply of a local model to a prompt, above a least probability.

    Args:
        policy: A policy of `mas_gym.policies.local`.
        floor: Least probability of a reply.
    """

    def __init__(self, policy: Any, floor: float) -> None:
        """Take the model and the chat format of the policy."""
        self.policy, self.floor = policy, floor

    def replies(self, prompts: Sequence[Prompt]) -> list[list[Reply]]:
        """Return the replies to each prompt, most likely first; their probabilities sum to 1."""
        found: list[list[Reply]] = []
        with torch.inference_mode():
            for start in range(0, len(prompts), 64):
                found += self._batch(prompts[start : start + 64])
        return found

    def _batch(self, prompts: Sequence[Prompt]) -> list[list[Reply]]:
        model, format = self.policy.model, self.policy.format
        ids = [format.encode(prompt, LONGEST).ids for prompt in prompts]
        width = max(map(len, ids))
        tokens = torch.tensor([[0] * (width - len(row)) + row for row in ids])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
        owner, chance = torch.arange(len(ids)), torch.ones(len(ids), dtype=torch.float64)
        written = torch.empty((len(ids), 0), dtype=torch.long)
        cache = DynamicCache()
        ended: list[dict[str, tuple[int, float]]] = [{} for _ in ids]
        for _ in range(LONGEST):
            places = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
            out = model(tokens, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True)
            shares = chance[:, None] * nucleus(out.logits[:, -1].double() / TEMPERATURE)
            rows, choices = torch.nonzero(shares >= self.floor, as_tuple=True)
            owner, chance = owner[rows], shares[rows, choices]
            written = torch.cat([written[rows], choices[:, None]], 1)
            over = torch.isin(choices, torch.tensor(sorted(self.policy.end_tokens)))
            for row in torch.nonzero(over)[:, 0].tolist():
                text = format.decode(written[row, :-1].tolist())
                length, known = ended[owner[row]].get(text, (written.shape[1], 0.0))
                ended[owner[row]][text] = length, known + float(chance[row])
            if bool(over.all()):
                break
            rows, owner, chance, written = rows[~over], owner[~over], chance[~over], written[~over]
            cache.reorder_cache(rows)
            mask = torch.cat([mask[rows], torch.ones((len(rows), 1), dtype=mask.dtype)], 1)
            tokens = written[:, -1:]
        return [_scaled(replies) for replies in ended]


def _scaled(replies: Mapping[str, tuple[int, float]]) -> list[Reply]:
    total = math.fsum(chance for _, chance in replies.values())
    found = [Reply(text, tokens, chance / total) for text, (tokens, chance) in replies.items()]
    return sorted(found, key=lambda reply: -reply.probability)


def nucleus(logits: torch.Tensor) -> torch.Tensor:
    """Return the probabilities of the smallest set of likely tokens with a mass of `TOP_P`, scaled to one."""
    shares, order = torch.softmax(logits, 1).sort(1, descending=True)
    shares[(shares.cumsum(1) - shares) >= TOP_P] = 0
    return torch.zeros_like(shares).scatter_(1, order, shares / shares.sum(1, keepdim=True))


@dataclass
class Enumerated:
    """One problem with every reply of every agent.

    Attributes:
        problem: The problem.
        task: Grades the answers.
        model: The system's dynamics.
        replies: The replies to each prompt.
        truths: Expected reward, +1 or -1 for an answer, by the prompt of the agent to act.
    """

    problem: Problem
    task: Task
    model: Dynamics
    replies: dict[Prompt, list[Reply]] = field(default_factory=dict)
    truths: dict[Prompt, float] = field(default_factory=dict)

    def prompt(self, state: MASState) -> Prompt:
        return chat_messages(self.model.mas, state)

    def after(self, state: MASState, reply: Reply) -> MASState:
        return self.model.transition(state, Action(reply.text, self.model.mas.ALL))

    def reward(self, state: MASState) -> float:
        """Return the reward of a terminal state."""
        return 1.0 if self.task.grade(self.problem, state.text).correct else -1.0

    def truth(self, state: MASState) -> float:
        """Return the expected reward of a state.

        In RPSV the acting agent's input determines it, because each agent reads the question and the previous message.
        """
        if self.model.is_terminal(state):
            return self.reward(state)
        prompt = self.prompt(state)
        if prompt not in self.truths:
            ways = self.replies[prompt]
            self.truths[prompt] = math.fsum(one.probability * self.truth(self.after(state, one)) for one in ways)
        return self.truths[prompt]


def enumerate_problems(
    enumerator: Enumerator, task: Task, model: Dynamics, reached: Iterable[MASState] = ()
) -> list[Enumerated]:
    """Return the problems of a task with every reply, turn by turn for all problems at once.

    Args:
        enumerator: Finds the replies.
        task: The problems.
        model: The system's dynamics.
        reached: States that were sampled; the replies that follow are found even if a message before is too unlikely.
    """
    found = [Enumerated(problem, task, model) for problem in task]
    asking = {one.problem.question: one for one in found}
    sampled: dict[int, list[MASState]] = defaultdict(list)
    for state in reached:
        sampled[state.depth].append(state)
    states = [(one, model.initial_state(one.problem.question)) for one in found]
    for depth in range(model.max_depth):
        states += [(asking[state.question], state) for state in sampled[depth]]
        asked = {(one.problem.id, one.prompt(state)): (one, state) for one, state in states}
        states = []
        replies = enumerator.replies([prompt for _, prompt in asked])
        for (_, prompt), (one, state), ways in zip(asked, asked.values(), replies, strict=True):
            one.replies[prompt] = ways
            states += [(one, one.after(state, way)) for way in ways]
    return found
