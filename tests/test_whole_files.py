"""Files and folders are the old or the new version after a crash at any time."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mas_gym.internal import whole_files
from mas_gym.internal.whole_files import finish_replacing, replace_files, whole_file, write_file


def version(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir() if path.is_file()}


def writer(number: int) -> Callable[[Path], None]:
    def write(fresh: Path) -> None:
        for name in ("config.json", "weights", "critic.json"):
            (fresh / name).write_text(str(number), encoding="utf-8")

    return write


def weights_writer(number: int) -> Callable[[Path], None]:
    """Return a writer of shards if the number is odd, and of one file of weights otherwise."""
    shards = ("model-1-of-2.safetensors", "model-2-of-2.safetensors", "model.safetensors.index.json")
    names = shards if number % 2 else ("model.safetensors",)

    def write(fresh: Path) -> None:
        for name in (*names, "critic.json"):
            (fresh / name).write_text(str(number), encoding="utf-8")

    return write


KILLED = """
import os, sys
from pathlib import Path
from tests import test_whole_files
from mas_gym.internal import whole_files
step, place = sys.argv[2], int(sys.argv[3])
calls, real = 0, getattr(os, step)
def counted(*args, **kwargs):
    global calls
    calls += 1
    if calls > place:
        os._exit(9)
    return real(*args, **kwargs)
setattr(os, step, counted)
written = getattr(test_whole_files, sys.argv[4])(2)
whole_files.replace_files(Path(sys.argv[1]), written, "critic.json")
"""


def kill_while_replacing(folder: Path, step: str, place: int, kind: Callable[[int], object]) -> None:
    """Write version 2 in a process that ends at a call of a function of `os`."""
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-c", KILLED, str(folder), step, str(place), kind.__name__]
    subprocess.run(command, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, check=False)


@pytest.mark.parametrize("step", ["fsync", "rename", "replace", "rmdir"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_killed_replacement_leaves_the_old_or_the_new_version(step: str, place: int, tmp_path: Path) -> None:
    folder = tmp_path / "critic"
    replace_files(folder, writer(1), "critic.json")
    (folder / "notes").write_text("kept", encoding="utf-8")
    kill_while_replacing(folder, step, place, writer)
    finish_replacing(folder, "critic.json")
    found = version(folder)
    assert found.pop("notes") == "kept"
    assert len(found) == 3 and len(set(found.values())) == 1
    replace_files(folder, writer(3), "critic.json")
    assert set(version(folder).values()) == {"3", "kept"}
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(("step", "place"), [("rename", 0), *(("unlink", n) for n in range(5)), ("replace", 1)])
def test_new_weights_of_another_layout_leave_no_old_weights(step: str, place: int, tmp_path: Path) -> None:
    folder = tmp_path / "critic"
    replace_files(folder, weights_writer(1), "critic.json")
    (folder / "notes").write_text("kept", encoding="utf-8")
    kill_while_replacing(folder, step, place, weights_writer)
    finish_replacing(folder, "critic.json")
    found = version(folder)
    assert found.pop("notes") == "kept"
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    weights_writer(int(found["critic.json"]))(fresh)
    assert found == version(fresh)


def test_names_of_old_weights_outside_the_folder_remove_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "critic"
    (folder / ".saved").mkdir(parents=True)
    (tmp_path / "mine.safetensors").write_text("x", encoding="utf-8")
    (folder / "notes").write_text("kept", encoding="utf-8")
    (folder / ".saved" / ".old").write_text("../mine.safetensors\nnotes", encoding="utf-8")
    finish_replacing(folder, "critic.json")
    assert (tmp_path / "mine.safetensors").exists() and (folder / "notes").exists()


def test_unfinished_replacement_that_links_elsewhere_moves_nothing(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "critic", tmp_path / "elsewhere"
    folder.mkdir(), elsewhere.mkdir()
    (elsewhere / "mine").write_text("x", encoding="utf-8")
    (folder / ".saved").symlink_to(elsewhere)
    finish_replacing(folder, "critic.json")
    assert (elsewhere / "mine").exists() and not (folder / "mine").exists()


def test_failed_write_keeps_the_old_version(tmp_path: Path) -> None:
    path, folder = tmp_path / "out.json", tmp_path / "critic"
    write_file(path, "old")
    replace_files(folder, writer(1), "critic.json")
    with pytest.raises(ZeroDivisionError), whole_file(path) as part:
        part.write_text("half", encoding="utf-8")
        1 / 0  # noqa: B018
    with pytest.raises(ZeroDivisionError):
        replace_files(folder, lambda fresh: 1 / 0, "critic.json")  # type: ignore[arg-type, return-value]
    assert path.read_text(encoding="utf-8") == "old" and set(version(folder).values()) == {"1"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["critic", "out.json"]


def test_concurrent_writers_of_one_path_leave_one_complete_version(tmp_path: Path) -> None:
    path, folder = tmp_path / "out.json", tmp_path / "critic"

    def write(number: int) -> None:
        for _ in range(20):
            write_file(path, json.dumps([number] * 10_000))
            replace_files(folder, writer(number), "critic.json")

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(json.loads(path.read_text(encoding="utf-8")))) == 1
    assert len(version(folder)) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["critic", "out.json"]


def test_abandoned_temporary_files_are_dropped_and_others_kept(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    abandoned, other = tmp_path / f".out.json.{'a' * 16}.json", tmp_path / ".out.json.swp"
    abandoned.touch(), other.touch()
    with whole_file(path) as used:
        used.write_text("1", encoding="utf-8")
        write_file(path, "2")
        assert used.exists()
    assert not abandoned.exists() and other.exists() and path.read_text(encoding="utf-8") == "1"


def test_whole_file_writes_through_links_and_to_devices(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old", encoding="utf-8")
    target.chmod(0o640)
    link.symlink_to(target)
    write_file(link, "new")
    assert link.is_symlink() and target.read_text(encoding="utf-8") == "new"
    assert target.stat().st_mode & 0o777 == 0o640
    write_file("/dev/null", "text")
    assert whole_files.Path("/dev/null").is_char_device()
