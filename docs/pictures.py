"""Generates the site's pictures in ``docs/pictures``.

``python docs/pictures.py`` draws the turns of an episode and the shipped graphs, and copies example files into the
pages that show them; a test checks that all are up to date. ``python docs/pictures.py --screens`` also takes
screenshots of the tree page, the index of runs and the report with headless Chromium, at 1280 and 390 pixels, in light
and dark mode.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import Any
from urllib.request import HTTPCookieProcessor, build_opener

import gymnasium as gym

import mas_gym
from search.pages.graph_drawing import graph_svg

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(__file__).parent / "pictures"
PROBLEM = "arithmetic/test/0/3/1"
MESSAGES = (
    "Facts: has 27, buys 3, loses 4, loses 7. Question: how many?",
    "Path: start 27, + 3, - 4, - 7.",
    "Count: 27 + 3 = 30, 30 - 4 = 26.",
    "Fix: 27 + 3 = 30, 30 - 4 = 26, 26 - 7 = 19.\nFinal Answer: 19",
)
"""Messages of the bundled agents in one pass: the Solver omits the last step, and the Verifier adds it."""
DARK = "@media (prefers-color-scheme:dark){svg{--md-default-fg-color:#e2e4e9;--md-default-bg-color:#1e2129}}"
WALK = Path(__file__).parent / "concepts" / "transcript.md"
MARKS = ("<!-- begin: python docs/pictures.py -->\n", "<!-- end -->\n")
"""The part of the page that this script writes."""
FILE = re.compile(r"^(<!-- from: (\S+) -->\n```\w+\n).*?^```$", re.M | re.S)


def transcript() -> tuple[str, dict[str, str]]:
    """Return Markdown that walks through one episode, and its drawings by file name.

    Each turn has the graph, the view, the mask, the message and the reward.
    """
    drawn: dict[str, str] = {}
    env = gym.make("MAS-Arithmetic-v0", split="test", view="local")
    mas: Any = env.unwrapped
    observation, info = env.reset(options={"problem_id": PROBLEM})
    parts = [f"> {observation['question']}\n"]
    for turn, message in enumerate(MESSAGES, start=1):
        name = info["agent"]
        title = f"turn {turn}: {name} acts"
        drawn[f"turn-{turn}.svg"] = _svg(graph_svg(mas.mas, mas.state, title))
        parts += [f"### Turn {turn}: the {name}\n", f"![{title}](../pictures/turn-{turn}.svg)\n"]
        parts.append(_view(mas, observation, info))
        observation, reward, terminated, _, info = env.step((message, mas.ALL))
        parts.append(f"It sends this message to `ALL`, which at this turn is {_names(mas)}:\n\n{_quoted(message)}\n")
        parts.append(f"Reward **{reward:+g}**; the episode {'ends' if terminated else 'continues'}.\n")
    title = "the message has reached sink"
    drawn["turn-end.svg"] = _svg(graph_svg(mas.mas, mas.state, title))
    parts += ["### The end\n", f"![{title}](../pictures/turn-end.svg)\n"]
    parts.append(
        f"The last message has reached `sink`. The task extracts the answer `{info['extracted']}` and compares it with "
        "the reference. The reward is +1 if the two are equal and -1 otherwise. "
        f"Here `info['correct']` is `{info['correct']}`.\n"
    )
    return "\n".join(parts), drawn


def _svg(drawing: str) -> str:
    """Return a drawing as a file, with colors for light and dark readers."""
    return drawing.replace("<style>", f"<style>{DARK}", 1)


def _view(mas: Any, observation: dict[str, Any], info: dict[str, Any]) -> str:
    mask = [int(bit) for bit in info["action_mask"]]
    names = [mas.mas.node_name(node) for node in range(len(mask))]
    rows = ["| sees | |", "|---|---|"]
    if mas.mas.sees_question[observation["acting"]]:
        rows.append("| question | the whole text |")
    for message in observation["transcript"]:
        rows.append(f"| message of {mas.mas.node_name(message.speaker)} | {escape(message.text)} |")
    table = "\n".join(rows)
    header = " | ".join(names)
    return (
        f"{table}\n\nIts action mask, `info['action_mask']`:\n\n| {header} |\n|{':---:|' * len(mask)}\n"
        f"| {' | '.join(map(str, mask))} |\n"
    )


def _names(mas: Any) -> str:
    return " and ".join(f"`{mas.mas.node_name(node)}`" for node in mas.state.recipients)


def _quoted(message: str) -> str:
    return "\n".join(f"> {line}  " for line in message.splitlines())


def drawings() -> Iterator[tuple[str, str]]:
    """Yield the name and text of each drawing that needs no model."""
    yield from transcript()[1].items()
    own = ROOT / "examples" / "own_mas.yaml"
    command = [sys.executable, "-m", "mas_gym.cli", "check", own]
    # The width is stated, because a terminal and pytest have others.
    environment = {**os.environ, "COLUMNS": "80"}
    yield "check.txt", subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    yield "writers.svg", _svg(graph_svg(mas_gym.load_mas(own)))
    yield "rpsv.svg", _svg(graph_svg(mas_gym.load_mas("rpsv")))


def filled(page: Path) -> str:
    """Return a page with the current text of its files and of its example episode."""

    def block(found: re.Match[str]) -> str:
        return f"{found[1]}{(ROOT / found[2]).read_text('utf-8').rstrip()}\n```"

    text = FILE.sub(block, page.read_text("utf-8"))
    if page != WALK:
        return text
    before, _, rest = text.partition(MARKS[0])
    return before + MARKS[0] + "\n" + transcript()[0] + "\n" + MARKS[1] + rest.partition(MARKS[1])[2]


def screens(store: Path | None) -> None:
    """Photograph the index of a store, a small new one by default, its report, the tree page and the site."""
    with tempfile.TemporaryDirectory() as folder:
        tree, report = Path(folder, "tree.html"), Path(folder, "report.html")
        if store is None:
            store = Path(folder, "runs.db")
            arms = ["--planner", "single", "--planner", "bon:10", "--planner", "mcts:10,3"]
            critics = ["--critic", "tiny-orm", "--critic", "tiny-masprm"]
            _mas_gym("eval", "-n", "60", *arms, *critics, "--store", store, "--plot", FOLDER / "frontier.png")
        _mas_gym("solve", "--task", "arithmetic", "--critic", "tiny-masprm", "--tree", tree)
        _mas_gym("report", store, "--out", report)
        from mas_gym.cli.view import make_server

        server = make_server(store, 0)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        reader = build_opener(HTTPCookieProcessor())
        while 'http-equiv="refresh"' in reader.open(server.url).read().decode():
            pass
        for page, address in {"tree": tree.as_uri(), "index": server.url, "report": report.as_uri()}.items():
            photograph(address, lambda width, scheme, page=page: FOLDER / f"{page}-{width}-{scheme}.png")
        server.shutdown()


def photograph(address: str, file: Callable[[int, str], Path]) -> None:
    """Photograph a page at 1280 and 390 pixels, light and dark."""
    sys.path.insert(0, str(ROOT / "tests"))
    from browser import Browser

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, Browser(Path(profile)) as browser:
        for width, height in ((1280, 800), (390, 844)):
            for scheme in ("light", "dark"):
                page = browser.page(address, width, height, scheme)
                page.shot(file(width, scheme))
                page.close()


def _mas_gym(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "mas_gym.cli", *map(str, words)], check=True)


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--screens", action="store_true", help="also take screenshots, which needs Chromium")
    parser.add_argument("--store", type=Path, help="the store of the index; a new one by default")
    wanted = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    for name, text in drawings():
        (FOLDER / name).write_text(text, encoding="utf-8")
    for page in Path(__file__).parent.rglob("*.md"):
        page.write_text(filled(page), encoding="utf-8")
    if wanted.screens:
        screens(wanted.store)


if __name__ == "__main__":
    main()
