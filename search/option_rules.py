"""Rules for options that depend on each other, for Python arguments and the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mas_gym.errors import ConfigError

_TASK = "task data columns kind answers grader judge allow_code sandbox grading option"
_AGENTS = "mas program program_file program_temperature program_agent isolate policy cache temperature top_p max_tokens"

EXCLUDED: Mapping[str, Sequence[str]] = {
    # A recorded run has its own problems, agents and messages, and is searched in one process.
    "recorded": f"{_TASK} {_AGENTS} training token_traces workers ray actors gpus_per_actor".split(),
    # Worker processes do not share these.
    "workers": ["ray", "actors", "gpus_per_actor", "cache", "log_json", "match", "traces", "judge", "token_traces"],
    # Cached replies contain no token ids.
    "token_traces": ["cache"],
}
"""Each option, and the options that cannot be combined with it."""

NEEDED: Mapping[str, str] = {
    "run": "recorded",
    "distinct": "recorded",
    "program_file": "program",
    "program_temperature": "program",
    "program_agent": "program",
    "isolate": "program",
    "actors": "ray",
    "gpus_per_actor": "ray",
    "token_traces": "store",
}
"""Each option that has an effect only with another one."""


def excluded(option: str, given: Mapping[str, str]) -> list[str]:
    """Return the given options that cannot be combined with an option, as they were typed."""
    return [given[name] for name in EXCLUDED[option] if name in given]


def check_options(given: Mapping[str, str], missing: Mapping[str, str] | None = None) -> None:
    """Reject options that cannot be combined, or that have no effect.

    Args:
        given: The options that were given, by name, as they were typed, such as ``--mas`` or ``mas=``.
        missing: The options that could have been given but were not, in the same form.

    Raises:
        ConfigError: Some options cannot be combined.
    """
    for option in filter(given.__contains__, EXCLUDED):
        if others := excluded(option, given):
            listed = " and ".join(others)
            raise ConfigError(
                f"{given[option]}: cannot be combined with {listed}; leave out {given[option]}, or {listed}"
            )
    for option, needed in NEEDED.items():
        if option in given and missing is not None and needed in missing:
            raise ConfigError(f"{given[option]}: expected {missing[needed]} as well, got none")
