"""Small evaluation logs in the documented shapes of Inspect and lm-evaluation-harness."""

import json
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def inspect_sample(identity: int | str, value: object, epoch: int = 1, text: str = "") -> dict[str, Any]:
    asked = text or f"What is {identity} + 1?"
    return {
        "id": identity,
        "epoch": epoch,
        "input": asked,
        "target": "2",
        "messages": [
            {"id": "m0", "role": "system", "content": "Calculate."},
            {"id": "m1", "role": "user", "source": "input", "content": f"{asked}\nThink first."},
            {
                "id": "m2", "role": "assistant", "model": "small",
                "content": [{"type": "reasoning", "reasoning": "Use the tool."}, {"type": "text", "text": "One call."}],
                "tool_calls": [{"id": "c1", "function": "add", "arguments": {"a": 1, "b": 1}, "type": "function"}],
            },
            {"id": "m3", "role": "tool", "tool_call_id": "c1", "function": "add", "content": "2"},
            {"id": "m4", "role": "assistant", "content": "attachment://d1"},
        ],
        "output": {"model": "small", "choices": []},
        "scores": {} if value is None else {"match": {"value": value, "answer": "2"}},
        "attachments": {"d1": "Final Answer: 2"},
    }  # fmt: skip


def write_eval(path: Path, samples: Iterable[Mapping[str, Any]], model: str = "mock/small") -> Path:
    header = {"version": 2, "status": "success", "eval": {"task": "sums", "model": model}, "plan": {}}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("_journal/start.json", json.dumps(header))
        for one in samples:
            archive.writestr(f"samples/{one['id']}_epoch_{one['epoch']}.json", json.dumps(one))
        archive.writestr("header.json", json.dumps(header))
    return path


def lm_eval_row(doc_id: int, correct: object, filter: str = "strict-match", text: str = "") -> dict[str, Any]:
    asked = text or f"What is {doc_id} + 1?"
    return {
        "doc_id": doc_id,
        "doc": {"question": asked, "answer": f"#### {doc_id + 1}"},
        "target": str(doc_id + 1),
        "arguments": {"gen_args_0": {"arg_0": f"Question: {asked}\nAnswer:", "arg_1": {"until": ["\n\n"]}}},
        "resps": [[f"The answer is {doc_id + 1}."]],
        "filtered_resps": [str(doc_id + 1)],
        "filter": filter,
        "metrics": ["exact_match"],
        "doc_hash": f"hash of {asked}",
        "exact_match": correct,
    }


def choice_row(doc_id: int, picked: int, right: int) -> dict[str, Any]:
    """A multiple-choice sample, whose likelihoods favor one choice."""
    scores = [["-1.0" if place == picked else "-9.5", "False"] for place in range(3)]
    return {
        "doc_id": doc_id,
        "doc": {"query": "Which one?", "choices": ["red", "green", "blue"]},
        "target": right,
        "arguments": {
            f"gen_args_{place}": {"arg_0": "Which one?", "arg_1": f" {name}"}
            for place, name in enumerate(("red", "green", "blue"))
        },
        "resps": [[score] for score in scores],
        "filtered_resps": scores,
        "filter": "none",
        "metrics": ["acc", "acc_norm"],
        "acc": float(picked == right),
        "acc_norm": 1.0,
    }


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
