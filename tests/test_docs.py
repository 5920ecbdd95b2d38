"""The site's Python blocks, commands and examples run, and its pictures are current.

A comment before a block may shorten it, as in ``<!-- ci: "-n 100" becomes "-n 2"; "a" becomes "b" -->``, or leave
it out with a reason, as in ``<!-- ci: skip, because it needs a GPU -->``.
"""

import re
import runpy
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from ports import free_port
from typer.testing import CliRunner

from mas_gym.cli import app

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "pictures")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
BLOCK = re.compile(
    r"^(?:<!-- ci: (?P<note>[^>]*?) -->\n|<!-- from: \S+ -->\n)?```(?P<language>\w+)\n(?P<code>.*?)^```",
    re.M | re.S,
)
SETUP = ("git clone ", "python3 -m venv ", "pip install ", "curl ", "hf ")
"""Commands of a shell session that are read and not run."""
TOO_LONG = {"docs/engines.md", "docs/decisions.md"}
"""Pages that show commands for engines which are not here; their options are checked by parsing."""


class Block(NamedTuple):
    language: str
    code: str
    note: str


def blocks(path: Path) -> Iterator[Block]:
    text = path.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        yield Block(match["language"], match["code"], match["note"] or "")


def shortened(block: Block) -> list[str]:
    """Return the commands to run."""
    code = block.code.replace("\\\n", " ")
    for old, new in re.findall(r'"([^"]*)" becomes "([^"]*)"', block.note):
        assert old in code, f"the page has no {old!r} to shorten"
        code = code.replace(old, new)
    return [line for line in code.splitlines() if line.strip()]


LINKING = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES, *sorted((ROOT / "benchmarks").rglob("*.md"))]


