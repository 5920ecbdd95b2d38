"""What every test may rely on."""

import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# The models here are small: a second thread only waits, and on a busy machine for long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

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
