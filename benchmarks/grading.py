"""Accuracy and CPU time of grading, in both modes.

The script grades every reference solution of the real files as the final message, then wrong answers, then a table
of misleading texts.

    python benchmarks/grading.py --data ../shared/data
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from mas_gym.tasks import Problem, Task, grade, load_task
from mas_gym.tasks.grading.numbers import format_number, parse_number

MODES = ("strict", "paper")
OPTIONS = {"options": ["Paris", "A cat is black", "Vitamin C", "The dog"]}

# (kind, reference, final message, whether the message gives the reference)
MISLEADING = [
    ("number", "9", "First, 18 eggs are laid. Final Answer: 9", True),
    ("number", "18", "First, 18 eggs are laid. Final Answer: 9", False),
    ("number", "18", "The answer is not 9.\nFinal Answer: 18", True),
    ("number", "18", "To get the answer, we add 9 and 9.\nFinal Answer: 18", True),
    ("number", "18", "Final Answer: 9\nWait, I forgot one.\nFinal Answer: 18", True),
    ("number", "18", "**Final Answer:** $18 per day", True),
    ("number", "18", "FINAL ANSWER: [18]", True),
    ("number", "18", "\\boxed{18} because 9 + 9 = 18 and 2 * 9 = 18, in 3 ways", True),
    ("number", "70000", "Final Answer: $70k", True),
    ("number", "0.75", "Final Answer: $\\frac{3}{4}$", True),
    ("number", "1.5", "Final Answer: 1 1/2 hours", True),
    ("number", "-18", "Final Answer: \u221218", True),
    ("number", "4", "Final Answer: 3 + 4", False),
    ("number", "20", "Final Answer: 18 or 20", False),
    ("number", "5", "Final Answer: 2\\sqrt5", False),
    ("number", "3", "Final Answer: \\frac{5}{3}", False),
    ("number", "9", "Final Answer: 9**9**9**9", False),
    ("number", "30", "Final Answer: 3:30", False),
    ("number", "0.0004", "Final Answer: 0.0009", False),
    ("number", "18", "We get 18.\nFinal Answer: cannot be determined", False),
    ("expression", r"\frac{3}{4}", "\\boxed{0.75}", True),
    ("expression", r"2\sqrt{5}", "Final Answer: $\\sqrt{20}$", True),
    ("expression", r"2\sqrt{5}", "Final Answer: 25", False),
    ("expression", r"3\pi", "Final Answer: 3", False),
    ("expression", r"\text{Evelyn}", "Final Answer: Evelyn", True),
    ("expression", "(3,4]", "\\boxed{[3,4)}", False),
    ("expression", "1,-2", "The solutions are $x=-2$ and $x=1$. Final Answer: $-2, 1$", True),
    ("expression", "52_8", "\\boxed{52_{8}}", True),
    ("expression", r"\frac{2}{1005}", "\\boxed{\\frac{2}{1006}}", False),
    ("choice", "A", "Final Answer: A", True),
    ("choice", "A", "A careful reading of the passage supports option (C).", False),
    ("choice", "C", "A careful reading of the passage supports option (C).", True),
    ("choice", "B", "Final Answer: Because of the dog", False),
    ("choice", "B", "Final Answer: A cat is black", True),
    ("choice", "C", "Final Answer: Vitamin C", True),
    ("choice", "A", "Final Answer: A and B", False),
    ("choice", "D", "The answer is a hard one to see.\nFinal Answer: D", True),
    ("choice", "B", "Final Answer: \\boxed{\\text{B}}", True),
]


def share(outcomes: Iterable[bool]) -> str:
    """Write how many of some outcomes are true."""
    values = list(outcomes)
    return f"{sum(values)} of {len(values)}"


def wrong_numbers(problem: Problem) -> list[str]:
    """Return answers near the reference that are not it."""
    value = parse_number(problem.answer)
    if value is None:
        return [problem.answer[1:] if problem.answer[0] == "-" else f"-{problem.answer}"]
    return [format_number(value + 1), format_number(value - 1), format_number(-value - 1)]


def report(
    title: str,
    load: Callable[[str], Task],
    right: Callable[[Problem], list[str]],
    wrong: Callable[[Problem], list[str]],
) -> None:
    """Print how many right messages are graded right, and how many wrong ones, in both modes."""
    for mode in MODES:
        task = load(mode)
        start = time.process_time()
        accepted = [task.grade(problem, text).correct for problem in task for text in right(problem)]
        each = (time.process_time() - start) / len(accepted) * 1e6
        fooled = [task.grade(problem, text).correct for problem in task for text in wrong(problem)]
        print(f"{title:<26} {mode:<7} {share(accepted):>14} {share(fooled):>16} {each:>12.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with gsm8k/, math500/ and logiqa/")
    data: Path = parser.parse_args().data

    print(f"{'messages':<26} {'mode':<7} {'right accepted':>14} {'wrong accepted':>16} {'CPU us':>12}")
    for part in ("test", "train"):
        report(
            f"GSM8K {part}, solutions",
            lambda mode, part=part: load_task("gsm8k", data=data / "gsm8k" / f"{part}.jsonl", grading=mode),
            lambda problem: [problem.metadata["solution"]],
            lambda problem: [f"Final Answer: {wrong}" for wrong in wrong_numbers(problem)],
        )
    report(
        "MATH-500, solutions",
        lambda mode: load_task("math", data=data / "math500" / "test.jsonl", grading=mode),
        lambda problem: [problem.metadata["solution"]],
        lambda problem: [f"Final Answer: ${wrong}$" for wrong in wrong_numbers(problem)],
    )
    forms = ("Final Answer: {}", "FINAL ANSWER: ({})", "The answer is **{}**.", "{}")
    report(
        "LogiQA test, four forms",
        lambda mode: load_task("logiqa", data=data / "logiqa" / "Test.txt", grading=mode),
        lambda problem: [form.format(problem.answer) for form in forms],
        lambda problem: [form.format(label) for form in forms for label in "ABCD" if label != problem.answer],
    )
    for mode in MODES:
        verdicts = []
        for kind, reference, text, gives_it in MISLEADING:
            problem = Problem("p", "?", reference, kind, OPTIONS if kind == "choice" else {})
            verdicts.append(grade(problem, text, mode).correct == gives_it)
        print(f"{'misleading texts, verdicts':<26} {mode:<7} {share(verdicts):>14}")

    number = Problem("p", "?", "18")
    message = "She sells 16 - 3 - 4 = 9 eggs for $2 each, which makes 9 * 2 = $18 every day.\nFinal Answer: $18"
    start = time.process_time()
    for _ in range(20_000):
        grade(number, message)
    each = (time.process_time() - start) / 20_000 * 1e6
    print(f"\na numeric message of {len(message)} characters: {each:.1f} us of CPU")
    start = time.process_time()
    grade(number, "Final Answer: " + "1" * 10**6)
    print(f"a megabyte of digits: {(time.process_time() - start) * 1e3:.1f} ms of CPU")


if __name__ == "__main__":
    main()
