"""Your own multi-agent system: from YAML to an environment, and the errors of an invalid config.

Run ``python examples/own_mas.py``.
"""

from pathlib import Path

import gymnasium as gym

import mas_gym
from mas_gym.errors import ConfigError
from mas_gym.testing import check_mas

CONFIG = Path(__file__).with_name("own_mas.yaml")


def play(critic: str) -> None:
    """Play one episode in which the Critic sends this text."""
    env = gym.make("MAS-Arithmetic-v0", mas=str(CONFIG), render_mode="ansi")
    mas = env.unwrapped
    answer = f"Final Answer: {mas.task[0].answer}"
    env.reset(options={"problem_id": mas.task[0].id})
    terminated = False
    while not terminated:
        text = critic if mas.mas.agents[mas.state.acting].name == "Critic" else answer
        _, _, terminated, _, _ = env.step((text, mas.ALL))
    print(env.render(), end="\n\n")


def main() -> None:
    # The config is valid, every agent can act, and Gymnasium's checker passes.
    check_mas(CONFIG, texts=["REVISE: the sum is wrong."])
    play(critic="REVISE: recount.")
    play(critic="It is right. Final Answer: 0")

    # All errors are reported at once, each with its location and a fix.
    broken = mas_gym.load_mas(CONFIG).to_dict()
    broken["agents"][0]["max_new_tokens"] = 0
    broken["edges"] += [["Editor", "Writer"], ["Critic", "Editr"], [0, "sink", "regex:(?=REVISE)"]]
    try:
        mas_gym.load_mas(broken)
    except ConfigError as error:
        print(error)


if __name__ == "__main__":
    main()
