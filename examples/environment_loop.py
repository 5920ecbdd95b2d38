"""A minimal environment loop: four agents, one word problem, no model and no data.

Run ``python examples/environment_loop.py``.
"""

import gymnasium as gym

import mas_gym  # noqa: F401 - importing it registers the ids


def main() -> None:
    env = gym.make("MAS-Arithmetic-v0", render_mode="ansi")
    mas = env.unwrapped
    observation, info = env.reset(seed=0)
    print(f"{info['problem_id']}: {observation['question']}\n")

    terminated = False
    while not terminated:
        # The prompt for a language model, and the mask of its legal recipients.
        system, _user = observation["messages"]
        print(f"{info['agent']} has the prompt {system.content!r} and the action mask {info['action_mask']}")
        text = "Final Answer: 42" if info["agent"] == "Verifier" else f"A message from {info['agent']}."
        observation, reward, terminated, _, info = env.step((text, mas.ALL))

    print(f"\n{env.render()}\n")
    print(f"reward {reward:+.0f}, extracted answer: {info['extracted']}, correct: {info['correct']}")


if __name__ == "__main__":
    main()
