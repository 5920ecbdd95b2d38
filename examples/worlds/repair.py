"""A program with a world: a Programmer edits files of a small repository and runs the tests.

The repository has ten modules with two seeded bugs each. A scripted policy, which ignores the test results, proposes
right and wrong edits. The critic repeats the edits on a copy of the repository and returns the share of passing tests.

Run ``python examples/worlds/repair.py``.
"""

import random
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from openai import OpenAI

import search
from mas_gym.policies import ScriptedPolicy
from mas_gym.programs import Folder, Program
from mas_gym.tasks.base import Problem

# The lines of each module: with a bug, corrected, and another wrong line; and two tests for each of them.
MODULES = {
    "money": (
        ("net = lambda gross: gross - 20", "net = lambda gross: gross * 80 // 100", "net = lambda gross: gross // 80"),
        ("cents = lambda euros: euros * 10", "cents = lambda euros: euros * 100", "cents = lambda euros: euros / 100"),
        ("net(200) == 160", "net(50) == 40", "cents(3) == 300", "cents(7) == 700"),
    ),
    "text": (
        ("last = lambda s: s[1]", "last = lambda s: s[-1]", "last = lambda s: s[0]"),
        ("shout = lambda s: s.lower() + '!'", "shout = lambda s: s.upper() + '!'", "shout = lambda s: s.title() + '!'"),
        ("last('abc') == 'c'", "last('x') == 'x'", "shout('no') == 'NO!'", "shout('a') == 'A!'"),
    ),
    "lists": (
        ("total = lambda xs: sum(xs[1:])", "total = lambda xs: sum(xs)", "total = lambda xs: max(xs)"),
        ("largest = lambda xs: xs[0]", "largest = lambda xs: max(xs)", "largest = lambda xs: min(xs)"),
        ("total([1, 2]) == 3", "total([5, 5]) == 10", "largest([1, 4, 2]) == 4", "largest([2, 3]) == 3"),
    ),
    "clock": (
        ("minutes = lambda h: h * 100", "minutes = lambda h: h * 60", "minutes = lambda h: h * 24"),
        ("wrap = lambda h: h % 23", "wrap = lambda h: h % 24", "wrap = lambda h: h - 24"),
        ("minutes(2) == 120", "minutes(1) == 60", "wrap(25) == 1", "wrap(23) == 23"),
    ),
    "shapes": (
        ("area = lambda a, b: a + b", "area = lambda a, b: a * b", "area = lambda a, b: a ** b"),
        ("border = lambda a, b: a + b", "border = lambda a, b: 2 * (a + b)", "border = lambda a, b: 2 * a + b"),
        ("area(2, 3) == 6", "area(4, 1) == 4", "border(1, 2) == 6", "border(3, 3) == 12"),
    ),
    "parity": (
        ("even = lambda n: n % 2 == 1", "even = lambda n: n % 2 == 0", "even = lambda n: n / 2 == 0"),
        ("halves = lambda n: n / 3", "halves = lambda n: n // 2", "halves = lambda n: n - 2"),
        ("even(6)", "not even(3)", "halves(9) == 4", "halves(2) == 1"),
    ),
    "pairs": (
        ("swap = lambda a, b: (a, b)", "swap = lambda a, b: (b, a)", "swap = lambda a, b: (b, b)"),
        ("gap = lambda a, b: a - b", "gap = lambda a, b: abs(a - b)", "gap = lambda a, b: b - a"),
        ("swap(1, 2) == (2, 1)", "swap(3, 4) == (4, 3)", "gap(2, 5) == gap(5, 2)", "gap(1, 9) == 8 == gap(9, 1)"),
    ),
    "limits": (
        ("floor = lambda x: min(x, 0)", "floor = lambda x: max(x, 0)", "floor = lambda x: x"),
        ("cap = lambda x: max(x, 9)", "cap = lambda x: min(x, 9)", "cap = lambda x: x % 9"),
        ("floor(-4) == 0", "floor(-4) == floor(-1)", "cap(12) == 9", "cap(9) == 9 == cap(10)"),
    ),
    "words": (
        ("count = lambda s: len(s)", "count = lambda s: len(s.split())", "count = lambda s: s.count(' ')"),
        ("join = lambda w: ''.join(w)", "join = lambda w: ' '.join(w)", "join = lambda w: ','.join(w)"),
        ("count('a bc') == 2", "count('one') == 1", "join(['a', 'b']) == 'a b'", "join(['x', 'y']) == 'x y'"),
    ),
    "scores": (
        ("mean = lambda xs: sum(xs)", "mean = lambda xs: sum(xs) / len(xs)", "mean = lambda xs: len(xs)"),
        ("passed = lambda n: n > 50", "passed = lambda n: n >= 50", "passed = lambda n: n == 50"),
        ("mean([1, 3]) == 2", "mean([6, 6, 6]) == 6", "passed(50) and not passed(49)", "passed(50) and passed(90)"),
    ),
}
ROUNDS = 3
PROMPT = "You are the Programmer. Fix the module. Reply with one edit: LINE <number>: <new line>"
EDIT = re.compile(r"LINE (\d+): (.+)")


