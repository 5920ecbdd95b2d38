"""Agent programs: search over agents written in any framework, branched at their model calls.

A program turns a question into an answer by calling a chat model. It runs unchanged but for its base URL, which is a
gateway of ours; each of its calls becomes a decision of a search::

    from mas_gym.programs import Program

    plans = search.run("mcts:10,3", task, program="my_agents.py:solve", policy=policy, critic=critic)
    program = Program("python my_agents.py", files=["my_agents.py"], agents=["Writer", "Critic"])
"""

from mas_gym.programs.calls import AGENT_HEADER, Call
from mas_gym.programs.execution import DivergenceError
from mas_gym.programs.program import Program, load_program
from mas_gym.programs.recording import recorded
from mas_gym.programs.runner import ProgramError, Runner, Session

__all__ = [
    "AGENT_HEADER",
    "Call",
    "DivergenceError",
    "Program",
    "ProgramError",
    "Runner",
    "Session",
    "load_program",
    "recorded",
]
