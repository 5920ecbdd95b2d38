"""Small data files in the benchmarks' own layouts, with questions in several scripts."""

import json
from pathlib import Path
from typing import Any

import gymnasium as gym

import mas_gym  # noqa: F401 - registers the ids
from mas_gym import ENVIRONMENTS

IDS = sorted(ENVIRONMENTS)
OFFLINE = ("arithmetic", "ordering", "game24")

ROWS: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [
        {"question": f"Ana has {n} apples. كم تفاحة؟ 漢字 🙂\nAnd {n} more?", "answer": f"{n} + {n}\n#### {2 * n}"}
        for n in range(1, 9)
    ],
    "math": [
        {
            "problem": f"What is ${n}^2$?",
            "solution": rf"It is $\boxed{{{n * n}}}$.",
            "level": "Level 1",
            "type": "Algebra",
        }
        for n in range(1, 9)
    ],
    "mmlu": [
        {"question": f"What is {n} + 1?", "choices": [str(n + 1), "0", "-1", "none"], "answer": 0} for n in range(1, 9)
    ],
    "logiqa": [
        {"context": f"All {n} swans are white.", "query": "So?", "options": ["w", "x", "y", "z"], "correct_option": 0}
        for n in range(1, 9)
    ],
    "gpqa": [
        {
            "Question": f"What is {n}?",
            "Correct Answer": f"{n} m",
            **{f"Incorrect Answer {i}": f"{n} s{i}" for i in (1, 2, 3)},
        }
        for n in range(1, 9)
    ],
}


def write_rows(task: str, folder: Path) -> str:
    path = folder / f"{task}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[task]), encoding="utf-8")
    return str(path)


def data_kwargs(env_id: str, folder: Path) -> dict[str, Any]:
    task = ENVIRONMENTS[env_id][0]
    return {} if task in OFFLINE else {"data": write_rows(task, folder)}


def make(env_id: str, folder: Path, **kwargs: Any) -> gym.Env:
    return gym.make(env_id, **data_kwargs(env_id, folder), **kwargs)


def right_answer(env: gym.Env) -> str:
    """Return a final message that the environment's task accepts."""
    base = env.unwrapped
    return f"Final Answer: {base.task.problem(base.problem_id).answer}"
