"""Your own critic: a rule that detects numbers missing from the messages.

A critic scores batches of states. Values may have any scale; larger values are better.
Run ``python examples/own_critic.py``, or use it from the command line:
``mas-gym eval --planner mcts:10,3 --critic examples/own_critic.py:NothingLost``.
"""

import re

import mas_gym
import search
from mas_gym.policies import load_policy


class NothingLost(search.Critic):
    """The share of the question's numbers that occur in the latest message with numbers."""

    name = "nothing-lost"
    free = True  # scoring costs no model call, so RC stays 0

    def score(self, contexts):
        """Return one value per state, in order."""
        return [self._score(context.state) for context in contexts]

    def _score(self, state):
        given = set(re.findall(r"\d+", state.question))
        for turn in reversed(state.turns):
            found = set(re.findall(r"\d+", turn.text.partition("Final Answer")[0]))
            if given and found:
                return len(given & found) / len(given)
        return 0.5


def main(problems: int = 50, planner: str = "mcts:10,3") -> None:
    """Run the same search with this critic and with a constant critic."""
    task = mas_gym.load_task("arithmetic", split="test")[:problems]
    policy = load_policy("tiny")
    for critic in (search.ConstantCritic(0.5), NothingLost()):
        plans = list(search.run(planner, task, mas="rpsv", policy=policy, critic=critic))
        print(f"{critic.name:14} {sum(bool(plan.correct) for plan in plans)} of {len(plans)} right")


if __name__ == "__main__":
    main()
