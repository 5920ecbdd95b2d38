"""Reader, Planner, Solver and Verifier as a LangGraph graph: only `base_url` comes from the search.

Needs `pip install langgraph langchain-openai`; search it with
`mas-gym eval --program examples/programs/langgraph_agents.py:solve -n 20 --planner sc:5`.
"""

from typing import TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

READER = "You are the Reader. Extract key facts and restate the question."
PLANNER = "You are the Planner. Propose a concise plan to solve the task."
SOLVER = "You are the Solver. Carry out the plan and compute results."
VERIFIER = "You are the Verifier. Double-check the result and produce the final answer only."


class State(TypedDict, total=False):
    """The agents' messages."""

    question: str
    facts: str
    plan: str
    result: str
    answer: str


def build(model: ChatOpenAI):
    async def ask(system: str, *inputs: str) -> str:
        reply = await model.ainvoke([("system", system), ("user", "\n\n".join(inputs))])
        return reply.content

    async def read(state: State) -> State:
        return {"facts": await ask(READER, state["question"])}

    async def plan(state: State) -> State:
        return {"plan": await ask(PLANNER, state["question"], state["facts"])}

    async def work(state: State) -> State:
        return {"result": await ask(SOLVER, state["plan"])}

    async def verify(state: State) -> State:
        return {"answer": await ask(VERIFIER, state["question"], state["result"])}

    graph = StateGraph(State)
    steps = [read, plan, work, verify]
    for before, node in zip([START, *(step.__name__ for step in steps)], steps, strict=False):
        graph.add_node(node.__name__, node)
        graph.add_edge(before, node.__name__)
    graph.add_edge("verify", END)
    return graph.compile()


async def solve(question: str, base_url: str) -> str:
    graph = build(ChatOpenAI(model="agent", base_url=base_url, api_key="any"))
    return (await graph.ainvoke({"question": question}))["answer"]
