"""Every error class of MAS-Gym, and the checks of numbers and packages that raise the most common ones.

Each class derives from `MASGymError` and from a builtin exception, so both
``except MASGymError`` and, for example, ``except ValueError`` catch it. A message states
what was expected, what was received, and how to fix it.
"""

from __future__ import annotations

import math
import re
import reprlib
from importlib import import_module
from types import ModuleType
from typing import TypeGuard

_LONGEST = 60


class MASGymError(Exception):
    """Base of every error that MAS-Gym raises on purpose.

    URLs in the message are shown without passwords and queries (`shown_url`).
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(shown_url(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigError(MASGymError, ValueError):
    """A MAS config, an option or an argument is invalid.

    Attributes:
        faults: Every error found, each with its location and fix; empty if the message describes a single error.
    """

    def __init__(self, message: str, faults: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.faults = faults


class UserCodeError(ConfigError):
    """User code raised an error, or its file cannot be imported; the cause has the full traceback."""


class IdentityError(MASGymError, TypeError):
    """The identity of a component cannot be determined, so its results must not be stored or cached."""


class UnknownNameError(MASGymError, LookupError):
    """A name (task, MAS, planner, policy, critic, problem id) is unknown."""


class IllegalActionError(MASGymError, ValueError):
    """An action is malformed or illegal, such as one with a recipient that the graph or a condition forbids."""


class EpisodeOverError(MASGymError, RuntimeError):
    """The episode has ended, or has not started."""


class DataError(MASGymError, ValueError):
    """Data was found but does not have the expected format."""


class DataNotFoundError(MASGymError, FileNotFoundError):
    """A data file, folder or hub dataset cannot be found or reached."""


class PolicyError(MASGymError, RuntimeError):
    """A policy failed to reply to a request."""


class PromptTooLongError(PolicyError):
    """A prompt does not fit in the model's context window, even after it is shortened."""


class EngineUnavailableError(PolicyError):
    """A policy's engine is down, rejects the key or lacks the model: no request can succeed, so the run ends."""


class CriticError(MASGymError, RuntimeError):
    """A critic failed to score a state."""


class TrainingError(MASGymError, RuntimeError):
    """Training stopped: the loss is not a number, or the model cannot be saved."""


class MissingDependencyError(MASGymError, ImportError):
    """An optional package is required and not installed."""


class SearchError(MASGymError, RuntimeError):
    """A planner broke the protocol of requests and replies, or a run cannot continue."""


class BudgetError(SearchError):
    """A budget of calls, tokens or seconds is exhausted; a planner may catch this and return its best result."""


class ExhaustedError(BudgetError):
    """A recorded run has no more messages at the requested states; other states may have some."""


class ComplianceError(MASGymError, AssertionError):
    """User code breaks a contract of MAS-Gym; raised by `mas_gym.testing`."""

    def __init__(self, message: str, faults: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.faults = faults


class StoreError(MASGymError, OSError):
    """A run store is locked, full, damaged, or has unexpected content."""


def shown(value: object) -> str:
    """Return a short, escaped form of a value of any size and depth for an error message; never raises."""
    text = _REPR.repr(value)
    return text if len(text) <= 2 * _LONGEST else text[: 2 * _LONGEST] + "..."


def shown_url(text: str) -> str:
    """Return a text in which every URL is reduced to its scheme, host, port and path, for messages and records.

    User names, passwords and queries may be secrets. Everything up to the last ``@`` counts as the password, because
    passwords are often not percent-encoded.

    >>> shown_url("openai:m@https://me:p@ss/word@host:80/v1?key=secret")
    'openai:m@https://host:80/v1'
    """
    return _QUERY.sub(r"\1", _PASSWORD.sub(r"\1", text))


_PASSWORD = re.compile(r"(https?:/+|//)\S*@", re.IGNORECASE)
_QUERY = re.compile(r"""(://[^\s?#'"]*)[?#][^\s'"]*""")


class _Repr(reprlib.Repr):
    def repr_str(self, x: str, level: int) -> str:
        """Remove passwords before the text is shortened."""
        return super().repr_str(shown_url(x), level)

    def repr_int(self, x: int, level: int) -> str:
        """Shorten large ints, because Python cannot print an int of more than 4,300 digits."""
        return super().repr_int(x, level) if abs(x) < 1 << 256 else f"an int of {x.bit_length()} bits"


_REPR = _Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = _LONGEST
_REPR.maxlevel = 3


def whole_number(name: str, value: object, *, at_least: int) -> int:
    """Return an argument that must be an int of at least ``at_least``.

    Raises:
        ConfigError: The argument is not such an int.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ConfigError(f"{name}: expected an integer of at least {at_least}, got {shown(value)}")
    return value


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a finite int or float, but not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf


def need(package: str, purpose: str, extra: str = "train") -> ModuleType:
    """Import an optional package.

    Args:
        package: The name of the package or of one of its modules.
        purpose: The feature that needs it, as in ``"exporting data"``.
        extra: The extra of this project that installs it.

    Raises:
        MissingDependencyError: The package is not installed; the message contains the install command.
    """
    try:
        return import_module(package)
    except ImportError as error:
        raise MissingDependencyError(
            f"{purpose} needs {package.partition('.')[0]} ({error}); install it with: pip install 'mas-gym[{extra}]'"
        ) from error
