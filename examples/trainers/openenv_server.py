"""Serve `MASEnv` with OpenEnv, and compute the credit of messages from the rewards that the client receives.

Run ``pip install openenv-core``, then ``python examples/trainers/openenv_server.py``; it serves until it is stopped.
"""

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

import mas_gym
import search
from search.credit import Credit, credit


class Message(Action):
    text: str
    recipient: int | None = None  # None: every legal one


class Turn(Observation):
    agent: str  # the one to act next
    prompt: list[dict[str, str]]
    recipients: list[int]


class MASServer(Environment[Message, Turn, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.env = mas_gym.MASEnv("arithmetic", "rpsv", split="train")

    def reset(self, seed: int | None = None, episode_id: str | None = None, problem_id: str | None = None) -> Turn:
        return self.turn(*self.env.reset(seed=seed, options={"problem_id": problem_id}))

    def step(self, action: Message, timeout_s: float | None = None) -> Turn:
        recipient = self.env.ALL if action.recipient is None else action.recipient
        observation, reward, done, _, info = self.env.step((action.text, recipient))
        return self.turn(observation, info, reward=reward, done=done)

    def turn(self, observation: dict, info: dict, **outcome) -> Turn:
        prompt = [message._asdict() for message in observation["messages"]]
        return Turn(agent=info["agent"], prompt=prompt, recipients=info["action_mask"].nonzero()[0].tolist(), **outcome)

    @property
    def state(self) -> State:
        return State(episode_id=self.env.problem_id, step_count=self.env.state.depth)


def served_credit(client, plans: list[search.Plan]) -> list[tuple[Credit, ...]]:
    """Return the credit of the messages of search trees, with the rewards of the served environment."""
    rewards = {}
    for problem_id, end in [(plan.problem_id, one.state) for plan in plans for one in plan.candidates]:
        client.reset(problem_id=problem_id)
        rewards[end] = [client.step({"text": state.text}) for state in end.path()[1:]][-1].reward
    return credit(plans, "leave-one-out", reward=rewards.__getitem__)


if __name__ == "__main__":
    uvicorn.run(create_fastapi_app(MASServer, Message, Turn), host="127.0.0.1", port=8000)
