"""Train the agents with verl: an agent loop searches, and the reward of a message is its credit.

Run ``pip install verl cachetools``, and verl's trainer with ``rollout.n=30``, ``rollout.agent.num_workers=1``,
``rollout.agent.default_agent_loop=mas_gym``, ``algorithm.adv_estimator=message_credit`` and ``problem_id`` in each row.
"""

import asyncio
import tempfile

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register
from verl.trainer.ppo.core_algos import register_adv_est

import mas_gym
import search
from mas_gym.policies.base import AsyncPolicy, Sample, SamplingReply, SamplingRequest, TokenTrace
from mas_gym.policies.local.chat import ChatFormat
from mas_gym.policies.token_traces import traced
from rewardmodels.agents import sampled_messages

TASK, SEARCHES = mas_gym.load_task("arithmetic", split="train", limit=200), {}


class Servers(AsyncPolicy):
    def __init__(self, agent_loop: AgentLoopBase) -> None:
        self.agent_loop, self.format = agent_loop, ChatFormat(agent_loop.tokenizer, window=4096)
        self.identity = lambda: {"servers": "verl"}  # each search has a separate store and separate traces

    async def sample_async(self, request: SamplingRequest) -> SamplingReply:
        prompt, samples = self.format.encode(request.messages, request.max_new_tokens).ids, []
        options = {"temperature": request.temperature, "top_p": request.top_p, "max_tokens": request.max_new_tokens}
        for seed in request.seeds:
            options |= {"logprobs": True, "seed": seed % 2**31}
            call = self.agent_loop.server_manager.generate(str(seed), prompt_ids=prompt, sampling_params=options)
            reply = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self.agent_loop.loop))
            ids, trace = reply.token_ids, TokenTrace(tuple(prompt), tuple(reply.token_ids), tuple(reply.log_probs))
            samples.append(Sample(self.format.decode(ids), len(ids), sum(trace.logprobs), "stop", None, trace))
        return SamplingReply(tuple(samples), len(prompt))


@register("mas_gym")
class SearchLoop(AgentLoopBase):
    async def run(self, sampling_params: dict, *, uid: str, problem_id: str, **_) -> AgentLoopOutput:
        if uid not in SEARCHES:  # the first row of a group searches for all
            SEARCHES[uid] = asyncio.create_task(asyncio.to_thread(self.messages, problem_id))
        one = next(await SEARCHES[uid])
        prompt, ids, logprobs = map(list, one.trace)
        rest = {"response_logprobs": logprobs, "reward_score": one.advantage, "metrics": AgentLoopMetrics()}
        return AgentLoopOutput(prompt_ids=prompt, response_ids=ids, response_mask=[1] * len(ids), **rest)

    def messages(self, problem_id: str):
        with tempfile.TemporaryDirectory() as folder:
            policy, store, asked = traced(Servers(self), folder), f"{folder}/trees.db", [TASK.problem(problem_id)]
            options = {"policy": policy, "store": store, "training": True, "seed": 0, "raise_errors": True}
            list(search.run("siblings:2", asked, mas="rpsv", **options)), policy.close()
            return iter(sampled_messages(store, folder, "leave-one-out")[0][1])


@register_adv_est("message_credit")
def message_credit(token_level_rewards, response_mask, **_):
    return (token_level_rewards.sum(-1, keepdim=True) * response_mask,) * 2
