"""Every error a user of MAS-Gym can meet.

Each class is a `MASGymError` and also the builtin that fits it, so both
``except MASGymError`` and, say, ``except ValueError`` catch it. A message says
what was expected, what came instead, and what to do about it.
"""


class MASGymError(Exception):
    """Base of every error that MAS-Gym raises on purpose."""


class ConfigError(MASGymError, ValueError):
    """A MAS config, an option or an argument is wrong.

    Attributes:
        faults: Every fault that was found, each with its place and remedy; empty when the message is the only one.
    """

    def __init__(self, message: str, faults: tuple[str, ...] = ()) -> None:
        """Keep the message, and the single faults for programs that list them."""
        super().__init__(message)
        self.faults = faults


class IdentityError(MASGymError, TypeError):
    """A part cannot state what determines its results, so that no store or cache may keep them."""


class UnknownNameError(MASGymError, LookupError):
    """A name (task, MAS, planner, policy, critic, problem id) is not known."""


class IllegalActionError(MASGymError, ValueError):
    """An action names a recipient that the graph or a condition forbids."""


class EpisodeOverError(MASGymError, RuntimeError):
    """The episode has ended, or has not begun."""


class DataError(MASGymError, ValueError):
    """A data file was found but cannot be read as what it should be."""


class DataNotFoundError(MASGymError, FileNotFoundError):
    """A data file, folder or hub data set cannot be found or reached."""


class PolicyError(MASGymError, RuntimeError):
    """A policy could not answer a request."""


class PromptTooLongError(PolicyError):
    """A prompt does not fit the model's window, even without its older messages."""


class EngineUnavailableError(PolicyError):
    """A policy's engine is down, refuses the key or lacks the model, so that no request can succeed; a run ends."""


class CriticError(MASGymError, RuntimeError):
    """A critic could not score a state."""


class TrainingError(MASGymError, RuntimeError):
    """Training stopped: the loss is not a number, or what was learned cannot be written."""


class MissingDependencyError(MASGymError, ImportError):
    """An optional package is needed for what was asked and is not installed."""


class SearchError(MASGymError, RuntimeError):
    """A planner broke the protocol of requests and replies, or a run cannot go on."""


class BudgetError(SearchError):
    """A budget of calls, tokens or seconds is spent; planners may catch it and return what they have."""


class ComplianceError(MASGymError, AssertionError):
    """Something of yours breaks a contract of MAS-Gym; raised by `mas_gym.testing`.

    Attributes:
        faults: Every breach that was found.
    """

    def __init__(self, message: str, faults: tuple[str, ...] = ()) -> None:
        """Keep the message, and the single breaches for programs that list them."""
        super().__init__(message)
        self.faults = faults


class StoreError(MASGymError, OSError):
    """A run store is locked, full, damaged, or holds something else than expected."""
