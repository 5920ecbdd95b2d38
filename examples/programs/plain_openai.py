"""Reader, Planner, Solver and Verifier in plain `openai`, searched without a change: run `python plain_openai.py`.

The program has no code for the search. It receives a client whose base URL is the gateway of the search, uses it like
any client, and returns the answer.
"""

from openai import AsyncOpenAI

READER = "You are the Reader. Extract key facts and restate the question."
PLANNER = "You are the Planner. Propose a concise plan to solve the task."
SOLVER = "You are the Solver. Carry out the plan and compute results."
VERIFIER = "You are the Verifier. Double-check the result and produce the final answer only."


async def solve(question: str, client: AsyncOpenAI) -> str:
    async def ask(system: str, *inputs: str) -> str:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "\n\n".join(inputs)}]
        reply = await client.chat.completions.create(model="agent", messages=messages)
        return reply.choices[0].message.content

    facts = await ask(READER, question)
    plan = await ask(PLANNER, question, facts)
    result = await ask(SOLVER, plan)
    return await ask(VERIFIER, question, result)


if __name__ == "__main__":
    import mas_gym
    import search
    from mas_gym.policies import load_policy

    task = mas_gym.load_task("arithmetic", split="test", limit=10)
    table = search.compare(["single", "sc:5"], task, program=solve, policy=load_policy("tiny"))
    print(table)
