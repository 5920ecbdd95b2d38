"""Fine-tune agents: turn search trees into training data for the agents' own model.

Siblings are messages of one agent to the same prompt. One that led to right answers more often is preferred to one
that did not. The rows are in the chat format of TRL, for ``DPOTrainer``; the chosen messages alone suit ``SFTTrainer``.
Run ``python examples/fine_tune_agents.py``.
"""

import json
import tempfile
from pathlib import Path

import mas_gym
import search
from mas_gym import chat_messages
from mas_gym.policies import load_policy


def preferences(tree, mas, least: float = 0.5):
    """Yield a row for each state whose best and worst message differ by at least ``least`` in Q, on [-1, 1]."""
    for node in tree:
        children = [tree[child] for child in tree.children(node.id)]
        judged = sorted((child for child in children if child.visits), key=lambda child: child.q)
        if len(judged) > 1 and judged[-1].q - judged[0].q >= least:
            prompt = [message._asdict() for message in chat_messages(mas, node.state)]
            best, worst = judged[-1].state.text, judged[0].state.text
            yield {
                "agent": mas.agents[node.state.acting].name,
                "prompt": prompt,
                "chosen": [{"role": "assistant", "content": best}],
                "rejected": [{"role": "assistant", "content": worst}],
            }


def main(problems: int = 20, simulations: int = 20) -> Path:
    """Search the train split with true rewards and write the rows; return their file."""
    mas = mas_gym.load_mas("rpsv")
    task = mas_gym.load_task("arithmetic", split="train", limit=problems)
    planner = search.MCTS(n_simulations=simulations, max_children=3, c_uct=4.0)
    file = Path(tempfile.mkdtemp()) / "preferences.jsonl"
    agents: dict[str, int] = {}
    with file.open("w", encoding="utf-8") as out:
        for plan in search.run(planner, task, mas=mas, policy=load_policy("tiny"), training=True):
            for row in preferences(plan.tree, mas):
                agents[row["agent"]] = agents.get(row["agent"], 0) + 1
                out.write(json.dumps(row) + "\n")
    print(f"{sum(agents.values())} preference rows: {agents}")
    return file


if __name__ == "__main__":
    main()
