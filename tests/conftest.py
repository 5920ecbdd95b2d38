"""Fixtures and settings shared by all tests."""

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# The models are small, so a second thread only waits, for a long time on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# With one arena per thread, freed memory is rarely returned. This applies to processes started from here on.
os.environ.setdefault("MALLOC_ARENA_MAX", "2")
# Arrow's default allocator keeps freed memory.
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")

LARGE = (
    *("ray", "training", "docs", "wheel", "keyboard", "report"),
    *("paper_tables", "demo", "concurrency"),
)
"""Test files that need much memory, in their own or in other processes; one worker runs them in turn."""

_SMALL = ("faults", "store", "program_faults", "hub", "cli", "openai_policy", "transformers_policy", "critics")

LONGEST = (*LARGE, *_SMALL, "tiny")
"""Test files that run first: those with large processes, then long ones that need little memory."""

_GROWN_PAGES = (48 << 20) // os.sysconf("SC_PAGE_SIZE")

# A shell that starts the suite in the background has it ignore the Ctrl-C that some tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Every run uses the same examples, so that a test passes everywhere or nowhere.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real benchmark files next to the checkout; tests that need it are skipped without it."""
    folder = Path(__file__).resolve().parents[1] / ".." / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no benchmark files at {folder.resolve()}")
    return folder.resolve()


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """After a module, collect its garbage, and end its Ray cluster and the fork server."""
    path = sys.path.copy()
    yield
    # Folders of user files; other tests would import their modules as packages.
    sys.path[:] = path
    gc.collect()
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        sys.modules["ray"].shutdown()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "loadscopereorder"):
        # Not by the number of tests: a worker that takes the longest file last works alone for minutes.
        config.option.loadscopereorder = False


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile``, give all large files to one worker."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class OneLarge(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "large" if file in {f"tests/test_{name}.py" for name in LARGE} else file

    return OneLarge(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


def pytest_collection_finish() -> None:
    """Leave modules and tests, which stay to the end, out of every later garbage collection."""
    gc.collect()
    gc.freeze()


_least = 0


@pytest.fixture(autouse=True)
def memory_goes_back() -> Iterator[None]:
    """After a test that has grown the process, return freed memory; otherwise two workers reach 4 GB."""
    global _least
    yield
    with suppress(OSError, AttributeError):
        if _resident() > _least + _GROWN_PAGES:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            _least = _resident()
        _least = min(_least, _resident())


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    # Reports travel between test processes as UTF-8, and hostile tests log text that UTF-8 cannot encode.
    return _encodable((yield))


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return type(value)(map(_encodable, value)) if type(value) in (list, tuple) else value
