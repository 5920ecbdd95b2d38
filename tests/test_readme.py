"""The code of README.md, and the commands of the index page."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mas_gym.cli import app

ROOT = Path(__file__).resolve().parents[1]
README, INDEX = ROOT / "README.md", ROOT / "docs" / "index.md"
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.M | re.S)


def python_block(page: Path, mark: str) -> str:
    [found] = [
        code for code in re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.M | re.S) if mark in code
    ]
    return found


def test_readme_has_at_most_120_lines() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 120


def test_readme_environment_code_block_runs() -> None:
    names: dict[str, Any] = {}
    exec(python_block(README, "gym.make("), names)
    assert names["reward"] == 0.0 and not names["terminated"]


@pytest.mark.slow
def test_search_code_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(python_block(README, "search.run("), names)
    assert names["plan"].error is None and (tmp_path / "runs.db").is_file()


@pytest.mark.slow
def test_commands_of_the_index_page_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shown sizes take minutes, so the comparison is shortened; `mas-gym view` serves until Ctrl-C."""
    monkeypatch.chdir(tmp_path)
    [look] = [part for part in CONSOLE.findall(INDEX.read_text(encoding="utf-8")) if "mas-gym blame runs.db" in part]
    lines = [line for line in look.splitlines() if line.startswith("mas-gym ") and " view " not in line]
    shorter = {"-n 100": "-n 2", "--seeds 14,24,42": "--seeds 14", "mcts:20,2": "mcts:3,2"}
    assert [line.split()[1] for line in lines] == ["solve", "eval", "report", "blame", "bench-critic"]
    assert all(old in lines[1] for old in shorter)
    for old, new in shorter.items():
        lines[1] = lines[1].replace(old, new)
    lines[4] = lines[4].replace("examples/", f"{ROOT}/examples/")
    shown = []
    for line in lines:
        done = CliRunner(env={"COLUMNS": "100"}).invoke(app, shlex.split(line, comments=True)[1:])
        assert done.exit_code == 0, f"{line}\n{done.output}"
        shown.append(done.output)
    assert "Answer: 20" in shown[0] and re.search(r"mcts:3,2 +masprm ", shown[1])
    assert {path.name for path in tmp_path.iterdir()} >= {"tree.html", "runs.db", "report.html"}
