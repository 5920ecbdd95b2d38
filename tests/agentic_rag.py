"""Agentic RAG in LangGraph: the model decides whether to search, a router grades, and one node is a graph itself."""

from typing import Any

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def find(query: str) -> str:
    """Find documents."""
    return f"Documents on {query}."


async def solve(question: str, base_url: str) -> str:
    """Return the last message of the graph."""
    model = ChatOpenAI(model="m", base_url=base_url, api_key="any")  # type: ignore[arg-type]

    async def respond(state: MessagesState) -> Any:
        return {"messages": [await model.bind_tools([find]).ainvoke(state["messages"])]}

    def grade(state: MessagesState) -> str:
        found = model.invoke([("user", f"Is this relevant? {state['messages'][-1].content}")])
        return "answer" if "yes" in str(found.content) else "rewrite"

    async def check(state: MessagesState) -> str:
        found = await model.ainvoke([("user", f"Is this right? {state['messages'][-1].content}")])
        return END if "yes" in str(found.content) else "rewrite"

    def rewrite(state: MessagesState) -> Any:
        # The role depends on the state, as in prompts made from templates.
        role = ("system", f"You are expert {len(state['messages'])}. Rewrite.")
        return {"messages": [("user", model.invoke([role, ("user", question)]).content)]}

    def draft(state: MessagesState) -> Any:
        return {"messages": [model.invoke([("user", f"Answer {question}: {state['messages'][-1].content}")])]}

    inner = StateGraph(MessagesState)
    inner.add_node(draft)
    inner.add_edge(START, "draft")
    graph = StateGraph(MessagesState)
    graph.add_node(respond)
    graph.add_node("retrieve", ToolNode([find]))
    graph.add_node(rewrite)
    graph.add_node("answer", inner.compile())
    graph.add_edge(START, "respond")
    graph.add_conditional_edges("respond", tools_condition, {"tools": "retrieve", END: END})
    graph.add_conditional_edges("retrieve", grade, ["answer", "rewrite"])
    graph.add_conditional_edges("answer", check, [END, "rewrite"])
    graph.add_edge("rewrite", "respond")
    done = await graph.compile().ainvoke({"messages": [("user", question)]})
    return str(done["messages"][-1].content)
