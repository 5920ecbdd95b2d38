"""A point in an episode to which an environment can return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from mas_gym.dynamics import Dynamics
from mas_gym.errors import DataError
from mas_gym.state import MASState

SCHEMA = 1


class Snapshot(NamedTuple):
    """What `MASEnv.clone_state` returns: immutable, hashable, picklable, and it holds no reference answer.

    Attributes:
        mas: Fingerprint of the system, so that a snapshot is never restored into another one.
        problem_id: The problem that is being solved.
        state: The state.
        refusals: Refused actions at this state so far (``on_invalid="retry"``).
        over: Whether the episode has ended.
        rng: State of the environment's generator as JSON text; None when it was not asked for.
    """

    mas: str
    problem_id: str
    state: MASState
    refusals: int
    over: bool
    rng: str | None

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able form; `from_dict` reads it back."""
        return {"schema": SCHEMA, **self._asdict(), "state": self.state.to_dict()}

    @staticmethod
    def from_dict(data: Mapping[str, Any], dynamics: Dynamics) -> Snapshot:
        """Read back `to_dict`.

        Args:
            data: What `to_dict` returned, also after a JSON round trip.
            dynamics: The model of the same system, as in ``env.unwrapped.dynamics``.

        Raises:
            DataError: The form, the schema version, the system or a turn is not right.
        """
        if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
            raise DataError(f"expected a snapshot of schema {SCHEMA}, got {str(data)[:80]!r}; write it with to_dict()")
        try:
            mas, problem_id, refusals, over, rng = (data[k] for k in ("mas", "problem_id", "refusals", "over", "rng"))
            state = dynamics.state_from_dict(data["state"])
        except KeyError as error:
            raise DataError(f"the snapshot has no {error}; write it with to_dict()") from error
        if mas != dynamics.mas.fingerprint:
            raise DataError(f"the snapshot is of another system than {dynamics.mas.name!r}; load it with its own MAS")
        plain = isinstance(problem_id, str) and isinstance(refusals, int) and isinstance(over, bool)
        if not plain or not (rng is None or isinstance(rng, str)):
            raise DataError("the snapshot's fields have the wrong types; write it with to_dict()")
        return Snapshot(mas, problem_id, state, refusals, over, rng)
