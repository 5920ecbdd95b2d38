"""Agent programs: search over agents written in any framework, with branches at their model calls.

A program answers a question by calling a chat model. Only the base URL of these calls changes, to the URL of a gateway.
Each call is a decision of the search::

    from mas_gym.programs import Program

    plans = search.run("mcts:10,3", task, program="my_agents.py:solve", policy=policy, critic=critic)
    program = Program("python my_agents.py", files=["my_agents.py"], agents=["Writer", "Critic"])
"""

from mas_gym.programs.execution import DivergenceError
from mas_gym.programs.model_calls import AGENT_HEADER, Call
from mas_gym.programs.program import Program, load_program
from mas_gym.programs.recording import recorded
from mas_gym.programs.replay import ProgramError, Runner, Session
from mas_gym.programs.worlds import Folder, World

__all__ = [
    "AGENT_HEADER",
    "Call",
    "DivergenceError",
    "Folder",
    "Program",
    "ProgramError",
    "Runner",
    "Session",
    "World",
    "load_program",
    "recorded",
]
