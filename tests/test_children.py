"""Workers that answer requests: interrupts, forks, the modules that they import, and their end with the run's."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mas_gym.envs.env import MASEnv
from mas_gym.internal.workers import LineProcess
from mas_gym.tasks import Problem, ProblemTask
from mas_gym.tasks.grading import symbolic
from mas_gym.tasks.grading.graders import FileGrader

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 60.0


def prepare() -> Callable[[Any], Any]:
    return lambda request: {"twice": 2 * request}


@pytest.fixture
def worker() -> Iterator[LineProcess]:
    made = LineProcess("test_children:prepare")
    yield made
    made.stop()


def interrupt(monkeypatch: pytest.MonkeyPatch, worker: LineProcess, point: str) -> None:
    """Raise KeyboardInterrupt once in the worker's next exchange, before or after one of its steps."""
    when, name = point.split()
    step = getattr(worker, name)

    def struck(*args: Any) -> Any:
        monkeypatch.setattr(worker, name, step)
        if when == "after":
            step(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(worker, name, struck)


@pytest.mark.parametrize(
    ("which", "point"),
    [
        # The first reply is that of a process which is ready.
        ("first", "before _start"),
        ("first", "before _reply"),
        ("first", "after _reply"),
        ("first", "after _start"),
        ("later", "before _send"),
        ("later", "after _send"),
        ("later", "before _reply"),
        ("later", "after _reply"),
    ],
)
def test_interrupt_at_any_point_does_not_misassign_replies(
    monkeypatch: pytest.MonkeyPatch, worker: LineProcess, which: str, point: str
) -> None:
    if which == "later":
        assert worker.ask(1, PATIENCE) == {"twice": 2}
    interrupt(monkeypatch, worker, point)
    with pytest.raises(KeyboardInterrupt):
        worker.ask(7, PATIENCE)
    assert [worker.ask(number, PATIENCE) for number in range(10)] == [{"twice": 2 * number} for number in range(10)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forked_child_starts_a_separate_worker(worker: LineProcess) -> None:
    assert worker.ask(1, PATIENCE) == {"twice": 2}
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(writing, str(worker.ask(3, PATIENCE)).encode())
            worker.stop()
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    assert os.read(reading, 100) == b"{'twice': 6}"
    os.close(reading)
    assert worker.ask(4, PATIENCE) == {"twice": 8}


# ---------------------------------------------------------------------- graders in an environment

GRADER = """
import os, signal, subprocess, sys, time

def grade(problem, text):
    if "fork" in text and os.fork() == 0:
        return False
    if "read" in text:
        return sys.stdin.read() == "" and subprocess.run(["cat"], capture_output=True).stdout == b""
    if "interrupt" in text:
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(1)
    return "right" in text
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "grade.py"
    path.write_text(GRADER, encoding="utf-8")
    return path


def worker_of(task: ProblemTask) -> LineProcess:
    grader = task.grader
    return grader._worker if isinstance(grader, FileGrader) else symbolic._worker


@pytest.mark.parametrize("kind", ["file", "symbolic"])
@pytest.mark.parametrize("point", ["after _send", "after _start"])
def test_rewards_are_correct_after_an_interrupted_step(
    monkeypatch: pytest.MonkeyPatch, file: Path, kind: str, point: str
) -> None:
    symbolic.equal_by_meaning.cache_clear()
    symbolic._worker.stop()
    problem = Problem("p", "?", r"2\sqrt{2}", "expression")
    grader = f"{file}:grade" if kind == "file" else None
    task = ProblemTask.of([problem], grader=grader)
    texts = ["right", "wrong"] if grader is not None else [r"\boxed{\sqrt{8}}", r"\boxed{\sqrt{7}}"]
    env = MASEnv(task, "single")

    def reward(text: str) -> float:
        env.reset(seed=0)
        _, found, terminated, *_ = env.step((text, env.ALL))
        assert terminated
        return float(found)

    interrupt(monkeypatch, worker_of(task), point)
    with pytest.raises(KeyboardInterrupt):
        reward(texts[0])
    assert [reward(texts[number % 2]) for number in range(10)] == [1.0, -1.0] * 5
    # Verdicts that were kept meanwhile are right, too.
    assert [reward(text) for text in texts] == [1.0, -1.0]


SIGINT = """
import signal, sys
from mas_gym.tasks import Problem, ProblemTask

signal.signal(signal.SIGINT, signal.default_int_handler)
task = ProblemTask.of([Problem("p", "?", "1", "text")], grader=sys.argv[1])
assert task.grade(task[0], "right").correct
try:
    task.grade(task[0], "right, interrupt")
except KeyboardInterrupt:
    print(*(task.grade(task[0], text).correct for text in ["wrong", "right"] * 5))
"""


def test_grades_are_correct_after_ctrl_c(file: Path) -> None:
    done = run_script(SIGINT, f"{file}:grade")
    assert done.stdout.split() == ["False", "True"] * 5, done.stderr


def run_script(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
    )


def test_grader_that_forks_or_reads_input_replies_once(file: Path) -> None:
    task = ProblemTask.of([Problem("p", "?", "1", "text")], grader=f"{file}:grade")
    texts = ["fork, right", "wrong", "right", "read", "wrong", "right"]
    assert [task.grade(task[0], text).correct for text in texts] == [True, False, True, True, False, True]


# ---------------------------------------------------------------------- the current folder

HERE = """
import os, sys
from mas_gym.internal.parallel_jobs import run_jobs
from mas_gym.tasks import Problem, ProblemTask

def prepare():
    return lambda job, report: report(os.getpid())

if __name__ == "__main__":
    kind, grader = sys.argv[1:]
    if kind == "processes":
        found = []
        assert run_jobs([0], prepare, 1, lambda index, message: found.append(message), ["sqlite3"]) is None
        assert found and found[0] != os.getpid()
    else:
        sys.path[:0] = ["", os.getcwd()]
        task = ProblemTask.of([Problem("p", "?", r"2\\sqrt{2}", "expression")], grader=grader or None)
        texts = ("right", "wrong") if grader else (r"\\boxed{\\sqrt{8}}", r"\\boxed{\\sqrt{7}}")
        assert [task.grade(task[0], text).correct for text in texts] == [True, False]
    print("right")
"""


@pytest.mark.parametrize("kind", ["symbolic", "file", "processes"])
def test_workers_do_not_import_from_the_current_folder(file: Path, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    for name in ("json", "math_verify", "multiprocessing", "numpy", "queue", "signal", "sqlite3", "sympy", "threading"):
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write({name!r})\n1 / 0\n")
    script = tmp_path / "run.py"
    script.write_text(HERE, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONSAFEPATH", None)
    grader = f"{file}:grade" if kind == "file" else ""
    command = [sys.executable, str(script), kind, grader]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=4 * PATIENCE)
    assert done.stdout == "right\n", done.stderr
    assert not (tmp_path / "imported").exists(), (tmp_path / "imported").read_text()


# ---------------------------------------------------------------------- the end of a run

LINGER = """
import subprocess, sys, time

def grade(problem, text):
    # This process and its child hold the pipe open until they end.
    with open(problem if isinstance(problem, str) else problem.answer, "w") as pipe:
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], pass_fds=[pipe.fileno()])
        print(text, file=pipe, flush=True)
        time.sleep(600)

