"""A loop and a tool in plain `openai`: a calculator checks the Solver's steps, and the Verifier may return the work.

`mas-gym eval --program examples/programs/loop_with_tool.py:solve -n 20 --planner single --planner sc:5`
"""

import re

from openai import AsyncOpenAI

import mas_gym

READER = "You are the Reader. Extract key facts and restate the question."
PLANNER = "You are the Planner. Propose a concise plan to solve the task."
SOLVER = "You are the Solver. Carry out the plan and compute results."
VERIFIER = "You are the Verifier. Double-check the result and produce the final answer only."
ROUNDS = 3
STEP = re.compile(r"(\d+) *([-+*]) *(\d+) *= *(-?\d+)")


@mas_gym.recorded
def calculator(text: str) -> bool:
    """Return whether every step of a calculation is correct."""
    results = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    return all(results[sign](int(a), int(b)) == int(c) for a, sign, b, c in STEP.findall(text))


async def solve(question: str, client: AsyncOpenAI) -> str:
    async def ask(system: str, *inputs: str) -> str:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "\n\n".join(inputs)}]
        reply = await client.chat.completions.create(model="agent", messages=messages)
        return reply.choices[0].message.content

    facts = await ask(READER, question)
    for _ in range(ROUNDS):
        plan = await ask(PLANNER, question, facts)
        result = await ask(SOLVER, plan)
        answer = await ask(VERIFIER, question, result)
        # Sent back if a step is wrong, or if the Verifier disagrees with the Solver's last number.
        said, found = re.findall(r"-?\d+", answer), re.findall(r"-?\d+", result)
        if calculator(result) and said and found and said[-1] == found[-1]:
            break
    return answer
