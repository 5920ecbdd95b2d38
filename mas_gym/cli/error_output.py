"""Errors, tracebacks, warnings and log records on stderr, with control characters escaped."""

from __future__ import annotations

import contextlib
import errno
import logging
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import typer

from mas_gym.cli.console import note, stderr
from mas_gym.errors import MASGymError
from mas_gym.internal.text import printable

_USAGE_ERROR: Any = typer.BadParameter.__base__


def show_error(message: str) -> None:
    """Print a message in one red panel."""
    from rich.panel import Panel
    from rich.text import Text

    stderr().print(Panel(Text(message), title="Error", title_align="left", border_style="red"))


def show_traceback(error: BaseException) -> None:
    """Print an unexpected error with its traceback."""
    stderr().print("".join(traceback.format_exception(error)).rstrip(), soft_wrap=True)


class _Formatter(logging.Formatter):
    """Escapes log records; appends a failed search's traceback, from the record's attribute ``details``."""

    def format(self, record: logging.LogRecord) -> str:
        details = vars(record).get("details")
        return printable("\n".join(filter(None, (super().format(record), details))).rstrip())


class NoteHandler(logging.Handler):
    """Prints log records as notes."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        note(record.getMessage())


def log_handler(level: int) -> logging.Handler:
    """Return a handler that prints escaped log records of at least ``level`` to stderr."""
    handler = logging.StreamHandler()
    handler.setLevel(level)
    handler.setFormatter(_Formatter("%(levelname)s:%(name)s:%(message)s"))
    return handler


def escape_logs_and_warnings() -> None:
    """Escape Python's own output: warnings, and log records without a handler."""
    logging.lastResort = log_handler(logging.WARNING)
    plain = warnings.formatwarning
    warnings.formatwarning = lambda *parts, **more: printable(plain(*parts, **more))


@contextlib.contextmanager
def escaped_usage_errors() -> Iterator[None]:
    """Escape the user's input in usage errors, which typer does not print through our console."""
    try:
        yield
    except _USAGE_ERROR as error:
        error.message = printable(error.message)
        raise


@contextlib.contextmanager
def errors_shown(debug: bool) -> Iterator[None]:
    """Show a user-fixable error in one panel, and exit with code 2; with ``debug``, raise it."""
    try:
        with escaped_usage_errors():
            yield
        return
    except MASGymError as error:
        if debug:
            raise
        show_error(str(error))
    except OSError as error:
        if debug or error.errno in (None, errno.EPIPE):
            raise
        show_error(f"{error.filename or 'the system'}: {error.strerror}; fix or change the path")
    raise typer.Exit(2)