if __name__ == "__main__":
    grade(sys.argv[1], "command")
"""

RUN = """
import shlex, signal, sys, threading
from functools import partial
import search
from mas_gym.policies import ScriptedPolicy
from mas_gym.internal.parallel_jobs import run_jobs
from mas_gym.programs import Program
from mas_gym.tasks import Problem, ProblemTask

def task(file, pipe):
    return ProblemTask.of([Problem("p", "?", pipe, "text")], grader=f"{file}:grade")

def prepare(file, pipe):
    return lambda job, report: task(file, pipe).grade(Problem("p", "?", pipe, "text"), "worker")

if __name__ == "__main__":
    for number, action in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        signal.signal(number, action)
    problems, program = task(*sys.argv[1:]), Program(shlex.join([sys.executable, *sys.argv[1:]]), agents=["A"])
    policy = ScriptedPolicy(lambda request, seed: "1")
    beside = (
        lambda: problems.grade(problems[0], "grader"),
        lambda: list(search.run("single", problems, program=program, policy=policy)),
    )
    for work in beside:
        threading.Thread(target=work, daemon=True).start()
    run_jobs([0], partial(prepare, *sys.argv[1:]), 1, print)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes and signals")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGKILL"])
def test_signal_that_ends_the_run_also_ends_commands_graders_and_workers(tmp_path: Path, name: str) -> None:
    pipe, linger, script = tmp_path / "pipe", tmp_path / "linger.py", tmp_path / "run.py"
    linger.write_text(LINGER, encoding="utf-8")
    script.write_text(RUN, encoding="utf-8")
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), str(linger), str(pipe)]
    try:
        with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as run:
            started = heard(reading, lambda said, ended: len(said.split()) == 3 or run.poll() is not None)
            assert sorted(started.split()) == ["command", "grader", "worker"]
            run.send_signal(getattr(signal, name))
            run.wait(PATIENCE)
        heard(reading, lambda said, ended: ended)
    finally:
        os.close(reading)


def heard(reading: int, enough: Callable[[str, bool], bool]) -> str:
    """Return the data written to a named pipe until it suffices; the pipe ends when no process has it open."""
    said, ended, deadline = "", False, time.monotonic() + PATIENCE
    while not enough(said, ended):
        assert time.monotonic() < deadline, said
        if select.select([reading], [], [], 0.05)[0]:
            part = os.read(reading, 1000)
            said, ended = said + part.decode(), not part
            # A pipe without writers is always ready.
            time.sleep(0.0 if part else 0.05)
    return said
