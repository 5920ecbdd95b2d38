"""Agent programs: search over agents written in any framework, with branches at their model calls.

A program answers a question by calling a chat model. Only the base URL of these calls changes, to the URL of a gateway.
Each call is a decision of the search::

    from mas_gym.programs import Program

    plans = search.run("mcts:10,3", task, program="my_agents.py:solve", policy=policy, critic=critic)
    program = Program("python my_agents.py", files=["my_agents.py"], agents=["Writer", "Critic"])
"""

from typing import TYPE_CHECKING

from mas_gym.internal.lazy import lazy_names

if TYPE_CHECKING:
    from mas_gym.programs.chat_completions import AGENT_HEADER as AGENT_HEADER
    from mas_gym.programs.chat_completions import Call as Call
    from mas_gym.programs.execution import DivergenceError as DivergenceError
    from mas_gym.programs.program import Program as Program
    from mas_gym.programs.program import load_program as load_program
    from mas_gym.programs.recorded_tools import recorded as recorded
    from mas_gym.programs.replay import ProgramSession as ProgramSession
    from mas_gym.programs.runner import ProgramError as ProgramError
    from mas_gym.programs.runner import Runner as Runner
    from mas_gym.programs.worlds import Folder as Folder
    from mas_gym.programs.worlds import World as World

__getattr__, __dir__, __all__ = lazy_names(__name__)
