"""Train the agents with agent-lightning: a rollout is a search, and each message is a call with its credit as reward.

Run ``pip install agentlightning``, serve the agents' model with vLLM, and start the script with the server's URL::

    python examples/trainers/agent_lightning.py http://127.0.0.1:8000/v1 MODEL

It prints the transitions that agent-lightning's algorithms train on; ``agentlightning.Trainer`` takes ``searched``.
"""

import asyncio
import sys
import tempfile

import agentlightning as agl

import mas_gym
import search
from mas_gym.policies import load_policy
from mas_gym.policies.token_traces import traced
from rewardmodels.agents import CreditedSample, sampled_messages

TASK = mas_gym.load_task("arithmetic", split="train", limit=200)


def messages_of(problem_id: str, llm: agl.LLM) -> list[CreditedSample]:
    with tempfile.TemporaryDirectory() as folder:
        policy, store = traced(load_policy(f"openai:{llm.model}@{llm.endpoint}"), folder), f"{folder}/trees.db"
        options = {"policy": policy, "store": store, "training": True, "seed": 0, "raise_errors": True}
        list(search.run("siblings:2", [TASK.problem(problem_id)], mas="rpsv", **options)), policy.close()
        return sampled_messages(store, folder, "leave-one-out")[0][1]


@agl.rollout
async def searched(task: str, llm: agl.LLM) -> None:
    """Search the problem with this id, and emit each message as a model call, followed by its credit."""
    messages, tracer = await asyncio.to_thread(messages_of, task, llm), agl.get_active_tracer()
    for number, one in enumerate(messages):
        ids = {"prompt_token_ids": one.trace.prompt, "response_token_ids": one.trace.completion}
        name = {"gen_ai.response.id": f"{task}-{number}", "agent": one.agent}
        with tracer.operation_context("openai.chat.completion", {**ids, **name}):
            pass
        agl.emit_reward(one.advantage)


async def transitions(problem_id: str, llm: agl.LLM) -> list[agl.Triplet]:
    """Run one rollout as a trainer does, and return its transitions."""
    store, runner = agl.InMemoryLightningStore(), agl.LitAgentRunner(agl.OtelTracer())
    with runner.run_context(agent=searched, store=store):
        rollout = await runner.step(problem_id, resources={"llm": llm}, mode="train")
    return agl.TracerTraceToTriplet().adapt(await store.query_spans(rollout.rollout_id))


if __name__ == "__main__":
    for one in asyncio.run(transitions(TASK[0].id, agl.LLM(endpoint=sys.argv[1], model=sys.argv[2]))):
        print(one.reward, one.response["token_ids"])
