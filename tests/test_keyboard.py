"""The pages in a real browser, with key presses alone: everything takes focus, shows it, and works."""

from __future__ import annotations

import functools
import http.server
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Browser, Page, Stuck
from search_worlds import HashCritic, chain, problems, talker
from typer.testing import CliRunner

import search
from mas_gym.cli import app
from mas_gym.cli.view import make_server
from mas_gym.errors import PolicyError
from mas_gym.policies import SamplingRequest, ScriptedPolicy

pytest.importorskip("matplotlib", reason="reports draw with the extra 'plot'")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "build" / "site"
REASON = "the engine said that the window of 4,096 tokens is full"
AT_FOCUS = """(() => {
  const e = document.activeElement, box = e.getBoundingClientRect(), looks = getComputedStyle(e);
  const inside = box.right > 0 && box.bottom > 0 && box.left < innerWidth && box.top < innerHeight;
  // The middle of what is in the window must belong to the element: nothing may lie over it.
  const x = (Math.max(0, box.left) + Math.min(innerWidth, box.right)) / 2;
  const y = (Math.max(0, box.top) + Math.min(innerHeight, box.bottom)) / 2;
  const top = document.elementFromPoint(x, y);
  const ring = e.matches(":focus-visible") && looks.outlineStyle !== "none" && parseFloat(looks.outlineWidth) >= 1;
  const all = [...document.querySelectorAll("*")];
  return {at: e === document.body ? -1 : all.indexOf(e), name: e.outerHTML.slice(0, 120), ring,
          seen: inside && (e.contains(top) || (top && top.contains(e)))};
})()"""
CONTROLS = """(() => {
  const all = [...document.querySelectorAll("*")];
  const found = document.querySelectorAll("a[href], button, input, select, summary, [tabindex='0']");
  const shown = e => !e.disabled && !e.hidden && e.type !== "hidden" && e.checkVisibility({visibilityProperty: true});
  // Of a group of radio buttons, one takes focus.
  const stops = [...found].filter(e => shown(e) && e.tabIndex >= 0 && (e.type !== "radio" || e.checked));
  return stops.map(e => [all.indexOf(e), e.outerHTML.slice(0, 120)]);
})()"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a store, in which the searches of one row have failed, and its report."""
    folder = tmp_path_factory.mktemp("keyboard")
    store = folder / "runs.db"
    planners, critics = ["single", "sbs:4,2", "mcts:8,3"], {"hash": HashCritic()}
    search.compare(planners, problems(6), mas=chain(3), policy=talker(), critics=critics, seeds=(1, 2), store=store)

    def fail(request: SamplingRequest, seed: int) -> str:
        raise PolicyError(REASON)

    policy = ScriptedPolicy(fail, "talker", 1)
    list(search.run("sc:2", problems(6), mas=chain(3), policy=policy, store=store))
    done = CliRunner().invoke(app, ["report", str(store), "--out", str(folder / "report.html")])
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture(scope="module")
def address(made: Path) -> Iterator[str]:
    server = make_server(made / "runs.db", 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.url
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def report(made: Path) -> str:
    return (made / "report.html").as_uri()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


def tab_to(page: Page, selector: str, shift: bool = False) -> None:
    """Press Tab until the selected element has focus."""
    for _ in range(200):
        if page.js(f"document.activeElement.matches({selector!r})"):
            return
        page.press("Tab", shift)
    raise AssertionError(f"Tab never reaches {selector}")


def walk(page: Page) -> dict[int, str]:
    """Press Tab through the whole page; return the elements that had focus, all of which showed it."""
    found: dict[int, str] = {}
    for _ in range(400):
        page.press("Tab")
        focus = page.js(AT_FOCUS)
        if focus["at"] in found or focus["at"] < 0:
            return found
        if not focus["seen"]:
            # What had focus before may still be closing.
            page.until("document.getAnimations().length === 0")
            focus = page.js(AT_FOCUS)
        assert focus["ring"], f"no ring around {focus['name']}"
        assert focus["seen"], f"out of sight: {focus['name']}"
        found[focus["at"]] = focus["name"]
    raise AssertionError("Tab never comes round")


def every_control(page: Page) -> None:
    wanted = dict(page.js(CONTROLS))
    found = walk(page)
    missed = [name for at, name in wanted.items() if at not in found]
    assert wanted and not missed, missed


def tree_address(address: str, page: Page) -> str:
    page.go(address)
    links = "document.querySelectorAll('td[data-name=Search] a')"
    page.go(page.js(f"[...{links}].find(link => link.textContent.startsWith('mcts')).href"))
    return str(page.js("document.querySelector('a[href^=\"/tree/\"]').href"))


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", ["index", "problems", "tree", "report"])
def test_tab_reaches_every_control_with_a_visible_focus_ring(
    name: str, width: int, browser: Browser, address: str, report: str
) -> None:
    page = browser.page(report if name == "report" else address, width, scheme="dark" if width == 390 else "light")
    if name == "problems":
        page.go(page.js("document.querySelector('td[data-name=Search] a').href"))
    elif name == "tree":
        page.go(tree_address(address, page))
    every_control(page)
    page.close()


def test_rows_can_be_selected_compared_and_filtered(browser: Browser, address: str) -> None:
    page = browser.page(address)
    tab_to(page, "input[name=a]")
    page.press("ArrowDown")
    tab_to(page, "input[name=b]")
    page.press("ArrowDown")
    page.press("ArrowDown")
    picked = page.js("[...document.querySelectorAll('input:checked')].map(e => e.ariaLabel.split(' as ')[1])")
    chosen = page.js("[...document.querySelectorAll('input:checked')].map(e => e.value)")
    assert picked == ["A", "B"] and len(set(chosen)) == 2
    tab_to(page, "form button")
    page.press_and_load("Enter")
    assert page.js("new URLSearchParams(location.search).get('a')") == chosen[0]
    assert page.js("new URLSearchParams(location.search).get('b')") == chosen[1]
    tab_to(page, "input[type=search]")
    page.write("2")
    page.press_and_load("Enter")
    assert page.js("new URLSearchParams(location.search).get('q')") == "2"
    assert page.js("document.querySelectorAll('tbody tr').length") == 1
    tab_to(page, "nav a[href*='show=wrong']")
    page.press_and_load("Enter")
    assert page.js("document.querySelector('nav [aria-current]').textContent") == "wrong"
    page.close()


def test_error_details_of_a_failed_search_can_be_opened(browser: Browser, address: str) -> None:
    page = browser.page(address)
    tab_to(page, "td[data-name=Search] a")
    while "sc:2" not in page.js("document.activeElement.textContent"):
        page.press("Tab")
    page.press_and_load("Enter")
    tab_to(page, "details.failed summary")
    assert not page.js("document.activeElement.parentElement.open")
    page.press(" ")
    assert page.js("document.activeElement.parentElement.open")
    assert REASON in page.js("document.activeElement.parentElement.innerText")
    page.close()


def test_tree_can_be_navigated_and_replayed(browser: Browser, address: str) -> None:
    page = browser.page(address)
    page.go(tree_address(address, page))
    picked = "Number(document.querySelector('.row.picked').dataset.node)"
    tab_to(page, "#tree")
    page.press("Home")
    assert page.js(picked) == 0
    page.press("ArrowRight")
    assert page.js(picked) == 1
    rows = page.js("document.querySelectorAll('.row').length")
    page.press("Enter")
    assert page.js("document.querySelectorAll('.row').length") < rows
    page.press(" ")
    assert page.js("document.querySelectorAll('.row').length") == rows
    page.press("ArrowDown")
    second = page.js(picked)
    assert page.js("document.querySelectorAll('.row')[2].dataset.node") == str(second)
    assert page.js("document.getElementById('tree').getAttribute('aria-activedescendant')") == f"n{second}"
    page.press("End")
    assert page.js("document.querySelector('.row:last-child').classList.contains('picked')")
    note = "document.getElementById('replay-note').textContent"
    tab_to(page, "#replay", shift=True)
    page.press("Home")
    assert page.js(note).startswith("1 of ")
    page.press("ArrowRight")
    page.press("ArrowRight")
    assert page.js(note).startswith("3 of ") and page.js("document.querySelectorAll('.row').length") == 4
    page.press("End")
    assert len(set(page.js(note).split(" messages")[0].split(" of "))) == 1
    tab_to(page, "#theme", shift=True)
    before = page.js("document.documentElement.dataset.theme")
    page.press(" ")
    assert page.js("document.documentElement.dataset.theme") != before
    page.close()


def test_focus_is_kept_when_the_detail_panel_is_redrawn(browser: Browser, address: str) -> None:
    page = browser.page(address)
    page.go(tree_address(address, page))
    tab_to(page, "select")
    before = page.js("document.activeElement.value")
    page.press("Home")
    page.press("ArrowDown")
    assert page.js("document.activeElement.tagName") == "SELECT"
    assert page.js("document.activeElement.value") == "1" != before
    tab_to(page, ".crumbs button:nth-of-type(2)", shift=True)
    page.press("Enter")
    assert page.js("document.activeElement.matches('.crumbs .here')")
    assert page.js("document.querySelector('.row.picked').getAttribute('aria-level')") == "2"
    tab_to(page, ".detail summary")
    page.press("Enter")
    assert "mean of the values backed up" in page.js("document.querySelector('.detail details').innerText")
    page.close()


def test_long_message_scrolls_without_moving_the_tree(browser: Browser, address: str) -> None:
    page = browser.page(address)
    page.go(tree_address(address, page))
    page.js("document.querySelector('.say').style.maxHeight = '12px'")
    tab_to(page, ".say")
    before = page.js("document.querySelector('.row.picked').id")
    page.press("ArrowDown")
    page.until("document.activeElement.scrollTop > 0")
    assert page.js("document.querySelector('.row.picked').id") == before
    page.close()


def test_wide_report_scrolls(browser: Browser, report: str) -> None:
    page = browser.page(report, 390)
    tab_to(page, ".wide")
    assert page.js("document.activeElement.scrollWidth > document.activeElement.clientWidth")
    page.press("ArrowRight")
    page.until("document.activeElement.scrollLeft > 0")
    page.close()


def test_pages_fit_a_phone_after_regrading(browser: Browser, made: Path, tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    shutil.copy(made / "runs.db", store)
    assert CliRunner().invoke(app, ["regrade", str(store), "--kind", "text"]).exit_code == 0
    page = browser.page("about:blank", 390)
    server = make_server(store, 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    page.go(server.url)
    page.until("document.body.textContent.includes('Graded again by')")
    assert page.js("document.documentElement.scrollWidth") == 390
    page.close()
    server.shutdown()
    server.server_close()


def test_detail_sheet_is_sticky_only_after_a_message_is_selected(browser: Browser, address: str) -> None:
    page = browser.page(address, 390)
    page.go(tree_address(address, page))
    place = "getComputedStyle(document.querySelector('.detail')).position"
    assert page.js(place) == "static"
    page.js("document.querySelector('.row').click()")
    assert page.js(place) == "sticky"
    page.close()


def test_report_figures_follow_dark_mode(browser: Browser, report: str) -> None:
    corner = """(async () => {
        const image = document.querySelector("img"), canvas = document.createElement("canvas");
        await image.decode();
        const paint = canvas.getContext("2d");
        paint.drawImage(image, 0, 0);
        return paint.getImageData(3, 3, 1, 1).data[0];
    })()"""
    for scheme, dark in (("light", False), ("dark", True)):
        page = browser.page(report, 390, scheme=scheme)
        assert (page.js(corner) < 128) is dark
        page.close()


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    if not (SITE / "index.html").is_file():
        pytest.skip("the site is not built: mkdocs build")
    handler: Any = functools.partial(Quiet, directory=SITE)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.slow
@pytest.mark.parametrize("name", ["index", "reference/cli"])
def test_tab_reaches_every_control_of_the_site(name: str, width: int, tmp_path: Path, site: str) -> None:
    # In some thousand key presses Chromium itself may lose a reply, once in a great while.
    for last in (False, True):
        with Browser(tmp_path / str(last)) as browser:
            try:
                page = browser.page(f"{site}/{name}.html", width, scheme="dark" if width == 390 else "light")
                every_control(page)
                return
            except Stuck:
                if last:
                    raise


def test_site_navigation_drawer_opens_and_its_links_work(browser: Browser, site: str) -> None:
    page = browser.page(f"{site}/index.html", 390)
    tab_to(page, "label[for=__drawer]")
    page.press("Enter")
    assert page.js("document.getElementById('__drawer').checked")
    page.press("Escape")
    assert not page.js("document.getElementById('__drawer').checked")
    page.press(" ")
    tab_to(page, "label.md-nav__title[for=__nav_1]")
    page.press("Enter")
    tab_to(page, "label.md-nav__link[for=__nav_3]")
    page.press("Enter")
    # Chromium scrolls a link that gets focus while its panel is still moving to a wrong position.
    page.until("document.getElementById('__nav_3').checked && document.getAnimations().length === 0")
    tab_to(page, ".md-nav__link[href$='howto/own-planner.html']")
    page.until("document.activeElement.getBoundingClientRect().left >= 0")
    page.press_and_load("Enter")
    assert page.js("document.querySelector('h1').textContent").startswith("Your own planner")
    page.close()


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_site_search_and_color_scheme_toggle_work(width: int, browser: Browser, site: str) -> None:
    page = browser.page(f"{site}/index.html", width)
    for colors in ("slate", "default"):
        tab_to(page, "label[for^=__palette]")
        page.press(" ")
        page.until(f"document.body.dataset.mdColorScheme === {colors!r}")
    if width == 390:
        tab_to(page, "label[for=__search]")
        page.press("Enter")
    tab_to(page, ".md-search__input")
    page.write("handoffs")
    page.until("document.querySelector('.md-search-result__item a')")
    page.press("ArrowDown")
    page.until("document.activeElement.matches('.md-search-result__link')")
    page.press_and_load("Enter")
    assert "handoff" in page.js("document.querySelector('h1').textContent").lower()
    page.close()
