"""The built package, installed outside the checkout: nothing that runs there comes from here."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("mas_gym", "search", "rewardmodels")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build from a copy, because building writes next to its sources."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(out), "."]
    subprocess.run(build, cwd=source, check=True, capture_output=True, text=True)
    [built] = out.glob("*.whl")
    return built


@pytest.mark.slow
def test_wheel_contains_every_file_of_the_packages(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file())
    assert held == {path.relative_to(ROOT).as_posix() for path in files if path.suffix != ".pyc"}


@pytest.mark.slow
def test_wheel_runs_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "environment"
    venv.create(home, with_pip=False, symlinks=True)
    [site] = home.glob("lib/python*/site-packages")
    install = [sys.executable, "-m", "pip", "--python", str(home), "install", "--quiet", "--no-deps", "--no-index"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run([*install, str(wheel)], env=environment, check=True, capture_output=True, text=True)
    # The dependencies of this environment, without its own mas-gym: its .pth files are not read from here.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")

    def run(*words: str) -> str:
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = run(str(home / "bin" / "python"), "-c", "import mas_gym, search, rewardmodels; print(search.__file__)")
    assert Path(where.strip()).is_relative_to(home)
    command = str(home / "bin" / "mas-gym")
    assert re.fullmatch(r"mas-gym \d+\.\d+\.\d+\n", run(command, "--version"))
    run(command, "new", "mas.yaml")
    assert "no errors" in run(command, "check", "mas.yaml")
    shown = run(command, "demo", "-n", "1", "--workers", "1")
    assert re.search(r"mcts:10,3 +masprm +(0|100)\.0 ", shown)
    made = {path.name for path in (tmp_path / "demo").iterdir()}
    assert {"accuracy-tokens.png", "results.csv", "results.json", "runs.db", "tree.html"} <= made
    assert (tmp_path / "demo" / "tree.html").stat().st_size > 10_000


def test_version_changelog_and_citation_match() -> None:
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.M)
    assert version is not None
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == version[1]
    assert citation["cff-version"] == "1.2.0" and citation["authors"] and citation["title"]
    assert citation["preferred-citation"]["title"] == "MASPRM: Multi-Agent System Process Reward Model"
    heads = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    assert heads[0] in ("Unreleased", version[1])
