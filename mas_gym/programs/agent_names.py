"""The agent that makes a call: its name, and its index among the known agents."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mas_gym.programs.chat_completions import Call
from mas_gym.systems.graph import Agent

OTHERS = "other agents"
"""The last agent of a program with agents found in a dry run: it represents all agents that were not found."""

_ROLE = re.compile(r"(?i)\byou are (?:an? |the |our )?([^\n.,:;!?()]{1,60})")
_WITH_WHAT = re.compile(r"(?i) (?:who|whose|that|which|with|managing|tasked|responsible|specialized|specialised)\b")
_LONGEST_NAME = 40


def agent_name(call: Call) -> str:
    """Return the name of the agent that makes a call, based only on the call.

    The sources of the name, in order: the header or metadata; "You are ..." in the system prompt; the calling node of a
    graph; the beginning of the system prompt; the model.

    >>> from mas_gym.systems.prompts import ChatMessage
    >>> agent_name(Call((ChatMessage("system", "You are the Planner. Propose a plan."),)))
    'Planner'
    """
    if call.agent:
        return call.agent[:_LONGEST_NAME]
    found = _ROLE.search(call.system[:500])
    name = _WITH_WHAT.split(found[1], 1)[0] if found else call.node or call.system or call.model or "agent"
    return shortened(name)


def shortened(name: str) -> str:
    """Return a name on one line, cut at a word boundary to at most 40 characters."""
    words = " ".join(name.split())
    return words if len(words) <= _LONGEST_NAME else words[:_LONGEST_NAME].rpartition(" ")[0] or words[:_LONGEST_NAME]


def comparable(name: str) -> str:
    """Normalize a name for comparison: "math agent" in a prompt corresponds to the node ``math_agent``."""
    return name.replace("_", " ").casefold()


def agent_of_call(call: Call, agents: Sequence[Agent], texts: Sequence[str]) -> int | None:
    """Return the index of the agent that makes a call; None if that agent is unknown.

    Args:
        call: The call.
        agents: The known agents.
        texts: A part of each agent's system prompt, in the same order; empty if unknown.
    """
    for i, agent in enumerate(agents):
        if call.agent == agent.name or (not call.agent and call.system == agent.system_prompt.strip()):
            return i
    if not call.agent:
        for i, text in enumerate(texts):
            if any(text in message.content for message in call.messages if message.role == "system"):
                return i
    # A node has many names if its prompt depends on its input.
    for name in dict.fromkeys((agent_name(call), shortened(call.node))):
        for i, agent in enumerate(agents):
            if comparable(agent.name) == comparable(name):
                return i
    return 0 if len(agents) == 1 else None
