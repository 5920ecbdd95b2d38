"""What others wrote reaches the terminal with its control characters spelled out, whichever command prints it."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
import unicodedata
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the fastapi package is not installed")
pytest.importorskip("openai", reason="the openai package is not installed")

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from loopback import make_app, serving
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

import search
from mas_gym.cli import app, console
from mas_gym.cli.error_output import log_handler
from mas_gym.errors import PolicyError
from mas_gym.internal.text import one_line, printable
from mas_gym.policies import SamplingRequest, ScriptedPolicy

CLEAR, TITLE, LINK = "\x1b[2J\x1b[1;1H", "\x1b]0;owned\x07", "\x1b]8;;http://evil.example\x1b\\"
EVIL = f"{CLEAR}{TITLE}{LINK}\x9b31m\r\x08\x00\u202e\u2066\u2028\ud800[red]:smile:[/red][bold"
NAME = "\x1b[31m\u202e[red]\rName"
"""Text of a name, without lone surrogates, which file names and YAML cannot contain."""


def assert_clean(text: str, shown: str = "[red]") -> None:
    """Every character is printable or ends a line, and markup is readable."""
    steering = {c for c in text if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") and c != "\n"}
    steering |= {c for c in text if c in "\u061c\u200e\u200f" or "\u202a" <= c <= "\u202e" or "\u2066" <= c <= "\u2069"}
    assert not steering, repr(text)
    assert shown in flat(text), text


def flat(text: str) -> str:
    """Return output without frames, spaces and line breaks."""
    return re.sub(r"[\s│]+", "", text)


def run(*arguments: object, input: str | None = None) -> str:
    result = CliRunner(env={"COLUMNS": "100"}).invoke(app, [str(a) for a in arguments], input=input)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.output + result.stderr


@pytest.fixture(scope="module")
def policy() -> Iterator[str]:
    """The spec of a policy whose messages are hostile."""

    def script(request: SamplingRequest, seed: int) -> str:
        return f"{EVIL.replace(chr(0xD800), '')}\nFinal Answer: 7"

    with serving(make_app(ScriptedPolicy(script, name="evil"))) as base:
        yield f"openai:served@{base}/v1"


@pytest.fixture(scope="module")
def mas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A MAS file with hostile names and prompts."""
    file = tmp_path_factory.mktemp("mas") / "evil.yaml"
    agents = [{"name": f"{NAME}{i}", "system_prompt": NAME, "max_new_tokens": 20} for i in range(2)]
    file.write_text(yaml.safe_dump({"name": NAME, "agents": agents, "edges": [[-1, 0], [0, 1]]}), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def store(mas: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with hostile run names, problem ids, policy names, messages and reasons of failure."""
    from mas_gym.tasks import Problem, ProblemTask

    def script(request: SamplingRequest, seed: int) -> str:
        if "fail" in request.messages[-1].content:
            raise PolicyError(EVIL)
        return f"{NAME}\nFinal Answer: 7"

    file = tmp_path_factory.mktemp("store") / "runs.db"
    task = ProblemTask.of([Problem(f"{NAME}{i}", f"{NAME} {('fail', 'work')[i]}", "7", "number") for i in range(2)])
    policy = ScriptedPolicy(script, name=NAME)
    list(search.run("sc:2", task, mas=str(mas), policy=policy, store=str(file), run_name=NAME))
    return file


def test_solve_escapes_hostile_text(policy: str, mas: Path, tmp_path: Path) -> None:
    shown = run("solve", f"{NAME} question", "--policy", policy, "--mas", mas, "--planner", "sc:2")
    assert_clean(shown)
    assert "\\x1b[31m" in flat(shown) and ":smile:" in flat(shown)


def test_play_escapes_hostile_text(policy: str) -> None:
    turn = f"{NAME}\nFinal Answer: 7\n\n"
    assert_clean(run("play", "MAS-Arithmetic-v0", "--policy", policy, "--agent", "Verifier", input=turn))
    assert_clean(run("play", "MAS-Arithmetic-v0", input=turn * 4))
    assert_clean(run("play", NAME))
    assert_clean(run("play", "MAS-Arithmetic-v0", "--agent", NAME))


def test_eval_and_rollouts_escape_hostile_text(policy: str, mas: Path, tmp_path: Path) -> None:
    store = tmp_path / "[red]\x1b[2J\u202e.db"
    options = ("-n", 2, "--policy", policy, "--mas", mas)
    assert_clean(run("eval", *options, "--store", store, "--json", tmp_path / f"{NAME}.json"))
    assert_clean(run("rollouts", *options, "--planner", "mcts:3,2", "--store", store), "nodes")


def test_eval_escapes_hostile_server_errors(tmp_path: Path) -> None:
    def script(request: SamplingRequest, seed: int) -> str:
        raise PolicyError(EVIL)

    with serving(make_app(ScriptedPolicy(script, name="evil"))) as base:
        shown = run("eval", "-n", 1, "--policy", f"openai:[red]\x1b[2J\u202e@{base}/v1")
    assert_clean(shown)


def test_eval_table_escapes_failures(store: Path) -> None:
    from search.results.outcomes import Outcome
    from search.results.summary import summarize
    from search.results.table import Comparison

    reason = EVIL + "\nAnswer: forged" + "x" * 10_000
    outcome = Outcome(NAME, NAME, 0, NAME, False, None, 0, 1, 1, 0, reason, ())
    for width in (40, 100):
        out = io.StringIO()
        to = console._safe_console()(file=out, width=width, markup=False, emoji=False, highlight=False)
        to.print(Comparison(tuple(summarize([outcome])), title=NAME).show(width))
        assert_clean(out.getvalue())
        assert "\\nAnswer:forged" in flat(out.getvalue()) and "morecharacters" in flat(out.getvalue())


def test_status_escapes_hostile_text(store: Path) -> None:
    shown = run("status", store)
    assert_clean(shown)
    assert "failed in" in shown and ":smile:" in flat(shown)


@pytest.mark.parametrize("command", ["status", "view", "train masprm --store", "serve --mas", "solve x --mas"])
def test_missing_file_names_are_escaped(command: str, tmp_path: Path) -> None:
    assert_clean(run(*command.split(), tmp_path / "[red]\x1b[2J\u202e\r"))


@pytest.mark.parametrize("option", ["--planner", "--critic", "--policy", "--task", "--mas", "--seeds", "--option",
                                    "--budget", "--json", "--data", "--unknown", "-n"])  # fmt: skip
def test_option_values_are_escaped(option: str, tmp_path: Path) -> None:
    more = ("--planner", "mcts:3,2") if option == "--critic" else ()
    assert_clean(run("eval", *more, option, f"/no/{NAME}" if option == "--json" else NAME), "")


def test_third_party_environment_name_is_escaped() -> None:
    import gymnasium as gym

    gym.register("Evil-v0", entry_point="mas_gym.envs.env:MASEnv", kwargs={"task": "math", "mas": "rpsv", "data": NAME})
    try:
        assert_clean(run("envs"), "\\x1b[31m")
        assert json.loads(run("envs", "--json"))[-1]["data"] == NAME
    finally:
        del gym.registry["Evil-v0"]


def test_tracebacks_logs_and_warnings_are_escaped(tmp_path: Path) -> None:
    code = (
        "import sys, logging, warnings\nimport mas_gym.cli.listings as status\n"
        "from mas_gym.cli import main\n"
        "import search\n"
        "def broken(path):\n"
        "    warnings.warn(path.name)\n"
        "    logging.getLogger('mas_gym').warning('%s', path.name)\n"
        "    raise RuntimeError(path.name)\n"
        "search.open_store = broken\nmain()\n"
    )
    for options in ([], ["--debug"]):
        command = [sys.executable, "-c", code, *options, "status", NAME]
        done = subprocess.run(command, capture_output=True, timeout=60, env=os.environ | {"COLUMNS": "80"})
        shown = done.stderr.decode()
        assert done.returncode == 1 and "RuntimeError" in shown and "UserWarning" in shown and "WARNING" in shown
        assert_clean(shown)


def test_console_escapes_every_kind_of_content(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(title=EVIL)
    table.add_column(EVIL)
    table.add_row(EVIL)
    table.add_row(Text(EVIL, style="bold"))
    kinds: list[Any] = [EVIL, Text(EVIL), Panel(EVIL, title=EVIL, subtitle=Text(EVIL)), table, {"key": EVIL}, [EVIL]]
    for content in kinds:
        console.stdout().print(content)
        assert_clean(capsys.readouterr().out)
    console.stdout().rule(EVIL)
    assert_clean(capsys.readouterr().out)


def test_escaped_text_wraps_inside_its_frame_and_keeps_its_styles() -> None:
    out = io.StringIO()
    to = console._safe_console()(file=out, width=30, markup=False)
    name = "\x1b[31m\u202e[red]Name"  # rich itself drops a carriage return
    to.print(Panel(Text(name * 20)))
    assert max(map(len, out.getvalue().splitlines())) == 30
    assert "".join(line.strip("│ ") for line in out.getvalue().splitlines()[1:-1]) == printable(name * 20)
    text = console._escaped(Text.assemble("\x1b", ("ab", "bold"), "\x00"))
    assert [(text.plain[span.start : span.end], span.style) for span in text.spans] == [("ab", "bold")]


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(codec=None, exclude_categories=()), max_size=80))
def test_arbitrary_text_is_escaped(text: str) -> None:
    out = io.StringIO()
    to = console._safe_console()(file=out, width=40, markup=False, emoji=False, highlight=False)
    to.print(Panel(text), Text(text), text)
    assert_clean(out.getvalue(), "")
    assert "\n" not in one_line(text)


def test_log_records_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    handler = log_handler(logging.INFO)
    handler.emit(logging.LogRecord("x", logging.INFO, "", 0, "%s", (EVIL,), None))
    assert_clean(capsys.readouterr().err)
    assert warnings.formatwarning is not None