@pytest.mark.parametrize("path", LINKING, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_files_are_valid(path: Path) -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", path.read_text(encoding="utf-8"))
    assert not [link for link in links if not (path.parent / link).exists()]


def run_command(line: str) -> None:
    words = shlex.split(line, comments=True)
    if line.startswith(SETUP):
        for extra in re.findall(r"\[([\w,]+)\]", line):
            assert set(extra.split(",")) <= set(EXTRAS)
        return
    assert words[0] == "mas-gym", f"expected a mas-gym command, got {line}"
    done = CliRunner(env={"COLUMNS": "100"}).invoke(app, words[1:])
    assert done.exit_code == 0, f"{line}\n{done.output}{done.exception!r}"


RUNNABLE = [page for page in PAGES if any(b.language in ("python", "console") for b in blocks(page))]
SLOW = {
    *("index.md", "first-comparison.md", "first-critic.md"),
    *("bench-critic.md", "reinforcement-learning.md", "train-critic.md", "verifiers.md"),
}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if page.name in SLOW else [], id=str(page.relative_to(ROOT)))
        for page in RUNNABLE
        if str(page.relative_to(ROOT)) not in TOO_LONG
    ],
)
def test_code_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # A reader has downloaded the examples into the folder where the commands are typed.
    for folder in (tmp_path, tmp_path / "examples"):
        shutil.copytree(ROOT / "examples", folder, dirs_exist_ok=True)
    monkeypatch.syspath_prepend(tmp_path)
    if page.stem == "trace":
        pytest.importorskip("opentelemetry.sdk", reason="traces need opentelemetry-sdk")
    names: dict[str, Any] = {"__name__": "page", "__file__": str(tmp_path / "examples" / "page.py")}
    for block in blocks(page):
        if block.note.startswith("skip"):
            assert block.note.startswith("skip, because ")
        elif block.language == "python":
            exec(compile(block.code, str(page), "exec"), names)
        elif block.language == "console":
            for line in shortened(block):
                run_command(line)


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/start/first-critic.md", *sorted(TOO_LONG)])
def test_commands_that_take_too_long_to_run_as_shown_are_valid(page: str) -> None:
    import typer

    for block in blocks(ROOT / page):
        for line in shortened(block) if block.language == "console" else []:
            words = shlex.split(line, comments=True)
            if not words or words[0] != "mas-gym":
                continue
            command: Any = typer.main.get_command(app)
            words = words[1:]
            while hasattr(command, "commands"):
                command = command.commands[words.pop(0)]
            with command.make_context(line, words) as context:
                assert context.params


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("own_planner", (2,), r"\d of 2 right, 16\.0 agent calls per problem"),
        ("own_critic", (3, "mcts:3,2"), r"constant\(0.5\) +\d of 3 right\nnothing-lost +\d of 3 right"),
        ("handoffs", (8,), r"single:recipients=own +\d +\d +\d .*\n.*critic +8 +8 +8 "),
        ("own_task", (), r"by kind text +3 of 5 right\nby grade\(\) +4 of 5 right"),
        ("log_reader", (), r"a week\? counter, writer: Final Answer: 7\nHow many months"),
        ("own_policy", (6,), r"single +\d of 6 right\nsc:5 +\d of 6 right"),
        pytest.param("resume", (4,), "4 plans; .*\nsame answers as a run in one go: True", marks=pytest.mark.slow),
        pytest.param("read_store", (3,), r"single +\d.*\n\d+ rows", marks=pytest.mark.slow),
        (
            "trace_search",
            (),
            r"'chat tiny': 4, 'evaluate policy-likelihood': 4, 'invoke_workflow rpsv': 1(.|\n)*Verifier",
        ),
        pytest.param(
            "train_critic", (6, 6, 0.1), r"\d+ pairs from 6 trees\n(.|\n)* of 4 right", marks=pytest.mark.slow
        ),
        pytest.param("maskable_ppo", (64, 4), r"learned \d.* random \d.* difference", marks=pytest.mark.slow),
        pytest.param("many_machines", (2, 1), "of 2 right", marks=pytest.mark.slow),
        pytest.param("serve_search", (0,), r"Final Answer: \d+ \(\d+ tokens\)", marks=pytest.mark.slow),
    ],
)
def test_examples_run(name: str, arguments: tuple[Any, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "maskable_ppo":
        pytest.importorskip("sb3_contrib", reason="the example learns with sb3-contrib")
    if name == "trace_search":
        pytest.importorskip("opentelemetry.sdk", reason="traces need opentelemetry-sdk")
    main = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"]
    if name == "serve_search":
        arguments = (free_port(),)
    main(*arguments)
    assert re.search(said, capsys.readouterr().out)


def test_every_example_is_shown_on_a_page_and_run_by_a_test() -> None:
    tests = "".join(path.read_text("utf-8") for path in (ROOT / "tests").glob("test_*.py"))
    shown = set(re.findall(r"^<!-- from: examples/(\w+)\.py -->$", "".join(p.read_text("utf-8") for p in PAGES), re.M))
    assert shown == {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert all(f'"{name}' in tests for name in shown)


def test_pictures_and_pages_match_their_sources() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "pictures.py"))
    for name, text in script["drawings"]():
        assert (ROOT / "docs" / "pictures" / name).read_text("utf-8") == text, "run python docs/pictures.py"
    for page in PAGES:
        assert page.read_text("utf-8") == script["filled"](page), "run python docs/pictures.py"


def test_llms_txt_describes_every_page() -> None:
    site = ROOT / "build" / "site"
    if not (site / "llms.txt").is_file():
        pytest.skip("the site is not built: mkdocs build")
    lines = [line for line in (site / "llms.txt").read_text("utf-8").splitlines() if line.startswith("- ")]
    found = [re.fullmatch(r"- \[(.+?)\]\((.+?)\): .{10,}", line) for line in lines]
    assert lines and all(found), [line for line, match in zip(lines, found, strict=True) if not match]
    pages = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    assert {match[2] for match in found if match} == pages - {"404.html"}


def test_every_page_ends_with_next_steps() -> None:
    for page in PAGES:
        if page.parent.name in ("start", "concepts", "howto") and page.stem != "index":
            assert "**Next:**" in page.read_text("utf-8").splitlines()[-1], page.name


@pytest.mark.slow
def test_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="the notebook needs nbclient and ipykernel")
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(ROOT / "examples" / "first_steps.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells), "commit the notebook without outputs"
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", ()))
    assert "Solver sees Planner" in printed and "Hit@1" in printed
