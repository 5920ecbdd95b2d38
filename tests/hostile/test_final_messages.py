"""Final messages that are meant to hang, crash or mislead a grader, and patterns that such messages could exploit.

The random part is small. Run it in full, with 20,000 sentences, after a change to a pattern::

    MAS_GYM_FUZZ=20 pytest tests/hostile/test_final_messages.py
"""

import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mas_gym.tasks import Problem, extract_answer, grade
from mas_gym.tasks.base import GRADING_MODES
from mas_gym.tasks.grading import paper_rules
from mas_gym.tasks.grading.expressions import compare_expressions, normalize_expression
from tests.hostile.patterns import Use, attacks, inline_calls, uses

SMALL, LARGE = 1000, 4000
FUZZ = int(os.environ.get("MAS_GYM_FUZZ", "1"))
SENTENCES = 1_000 * FUZZ
NEGLIGIBLE = 1e-4  # seconds; a quadratic pattern takes several times that at the small size
STEEPEST = 9.0  # four times the text: linear time grows by 4, quadratic time by 16
PROBLEMS = {
    "number": Problem("n", "How many?", "18"),
    "expression": Problem("e", "Simplify.", r"2\sqrt{5}", "expression"),
    "choice": Problem("c", "Which?", "A", "choice", {"options": ["Paris", "A cat is black", "Vitamin C", "The dog"]}),
}


