"""Which rules of grading change a grade: on recorded messages, against math-verify alone and with each rule left out.

The messages are the reference solutions of MATH-500 and GSM8K (all are right), wrong answers made from the references
(none is right), the agents' messages of DyLAN's debates on MATH, and the solutions of ProcessBench to problems of GSM8K
and MATH-500, with its own label of each final answer.

    python -m benchmarks.grading --data ../shared/data            # agreement with math-verify and with the labels
    python -m benchmarks.grading --data ../shared/data --rules    # also the grades that each pattern changes
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import re
import time
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from mas_gym.tasks import Problem, grade, load_task
from mas_gym.tasks.grading.numbers import format_number, parse_number

MODULES = ("answer_markers", "numbers", "expressions", "symbolic")


class Message(NamedTuple):
    """A final message and, if it is known, whether its answer is right."""

    problem: Problem
    text: str
    right: bool | None = None


def rows(file: Path) -> Iterator[dict[str, object]]:
    """Read gzipped JSON Lines."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def wrong(problem: Problem) -> list[str]:
    """Return answers near the reference that differ from it."""
    value = parse_number(problem.answer)
    if value is None:
        return [problem.answer[1:] if problem.answer[0] == "-" else f"-{problem.answer}"]
    return [format_number(value + 1), format_number(value - 1), format_number(-value - 1)]


def messages(data: Path) -> dict[str, list[Message]]:
    """Return the messages by source."""
    sets: dict[str, list[Message]] = {}
    known = {}
    for name, file in (("MATH-500", "math500/test.jsonl"), ("GSM8K", "gsm8k/test.jsonl")):
        task = load_task("math" if name == "MATH-500" else "gsm8k", data=data / file)
        known.update({"".join(problem.question.split()): problem for problem in task})
        sets[f"{name}, solutions"] = [Message(problem, problem.metadata["solution"], True) for problem in task]
        sets[f"{name}, wrong answers"] = [
            Message(problem, f"Final Answer: ${text}$", False) for problem in task for text in wrong(problem)
        ]
    sets["ProcessBench"] = [
        Message(known[key], "\n\n".join(row["steps"]), row["final_answer_correct"])  # type: ignore[arg-type]
        for row in rows(data / "real" / "processbench.jsonl.gz")
        if (key := "".join(str(row["problem"]).split())) in known
    ]
    sets["DyLAN"] = [
        Message(Problem(str(row["id"]), str(row["question"]), str(row["answer"]), "expression"), text)
        for row in rows(data / "real" / "dylan_math.jsonl.gz")
        for texts in row["messages"]  # type: ignore[attr-defined]
        for text in texts
    ]
    return sets


def alone(message: Message) -> bool:
    """Grade with math-verify's own extraction and comparison."""
    from math_verify import parse, verify

    return bool(verify(_reference(message.problem.answer), parse(message.text)))


@cache
def _reference(answer: str) -> list[object]:
    from math_verify import parse

    found: list[object] = parse(f"${answer}$")
    return found


def grades(batch: list[Message]) -> list[tuple[bool, str | None]]:
    """Grade messages in strict mode."""
    for module in map(_module, MODULES):
        for value in vars(module).values():
            if hasattr(value, "cache_clear") and value.__name__ != "equal_by_meaning":
                value.cache_clear()
    return [(given.correct, given.extracted) for given in (grade(m.problem, m.text) for m in batch)]


def _module(name: str) -> object:
    return import_module(f"mas_gym.tasks.grading.{name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with gsm8k/, math500/ and real/")
    parser.add_argument("--rules", action="store_true", help="also leave out each pattern in turn")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    sets = messages(options.data)
    print(f"{'messages':<24}{'number':>7}{'labeled right':>15}{'strict':>8}{'paper':>8}{'math-verify':>12}"
          f"{'only strict':>12}{'only it':>8}{'us each':>8}")  # fmt: skip
    for name, batch in sets.items():
        start = time.process_time()
        strict = [correct for correct, _ in grades(batch)]
        each = (time.process_time() - start) / len(batch) * 1e6
        paper = [grade(message.problem, message.text, "paper").correct for message in batch]
        other = [alone(message) for message in batch]
        labels = [message.right for message in batch if message.right is not None]
        agreed = f"{sum(labels)} of {len(labels)}" if labels else "-"
        mine = sum(a and not b for a, b in zip(strict, other, strict=True))
        its = sum(b and not a for a, b in zip(strict, other, strict=True))
        print(f"{name:<24}{len(batch):>7}{agreed:>15}{sum(strict):>8}{sum(paper):>8}{sum(other):>12}{mine:>12}{its:>8}"
              f"{each:>8.0f}", flush=True)  # fmt: skip
    if options.rules:
        every = [message for batch in sets.values() for message in batch]
        before = grades(every)
        print(f"\n{'pattern left out':<40}{'grades changed':>15}{'to wrong':>9}{'answers changed':>16}")
        for module in map(_module, MODULES):
            for name, value in list(vars(module).items()):
                if isinstance(value, re.Pattern):
                    setattr(module, name, re.compile(f"(?!)(?:{value.pattern})", value.flags))
                    after = grades(every)
                    setattr(module, name, value)
                    changed = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
                    flips = [a[0] for a, b in changed if a[0] != b[0]]
                    place = f"{module.__name__.rpartition('.')[2]}.{name}"  # type: ignore[attr-defined]
                    print(f"{place:<40}{len(flips):>15}{sum(flips):>9}{len(changed):>16}", flush=True)


if __name__ == "__main__":
    main()
