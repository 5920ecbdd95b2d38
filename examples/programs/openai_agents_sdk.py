"""Reader, Planner, Solver and Verifier with the OpenAI Agents SDK: only the client comes from the search.

Needs `pip install openai-agents`; search it with
`mas-gym eval --program examples/programs/openai_agents_sdk.py:solve -n 20 --planner sc:5`.
"""

from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)

PROMPTS = {
    "Reader": "You are the Reader. Extract key facts and restate the question.",
    "Planner": "You are the Planner. Propose a concise plan to solve the task.",
    "Solver": "You are the Solver. Carry out the plan and compute results.",
    "Verifier": "You are the Verifier. Double-check the result and produce the final answer only.",
}


async def solve(question: str, client: AsyncOpenAI) -> str:
    model = OpenAIChatCompletionsModel(model="agent", openai_client=client)
    agents = {name: Agent(name=name, instructions=prompt, model=model) for name, prompt in PROMPTS.items()}

    async def run(name: str, *inputs: str) -> str:
        result = await Runner.run(agents[name], "\n\n".join(inputs))
        return result.final_output

    facts = await run("Reader", question)
    plan = await run("Planner", question, facts)
    result = await run("Solver", plan)
    return await run("Verifier", question, result)
