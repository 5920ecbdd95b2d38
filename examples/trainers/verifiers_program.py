"""Run an agent program as a `verifiers` harness inside a search; both libraries record each model call.

Run ``pip install 'verifiers>=0.4,<0.5'``, then ``python examples/trainers/verifiers_program.py``.
"""

import sys
from pathlib import Path

import verifiers.v1 as vf
from openai import AsyncOpenAI

import mas_gym
import search
from mas_gym.policies import load_policy
from mas_gym.programs import Program
from search.credit import Credit, credit

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "programs")]
from plain_openai import solve

__all__ = ["ProgramHarness"]
TASK = mas_gym.load_task("arithmetic", split="train", limit=200)
PROBLEMS = {problem.question: problem for problem in TASK}


class ProgramHarness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            trace.info["answer"] = await solve(data.prompt, client)
        return vf.ProgramResult(0, trace.info["answer"], "")


class Question(vf.Task[vf.TaskData, vf.State]):
    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return 1.0 if TASK.grade(PROBLEMS[self.data.prompt], trace.info["answer"]).correct else -1.0


def searched(problems) -> tuple[list[vf.Trace], list[tuple[Credit, ...]]]:
    """Search over rollouts of `verifiers`; return their traces, and the credit of each call from their rewards."""
    traces, rewards = [], {}

    async def rollout(question: str, base_url: str) -> str:
        client = vf.EvalClientConfig(base_url=base_url, api_key_var="UNSET")  # the gateway of this execution
        agent = vf.Agent(vf.AgentConfig(harness={"id": "verifiers_program"}, runtime=vf.SubprocessConfig(),
                                        model="agent", client=client))  # fmt: skip
        traces.append(await agent.run(Question(vf.TaskData(prompt=question))))
        rewards[question, *(node.message.content for node in traces[-1].nodes if node.sampled)] = traces[-1].reward
        return traces[-1].info["answer"]

    options = {"policy": load_policy("tiny"), "training": True, "seed": 0, "raise_errors": True}
    plans = list(search.run("siblings:2", problems, program=Program(rollout, mas="rpsv"), **options))
    return traces, credit(plans, reward=lambda end: rewards[end.question, *(s.text for s in end.path()[1:])])


if __name__ == "__main__":
    print([round(one.advantage, 2) for one in searched(TASK[:1])[1][0]])
