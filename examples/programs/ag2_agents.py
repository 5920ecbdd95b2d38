"""Reader, Planner, Solver and Verifier with AG2: only `base_url` comes from the search.

Needs `pip install "ag2[openai]"`; search it with
`mas-gym eval --program examples/programs/ag2_agents.py:solve -n 20 --planner sc:5`.
"""

from ag2 import Agent
from ag2.config import OpenAIConfig

PROMPTS = {
    "Reader": "You are the Reader. Extract key facts and restate the question.",
    "Planner": "You are the Planner. Propose a concise plan to solve the task.",
    "Solver": "You are the Solver. Carry out the plan and compute results.",
    "Verifier": "You are the Verifier. Double-check the result and produce the final answer only.",
}


async def solve(question: str, base_url: str) -> str:
    config = OpenAIConfig(model="agent", base_url=base_url, api_key="any")
    agents = {name: Agent(name, prompt=prompt, config=config) for name, prompt in PROMPTS.items()}

    async def ask(name: str, *inputs: str) -> str:
        reply = await agents[name].ask("\n\n".join(inputs))
        return reply.body

    facts = await ask("Reader", question)
    plan = await ask("Planner", question, facts)
    result = await ask("Solver", plan)
    return await ask("Verifier", question, result)
