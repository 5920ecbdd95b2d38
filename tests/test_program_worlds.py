"""Worlds of programs: each execution changes a separate copy of the original."""

from __future__ import annotations

import gc
import inspect
import os
import pickle
import re
import runpy
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI, OpenAI
from search_worlds import unparked

import mas_gym
import search
from mas_gym.errors import ConfigError, DataError, DataNotFoundError
from mas_gym.internal.identity import identity_of
from mas_gym.policies import ScriptedPolicy
from mas_gym.programs import Folder, Program, World
from mas_gym.systems.graph import RETURNED
from mas_gym.tasks.base import Problem
from search.models.programs import ProgramModels
from search.setup import RunSpec

ROUNDS = 3
PROBLEMS = [Problem(f"w/{i}", f"question {i}", "a", kind="text") for i in range(2)]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repo"
    (root / "src" / "empty").mkdir(parents=True)
    (root / "src" / "run.sh").write_text("echo hello")
    (root / "src" / "run.sh").chmod(0o755)
    (root / "log").write_text("start")
    (root / "link").symlink_to("src/run.sh")
    (root / "src" / "up").symlink_to("..")
    return root


def content(root: str | Path) -> dict[str, object]:
    """The content of a folder: for each path, the mode and the bytes, or the target of a link."""
    found: dict[str, object] = {}
    for path in sorted(Path(root).rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = os.readlink(path)
        else:
            found[name] = (stat.S_IMODE(path.stat().st_mode), path.read_bytes() if path.is_file() else None)
    return found


def copies(folder: Folder) -> list[Path]:
    return list(Path(folder._store).glob("copy-*"))


def check_released(folder: Folder) -> None:
    """The copies of executions that ended disappear."""
    deadline = time.monotonic() + 20
    while copies(folder) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not copies(folder)


# ---- folders


def test_restored_folder_equals_the_original_in_content_modes_and_links(repository: Path) -> None:
    folder = Folder(repository)
    copy = folder.restore(folder.start)
    assert content(copy) == content(repository)
    assert folder.snapshot(copy) == folder.start


names = st.text(st.characters(blacklist_characters="/\0", blacklist_categories=["Cs"]), min_size=1, max_size=8).filter(
    lambda name: name not in (".", "..", "__pycache__")
)
trees: st.SearchStrategy[Any] = st.recursive(
    st.binary(max_size=20), lambda inner: st.dictionaries(names, inner, max_size=4), max_leaves=8
)


def write(path: Path, tree: dict[str, Any]) -> None:
    path.mkdir()
    for name, inner in tree.items():
        if isinstance(inner, dict):
            write(path / name, inner)
        else:
            (path / name).write_bytes(inner)


@settings(max_examples=25)
@given(st.dictionaries(names, trees, max_size=4), st.dictionaries(names, trees, max_size=4))
def test_restored_folder_equals_the_snapshot(one: dict[str, Any], two: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as at:
        write(Path(at) / "one", one)
        write(Path(at) / "two", two)
        folder, other = Folder(Path(at) / "one"), Folder(Path(at) / "two")
        copy = folder.restore(folder.start)
        assert content(copy) == content(Path(at) / "one")
        token = folder.snapshot(str(other.path))
        assert token == other.start and (token == folder.start) == (one == two)
        folder.restore(token, copy)
        assert content(copy) == content(Path(at) / "two")


def test_change_in_one_folder_copy_does_not_affect_the_others(repository: Path) -> None:
    folder = Folder(repository)
    before = content(repository)
    one, two = (Path(folder.restore(folder.start)) for _ in range(2))
    with open(one / "log", "r+") as file:
        file.write("CHANGED")
    (one / "link").unlink()
    (one / "src" / "up" / "new").write_text("x")
    later = folder.snapshot(str(one))
    assert content(two) == content(repository) == before
    assert content(folder.restore(folder.start)) == before
    assert content(folder.restore(later)) == content(one) != before


def test_read_only_folder_copy_can_be_restored_and_released(repository: Path) -> None:
    (repository / "src").chmod(0o555)
    folder = Folder(repository)
    copy = folder.restore(folder.start)
    (Path(copy) / "log").unlink()
    folder.restore(folder.start, copy)
    assert content(copy) == content(repository)
    folder.release(copy)
    assert not copies(folder)
    (repository / "src").chmod(0o755)


@pytest.mark.parametrize("target", ["/etc/passwd", "../secret", "src/up/../secret", "{root}/log"])
def test_folder_rejects_symlinks_to_the_outside(repository: Path, target: str) -> None:
    (repository.parent / "secret").write_text("secret")
    (repository / "bad").symlink_to(target.format(root=repository))
    with pytest.raises(DataError, match="'bad' ->"):
        Folder(repository).snapshot()
    assert Folder(repository, ignore=["bad"]).snapshot()


def test_folder_keeps_circular_symlinks(repository: Path) -> None:
    (repository / "circle").symlink_to("circle")
    folder = Folder(repository)
    assert os.readlink(os.path.join(folder.restore(folder.start), "circle")) == "circle"


def test_folder_rejects_a_huge_file_without_reading_it(repository: Path) -> None:
    with open(repository / "huge", "wb") as file:
        # Larger than the disk, so reading it could not end.
        file.truncate(2**42)
    with pytest.raises(DataError, match="at 'huge'; raise max_bytes"):
        Folder(repository).snapshot()
    assert Folder(repository, ignore=["huge"], max_bytes=15).snapshot()
    with pytest.raises(DataError, match="at most 14 bytes"):
        Folder(repository, ignore=["huge"], max_bytes=14).snapshot()


def test_folder_rejects_special_files(repository: Path) -> None:
    os.mkfifo(repository / "pipe")
    with pytest.raises(DataError, match="special file at 'pipe'"):
        Folder(repository).snapshot()


def test_folder_rejects_invalid_arguments(tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match="expected a folder"):
        Folder(tmp_path / "none")
    wrong: Any = ".venv"
    with pytest.raises(ConfigError, match="expected a list of patterns"):
        Folder(tmp_path, ignore=wrong)


def test_unpickling_a_changed_folder_is_rejected(repository: Path) -> None:
    folder = Folder(repository)
    token, packed = folder.start, pickle.dumps(folder)
    assert pickle.loads(packed).start == token
    (repository / "log").write_text("later")
    with pytest.raises(DataError, match="unchanged"):
        pickle.loads(packed)


KILLED = """
import sys, time
from mas_gym.programs import Folder
folder = Folder(sys.argv[1])
print(folder.restore(folder.start), flush=True)
time.sleep(60)
"""


def test_folder_store_is_removed_only_after_its_process_ends(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    living = Folder(repository)
    kept = living.restore(living.start)
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(repository)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert process.stdout is not None
    left = Path(process.stdout.readline().strip())
    assert content(left) == content(repository)
    (left / "log").write_text("half")
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 20
    while left.parent.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left.parent.exists() and content(Path(kept)) == content(repository)
    del living
    gc.collect()
    assert not Path(kept).exists()


def test_leftover_process_does_not_change_later_folder_copies(repository: Path) -> None:
    folder = Folder(repository)
    copy = folder.restore(folder.start)
    script = (
        "import time\nwhile True:\n    open('log', 'a').write('x')\n    open('new', 'w').close()\n    time.sleep(0)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=copy, stderr=subprocess.DEVNULL)
    try:
        while not (Path(copy) / "new").exists():
            time.sleep(0.01)
        token = folder.snapshot(copy)
        folder.release(copy)
        assert content(folder.restore(folder.start)) == content(repository)
        assert "new" in content(folder.restore(token))
    finally:
        process.kill()
        process.wait()


# ---- programs


def say(request: Any, seed: int) -> str:
    return "abc"[seed % 3]


POLICY = ScriptedPolicy(say)


def note(world: str, text: str) -> str:
    """Add to the log of a world, and return it."""
    with open(os.path.join(world, "log"), "a") as file:
        file.write(text)
    return Path(world, "log").read_text()


def ask(client: OpenAI, text: str) -> str:
    messages: Any = [{"role": "system", "content": "You are the Solver."}, {"role": "user", "content": text}]
    return str(client.chat.completions.create(model="m", messages=messages).choices[0].message.content)


def solve(question: str, client: OpenAI, world: str) -> str:
    log = Path(world, "log").read_text()
    for _ in range(ROUNDS):
        log = note(world, ask(client, f"{question} {log}"))
    return log


async def solve_async(question: str, client: AsyncOpenAI, world: str) -> str:
    log = Path(world, "log").read_text()
    for _ in range(ROUNDS):
        messages: Any = [{"role": "user", "content": f"{question} {log}"}]
        reply = await client.chat.completions.create(model="m", messages=messages)
        log = note(world, str(reply.choices[0].message.content))
    return log


COMMAND = f"""
import json, os, sys
from urllib.request import Request, urlopen
def ask(text):
    body = {{"model": "m", "messages": [{{"role": "user", "content": text}}]}}
    head = {{"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urlopen(Request(url, json.dumps(body).encode(), head)) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]
question, path = sys.stdin.read(), os.environ["MAS_GYM_WORLD"] + "/log"
for _ in range({ROUNDS}):
    text = ask(question + " " + open(path).read())
    open(path, "a").write(text)
print(open(path).read())
"""


def searched(program: Program, planner: str = "mcts:6,2", **options: Any) -> list[search.Plan]:
    critic = search.ConstantCritic(0.5)
    return list(search.run(planner, PROBLEMS, program=program, policy=POLICY, critic=critic, seed=3, **options))


def check_logs(plans: list[search.Plan]) -> None:
    """Each complete path returned the log that its replies make."""
    for plan in plans:
        assert plan.error is None
        for candidate in plan.candidates:
            said = [turn.text.partition(RETURNED) for turn in candidate.state.turns]
            assert said[-1][2].strip() == "start" + "".join(reply for reply, _, _ in said)


@pytest.mark.parametrize("parked", [0, 256])
@pytest.mark.parametrize("function", [solve, solve_async])
def test_program_branches_have_separate_worlds(function: Callable[..., Any], parked: int, repository: Path) -> None:
    folder = Folder(repository)
    before = content(repository)
    program = Program(function, agents=["Solver"], world=folder)
    program.source.parked = parked
    plans = searched(program)
    check_logs(plans)
    assert sum(len(plan.candidates) for plan in plans) > 6
    assert content(repository) == before
    check_released(folder)


def test_program_results_are_independent_of_the_limits_on_executions(repository: Path) -> None:
    def found(parked: int, running: int) -> list[tuple[str, ...]]:
        program = Program(solve, agents=["Solver"], world=Folder(repository))
        program.source.parked, program.source.running = parked, running
        plans = sorted(searched(program), key=lambda plan: plan.problem_id)
        return [tuple(turn.text for c in plan.candidates for turn in c.state.turns) for plan in plans]

    assert found(parked=0, running=1) == found(parked=256, running=64)


@pytest.mark.slow
@pytest.mark.parametrize("isolate", [True, False])
def test_program_in_another_process_receives_its_world(isolate: bool, repository: Path, tmp_path: Path) -> None:
    file = tmp_path / "agents.py"
    imports = (
        f"import os\nfrom pathlib import Path\nfrom typing import Any\nfrom openai import OpenAI\nROUNDS = {ROUNDS}\n"
    )
    file.write_text(imports + "\n".join(map(inspect.getsource, (note, ask, solve))) if isolate else COMMAND)
    source: Any = f"{file}:solve" if isolate else f"{sys.executable} {file}"
    options: Any = {"isolate": True} if isolate else {"files": [file]}
    folder = Folder(repository)
    check_logs(searched(unparked(Program(source, agents=["Solver"], world=folder, **options)), "mcts:2,2"))
    check_released(folder)


def test_program_dry_run_leaves_the_original_unchanged(repository: Path) -> None:
    program = Program(solve, world=Folder(repository))
    before = content(repository)
    assert program.mas.agents[0].name == "Solver"
    assert content(repository) == before


runs: list[str] = []


def test_recorded_tool_is_not_repeated_and_its_changes_to_the_world_are_restored(repository: Path) -> None:
    def solve(question: str, client: OpenAI, world: str) -> str:
        log = ""
        for _ in range(ROUNDS):
            reply = ask(client, f"{question} {log}")
            log = recorded_at(world)(reply)
        assert log == Path(world, "log").read_text()
        return log

    def recorded_at(world: str) -> Callable[[str], str]:
        def note_in_world(text: str) -> str:
            runs.append(text)
            return note(world, f"{text}{uuid.uuid4().hex}")

        return mas_gym.recorded(note_in_world)

    runs.clear()
    [plan, other] = searched(unparked(Program(solve, agents=["Solver"], world=Folder(repository))))
    assert plan.error is None and other.error is None
    for candidate in (*plan.candidates, *other.candidates):
        *_, answer = candidate.state.turns[-1].text.partition(RETURNED)
        assert answer.strip().startswith("start") and len(answer.strip()) == 5 + ROUNDS * 33
    states = {c.state.path()[i].digest for p in (plan, other) for c in p.candidates for i in range(1, ROUNDS + 1)}
    assert len(runs) < len(states) + 2 * 6 * ROUNDS


def test_prompt_that_contains_the_path_of_a_world_copy_fails_with_an_explanation(repository: Path) -> None:
    def solve(question: str, client: OpenAI, world: str) -> str:
        return ask(client, f"{question} in {world}")

    for plan in searched(Program(solve, agents=["Solver"], world=Folder(repository))):
        assert plan.error is not None and "paths relative to it" in plan.error
    masked = Program(solve, agents=["Solver"], world=Folder(repository), normalize=lambda request: request["model"])
    assert all(plan.error is None for plan in searched(masked))


def test_world_is_required_if_and_only_if_the_function_takes_one(repository: Path) -> None:
    def without(question: str, client: OpenAI) -> str:
        return ""

    with pytest.raises(ConfigError, match="requires a world, but got none"):
        Program(solve)
    with pytest.raises(ConfigError, match="takes no world, but got one"):
        Program(without, world=Folder(repository))


def test_program_identity_depends_on_the_content_of_the_world(repository: Path) -> None:
    def stated() -> Any:
        return identity_of(Program(solve, agents=["Solver"], world=Folder(repository)))

    first = stated()
    (repository / "__pycache__").mkdir()
    os.utime(repository / "log", (0, 0))
    assert stated() == first
    (repository / "src" / "run.sh").chmod(0o644)
    assert stated() != first


class Notes(World):
    """A table in SQLite; each copy is a database file."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.kept = folder, dict[str, str]()

    def snapshot(self, copy: str | None = None) -> str:
        with sqlite3.connect(copy or self.folder / "original.db") as database:
            dump = "\n".join(database.iterdump())
        database.close()
        token = str(len(dump)) + dump[-80:]
        self.kept[token] = dump
        return token

    def restore(self, token: str, copy: str | None = None) -> str:
        copy = copy or str(self.folder / f"{uuid.uuid4().hex}.db")
        Path(copy).unlink(missing_ok=True)
        with sqlite3.connect(copy) as database:
            database.executescript(self.kept[token])
        database.close()
        return copy

    def release(self, copy: str) -> None:
        Path(copy).unlink()


def solve_with_table(question: str, client: OpenAI, world: str) -> str:
    log = "start"
    for _ in range(ROUNDS):
        reply = ask(client, f"{question} {log}")
        with sqlite3.connect(world) as database:
            database.execute("INSERT INTO notes VALUES (?)", [reply])
            log = "start" + "".join(text for (text,) in database.execute("SELECT text FROM notes ORDER BY rowid"))
        database.close()
    return log


def test_search_over_a_program_restores_its_database_world(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "original.db") as database:
        database.execute("CREATE TABLE notes (text TEXT)")
    database.close()
    world = Notes(tmp_path)
    check_logs(searched(unparked(Program(solve_with_table, agents=["Solver"], world=world))))


def test_service_gives_concurrent_requests_separate_worlds(repository: Path) -> None:
    pytest.importorskip("fastapi", reason="the fastapi package is not installed")
    from loopback import serving

    from search.service.app import make_app
    from search.service.search_pool import Service

    arrived = {"one": threading.Event(), "two": threading.Event()}

    def meet(question: str, client: OpenAI, world: str) -> str:
        arrived[question].set()
        # Both requests have a copy before either of them changes its own.
        assert all(event.wait(60) for event in arrived.values())
        return f"{question}: {solve(question, client, world)}"

    folder = Folder(repository)
    before = content(repository)
    program = Program(meet, agents=["Solver"], world=folder)
    service = Service(RunSpec((), program.mas, POLICY, search.load_planner("sc:2"), source=ProgramModels(program)))
    with (
        serving(make_app(service)) as base,
        OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as client,
        ThreadPoolExecutor(2) as pool,
    ):

        def answer_of(question: str) -> str:
            messages: Any = [{"role": "user", "content": question}]
            return str(client.chat.completions.create(model="mas-gym", messages=messages).choices[0].message.content)

        answers = list(pool.map(answer_of, arrived))
    for question, answer in zip(arrived, answers, strict=True):
        assert re.fullmatch(f"{question}: start[abc]{{{ROUNDS}}}", answer)
    assert content(repository) == before
    check_released(folder)


class Full(Notes):
    """A world that cannot be copied."""

    def restore(self, token: str, copy: str | None = None) -> str:
        raise OSError(28, "No space left on device")


def test_search_fails_if_its_world_cannot_be_copied(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "original.db") as database:
        database.execute("CREATE TABLE notes (text TEXT)")
    database.close()
    for plan in searched(Program(solve_with_table, agents=["Solver"], world=Full(tmp_path))):
        assert plan.error is not None and "No space left" in plan.error


@pytest.mark.slow
def test_repair_example_with_mcts_repairs_at_least_as_many_modules_as_a_single_pass(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = Path(__file__).parents[1] / "examples" / "worlds" / "repair.py"
    runpy.run_path(str(path))["main"](4, ("single", "mcts:10,3"))
    single, mcts = (int(line.split()[1]) for line in capsys.readouterr().out.splitlines())
    assert mcts >= single and mcts > 0