class OutOfTime(BaseException):
    pass


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` after this CPU time; the matcher of `re` looks for signals while it works."""

    def stop(number: int, frame: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def seconds(use: Use, text: str, tries: int) -> float:
    """Return the CPU time of the shortest of several runs."""
    best = 1e9
    for _ in range(tries):
        start = time.thread_time()
        use.run(text)
        best = min(best, time.thread_time() - start)
        if best < NEGLIGIBLE:
            break
    return best


def fault(use: Use) -> str | None:
    """Return the first text found on which a pattern is not linear; None if there is none."""
    for make in attacks(use.pattern, 6):
        small, large = make(SMALL), make(LARGE)
        # Twice, as a collection of garbage may fall into one measurement.
        if steep(use, small, large) and steep(use, small, large):
            return f"{use.where}.{use.method} on {small[:60]!a}"
    return None


def steep(use: Use, small: str, large: str) -> bool:
    """Return whether time grows faster than the text or exceeds its limit."""
    try:
        with cpu_limit(0.25):
            before = seconds(use, small, 3)
            return before >= NEGLIGIBLE and growth(use, small, large, before) >= STEEPEST
    except OutOfTime:
        return True


def growth(use: Use, small: str, large: str, before: float) -> float:
    """Return how much longer the large text takes, as if it were four times the small one; the least of nine."""
    least = 1e9
    for _ in range(9):
        least = min(least, seconds(use, large, 1) / before * 4 * len(small) / len(large))
        if least < STEEPEST:
            break
        before = seconds(use, small, 4)
    return least


def test_patterns_are_compiled_at_module_level() -> None:
    assert inline_calls("mas_gym.tasks") == []


@pytest.mark.parametrize(
    "use", uses("mas_gym.tasks"), ids=lambda use: f"{use.where.removeprefix('mas_gym.tasks.')}.{use.method}"
)
def test_every_pattern_takes_linear_time(use: Use) -> None:
    assert fault(use) is None


@pytest.mark.parametrize(
    ("pattern", "method"),
    [
        (r"(?<=[\d})\]i])\s+(?:[A-Za-z][A-Za-z.'-]+[\s/]*)+(?:\^\s?\{?\s?\d\s?\}?)?[\s.]*$", "sub"),
        (r"\\\((.+?)\\\)", "finditer"),
        (r"\s+$", "sub"),
        (r"\(?\s*([A-Za-z])\s*\)?\s*\}?", "fullmatch"),
        (r"\d{4,}\s*!", "search"),
        (r"-+>", "split"),
        (r"(a+)+b", "match"),
    ],
)
def test_linearity_check_detects_slow_patterns(pattern: str, method: str) -> None:
    assert fault(Use("slow", re.compile(pattern, re.DOTALL), method)) is not None


FREEZING = [
    "Final Answer: 5 people sitting around the circular table without restrictions whatsoever + 1",
    "Final Answer: 12 " + "without restrictions " * 25 + "+ 1",
    "Final Answer: " + "i alibi" * 80 + "!",
    "Final Answer: 5" + " " * 500 + "x" + " " * 80 + "+",
    "Final Answer: 3:30" + " " * 550 + "x",
    "Final Answer: " + "\\(" * 290,
    "Final Answer: 5 " + "cm/" * 180 + "=",
    "Final Answer: 1" + "-" * 550 + "x",
    "Final Answer: 1," + " " * 580 + "x",
    "The answer is " + "option " * 80,
    "(A)" + " " * 4000 + "x",
    "m " * 60_000 + "18",
    "Final Answer: " + "{" * 299 + "}" * 299,
    "Final Answer: " + "\\frac{" * 90 + "1" + "}" * 90,
]


@pytest.mark.parametrize("text", FREEZING, ids=lambda text: ascii(text[:24]))
def test_hostile_sentences_are_graded_in_bounded_time(text: str) -> None:
    for problem, mode in product(PROBLEMS.values(), GRADING_MODES):
        with cpu_limit(1.0):
            grade(problem, text, mode)  # type: ignore[arg-type]
            compare_expressions("7", text[:500])
            paper_rules.same("7", text[:500], problem.kind)


# ------------------------------------------------------------------ natural sentences

WORDS = """
    people sitting around the circular table without any further restrictions whatsoever so we must choose
    arrangements of distinct alibi radii and then divide by total dollars per day because each student gets half
    hours minutes square inches degrees therefore answer is equal to option final
"""
ATOMS = [
    *("5", "18", "1,000", "3/4", "-7", "$18.50", "50%", "1e5", "3:30", "x", "+ 1", "= 12", "* 3", "n!", "A", "(B)"),
    *(r"\frac{3}{4}", r"\sqrt{5}", r"2\pi", r"\boxed{18}", r"\text{ cm}^2", r"x^{2}", r"\left(1, 2\right)", "$y = 2x$"),
    *(r"\(a+b\)", r"\[z\]", r"\begin{pmatrix}1\\2\end{pmatrix}", "½", "5°", "**18**", "Final Answer:", "i", "2i", "or"),
]
ENDS = ["", ".", "!", " + 1", "?", "\n", " ...", ")", "\\", " = ", "$"]


def sentence(rng: random.Random) -> str:
    words = [rng.choice(ATOMS if rng.random() < 0.3 else WORDS.split()) for _ in range(rng.randint(3, 40))]
    opening = rng.choice(["Final Answer: ", "The answer is ", "So we get ", "\\boxed{", "#### ", ""])
    return opening + " ".join(words) + rng.choice(ENDS)


def test_natural_sentences_are_graded_in_bounded_time() -> None:
    rng = random.Random(8)
    sentences = [sentence(rng) for _ in range(SENTENCES)]

    def took(text: str) -> float:
        normalize_expression.cache_clear()
        start = time.thread_time()
        for problem in PROBLEMS.values():
            extract_answer(problem, text)
        normalize_expression(text)
        return time.thread_time() - start

    times = [took(text) for text in sentences]
    longest = 40 * sorted(times)[SENTENCES // 2]
    # Twice, as a collection of garbage may fall into one measurement.
    assert not [text for text, first in zip(sentences, times, strict=True) if first > longest < took(text)]


# ---------------------------------------------------------------------- never an exception

PIECES = st.sampled_from(
    [*ATOMS, *ENDS, "1e1000000", "-1e-1000000", "9" * 120, "nan", "inf", "snan", "1_000", "1e", "0x1F", "1/0", "0/0"]
)
TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=())),
    st.lists(st.one_of(PIECES, st.text(max_size=6)), max_size=12).map(" ".join),
    st.lists(PIECES, max_size=4).map(lambda parts: "Final Answer: " + "".join(parts)),
)


@settings(max_examples=100 * FUZZ)
@given(TEXTS, TEXTS)
def test_grading_arbitrary_text_does_not_raise(text: str, reference: str) -> None:
    for kind, mode in product(PROBLEMS, GRADING_MODES):
        problem = Problem("p", "?", reference, kind)  # type: ignore[arg-type]
        outcome = grade(problem, text, mode)  # type: ignore[arg-type]
        assert outcome.correct == (outcome.reason == "equal")


@pytest.mark.parametrize("number", ["1e1000000", "-1e1000000", "1e-1000000", "1" * 200_000, "nan", "snan", "-inf"])
def test_paper_mode_grades_extreme_numbers_as_wrong(number: str) -> None:
    for problem in PROBLEMS.values():
        assert not grade(problem, f"Final Answer: {number}", "paper").correct
        assert not paper_rules.same("18", number, problem.kind)


# --------------------------------------------------------------------- the symbolic engine


@pytest.mark.slow
def test_comparison_is_bounded_in_time_on_any_thread() -> None:
    # each of 2 x 2 pairs of cells would take the engine all the time that it has
    right = ",".join(f"(a+b+c+d+f+g+h)^{{{30 + number}}}" for number in range(2))
    given = ",".join(f"(a+b+c+d+f+g+k)^{{{15 + number}}}" for number in range(2))
    verdicts = []
    thread = threading.Thread(target=lambda: verdicts.append(compare_expressions(right, given)))
    thread.start()
    # 2 CPU seconds, on a machine that may be busy
    thread.join(60)
    assert verdicts == ["timed out"]


@pytest.mark.parametrize("power", ["10^{300}", "1e300", "10^{301}", "1e999", "9^{999}", "1e-300", "0." + "3" * 120])
def test_large_numbers_are_compared_in_bounded_time(power: str) -> None:
    for kind, mode in product(PROBLEMS, GRADING_MODES):
        with cpu_limit(1.0):
            compare_expressions("7", power)
            paper_rules.same("7", power, PROBLEMS[kind].kind)
            grade(PROBLEMS[kind], f"Final Answer: {power}", mode)  # type: ignore[arg-type]
