"""A tree search that uses Gymnasium only: `step`, masks, `clone_state` and `restore_state`.

Agents guess the digits of the answer one after the other. UCT finds the path to the
reward within a fixed number of episodes, with one environment.
Run ``python examples/plain_tree_search.py``.
"""

import math
import random

import gymnasium as gym
import numpy as np

import mas_gym
from mas_gym.policies import ScriptedPolicy

CHILDREN = 8
EPISODES = 120
EXPLORATION = 1.0


class Node:
    """A snapshot with the statistics of its subtree."""

    def __init__(self, snapshot, mask) -> None:
        """Store the snapshot; children are created when first visited."""
        self.snapshot = snapshot
        self.actions = [int(action) for action in np.flatnonzero(mask)]
        self.children: dict[int, Node] = {}
        self.visits, self.value = 0, 0.0

    def uct(self, action: int) -> float:
        """Return the upper confidence bound of an action; infinite if it is untried."""
        child = self.children.get(action)
        if child is None:
            return math.inf
        return child.value / child.visits + EXPLORATION * math.sqrt(math.log(self.visits) / child.visits)


def episode(env, root: Node) -> float:
    """Descend by UCT to the end of an episode, add the new nodes, and back up the reward."""
    path, reward, terminated = [root], 0.0, False
    while not terminated:
        node = path[-1]
        action = max(node.actions, key=node.uct)
        env.restore_state(node.snapshot)
        _, reward, terminated, _, info = env.step(action)
        if action not in node.children:
            node.children[action] = Node(env.clone_state(), info["action_mask"])
        path.append(node.children[action])
    for node in path:
        node.visits += 1
        node.value += reward
    return reward


def propose(request, seed: int) -> str:
    """Replace a language model: the Reader guesses the tens, the Solver the ones; the others forward them."""
    rng = random.Random(seed)
    heard = request.messages[-1].content.split()[-1]
    if request.agent == "Reader":
        return f"tens: {rng.randint(0, 4)}"
    if request.agent == "Solver":
        return f"both digits: {int(heard) * 10 + rng.randint(0, 9)}"
    return f"Final Answer: {heard}" if request.agent == "Verifier" else f"go on with {heard}"


def main() -> None:
    base = gym.make("MAS-Arithmetic-v0", disable_env_checker=True)
    env = mas_gym.CandidateChoice(base, ScriptedPolicy(propose), n=CHILDREN, seed=1)
    observation, info = env.reset(seed=2)
    print(observation["question"])
    root = Node(env.clone_state(), info["action_mask"])

    rewards = [episode(env, root) for _ in range(EPISODES)]
    half = EPISODES // 2
    print(
        f"right in {rewards[:half].count(1.0)} of the first {half} episodes, {rewards[half:].count(1.0)} of the others"
    )

    env.restore_state(root.snapshot)
    node, terminated = root, False
    while not terminated:
        action = max(node.children, key=lambda a: node.children[a].visits)
        _, reward, terminated, _, info = env.step(action)
        node = node.children[action]
    print(f"the most visited path answers {info['extracted']}: reward {reward:+.0f}")


if __name__ == "__main__":
    main()
