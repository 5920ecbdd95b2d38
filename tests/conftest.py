"""What every test may rely on."""

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# The models here are small: a second thread only waits, and on a busy machine for long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# With an arena per thread, freed memory is rarely given back. For the processes that start from here on.
os.environ.setdefault("MALLOC_ARENA_MAX", "2")

_LARGE_PAGES = (600 << 20) // os.sysconf("SC_PAGE_SIZE")

# A shell that starts the suite in the background has it ignore the Ctrl-C that some tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run: a test that passes here passes there.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real benchmark files beside the checkout; tests that need it are skipped without it."""
    folder = Path(__file__).resolve().parents[1] / ".." / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no benchmark files at {folder.resolve()}")
    return folder.resolve()


@pytest.fixture(scope="module", autouse=True)
def memory_goes_back() -> Iterator[None]:
    """After a module, end its Ray cluster; if its models were large, give what it has freed back to the system."""
    yield
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        sys.modules["ray"].shutdown()
    with suppress(OSError, AttributeError):
        if int(Path("/proc/self/statm").read_text().split()[1]) > _LARGE_PAGES:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    # Reports travel between test processes as UTF-8, and hostile tests log what UTF-8 cannot hold.
    return _encodable((yield))


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return type(value)(map(_encodable, value)) if type(value) in (list, tuple) else value
