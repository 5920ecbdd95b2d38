"""Where the command line prints: results to stdout, everything else to stderr."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_PIPE_WIDTH = 120


def stdout() -> Console:
    """Return the console for results; a pipe gets a width that keeps tables whole."""
    return _console(stderr=False)


def stderr() -> Console:
    """Return the console for progress, notes and errors."""
    return _console(stderr=True)


def _console(stderr: bool) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH
    return Console(stderr=stderr, width=width, highlight=False, markup=False, soft_wrap=False)


def show_error(message: str) -> None:
    """Print a message in one red panel."""
    from rich.panel import Panel
    from rich.text import Text

    from mas_gym.render import printable

    console = stderr()
    console.print(Panel(Text(printable(message)), title="Error", title_align="left", border_style="red"))


def version() -> str:
    """Return the version of the installed package; ``"unknown"`` in a checkout that is not installed."""
    from importlib import metadata

    try:
        return metadata.version("mas-gym")
    except metadata.PackageNotFoundError:
        return "unknown"


def note(message: str, style: str = "dim") -> None:
    """Print a remark to stderr."""
    from rich.text import Text

    stderr().print(Text(message, style=style), soft_wrap=True)