def make_repository(folder: Path) -> None:
    """Write each module and the script that tests it."""
    for name, (*lines, tests) in MODULES.items():
        (folder / f"{name}.py").write_text("".join(f"{line[0]}\n" for line in lines))
        checks = "".join(f"check(lambda: {test}, {test!r})\n" for test in tests)
        (folder / f"test_{name}.py").write_text(
            f"from {name} import *\n\ndef check(test, text):\n"
            "    try:\n        ok = test()\n    except Exception:\n        ok = False\n"
            f"    print('PASSED' if ok else 'FAILED', text)\n\n{checks}"
        )


def edit(world: str, module: str, reply: str) -> None:
    """Replace the line that a reply names."""
    path = Path(world) / f"{module}.py"
    lines = path.read_text().splitlines()
    found = EDIT.search(reply)
    if found and 1 <= int(found[1]) <= len(lines):
        lines[int(found[1]) - 1] = found[2]
        path.write_text("\n".join(lines) + "\n")


def run_tests(world: str, module: str) -> str:
    """Return the output of a module's tests."""
    # -B: a file that is edited twice in one second would be imported from its stale bytecode.
    command = [sys.executable, "-B", "-S", f"test_{module}.py"]
    return subprocess.run(command, cwd=world, capture_output=True, text=True, timeout=60).stdout


def solve(question: str, client: OpenAI, world: str) -> str:
    """Edit and test until all tests pass; return how many do."""
    module = question.split()[-1]
    results = run_tests(world, module)
    for _ in range(ROUNDS):
        source = (Path(world) / f"{module}.py").read_text()
        user = f"{question}\n\n{source}\n{results}"
        messages = [{"role": "system", "content": PROMPT}, {"role": "user", "content": user}]
        reply = client.chat.completions.create(model="agent", messages=messages)
        edit(world, module, reply.choices[0].message.content)
        results = run_tests(world, module)
        if "FAILED" not in results:
            break
    return f"Final Answer: {results.count('PASSED')}"


class PassingTests(search.Critic):
    """The share of a module's tests that pass after the edits of a transcript."""

    name = "passing-tests"
    free = True  # no model call

    def __init__(self, repository: Folder) -> None:
        """Score each transcript once."""
        self.repository = repository
        self._share = cache(self._measured)

    def identity(self):
        """Return what determines the scores."""
        return {"tests": self.repository.identity()}

    def score(self, contexts):
        """Return one value per state, in order."""
        return [self._share(c.state.question, tuple(turn.text for turn in c.state.turns)) for c in contexts]

    def _measured(self, question: str, replies: tuple[str, ...]) -> float:
        module = question.split()[-1]
        copy = self.repository.restore(self.repository.start)
        for reply in replies:
            edit(copy, module, reply)
        results = run_tests(copy, module)
        self.repository.release(copy)
        return results.count("PASSED") / max(1, len(results.splitlines()))


def propose(request, seed: int) -> str:
    """Choose a line and one of its three versions at random; one of them is right."""
    module = request.messages[-1].content.split("\n")[0].split()[-1]
    draw = random.Random(seed)
    line = draw.randrange(2)
    return f"LINE {line + 1}: {draw.choice(MODULES[module][line])}"


def main(bugs: int = len(MODULES), planners: tuple[str, ...] = ("single", "bon:8", "mcts:10,3")) -> None:
    """Repair every module once with each planner."""
    problems = [Problem(f"repair/{name}", f"Repair the module {name}", "4") for name in list(MODULES)[:bugs]]
    with tempfile.TemporaryDirectory() as folder:
        make_repository(Path(folder))
        repository = Folder(folder)
        program = Program(solve, agents=["Programmer"], world=repository)
        policy, critic = ScriptedPolicy(propose), PassingTests(repository)
        for planner in planners:
            plans = list(search.run(planner, problems, program=program, policy=policy, critic=critic))
            solved = sum(bool(plan.correct) for plan in plans)
            tokens = sum(plan.usage.generated_tokens for plan in plans) / len(plans)
            print(f"{planner:10} {solved} of {len(plans)} modules repaired, {tokens:.0f} tokens each", flush=True)


if __name__ == "__main__":
    main()
