"""Monte Carlo tree search over messages (paper, Eq. 1, Alg. 1 and Alg. 2).

Where the paper leaves a choice open:

* Eq. 1 ranks children with N > 0. Children with N = 0, which exist only without virtual
  visits, are tried first, in sample order. Among equals the oldest child wins.
* A candidate set is a set: equal messages at one state are one child. Each sample
  counts in AC and TOK all the same.
* Under ``leaf="rollout"`` a simulation goes on, expanding and selecting by Eq. 1, until
  it reaches a terminal state. AC <= sum over d of min(C^d, n) C for n simulations of C
  children, which is 69 for MCTS(10, 3) at D = 4.
* Under ``leaf="bootstrap"`` a simulation expands one state, so AC <= n C.
* Decoding follows the largest Q among the children below which a scored terminal state
  was found, so it never ends in a non-terminal state. If a bootstrap search found none,
  the greedy path is completed by one message per agent; for that, the last expansions
  are given up while the tree has no terminal state, so that AC <= n C still holds
  (for n C >= C + D - 1, and models that tell ``max_depth``).
* With an outcome critic each terminal state is scored once: RC is the number of distinct
  terminal leaves, at most one per simulation.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Literal

from mas_gym.errors import BudgetError, ConfigError
from mas_gym.state import MASState
from search.planners.common import check_at_least
from search.planners.parallel import Parallel
from search.planners.simulation import Simulation
from search.protocol import Critic, Model, PlanGenerator, ValueKind, value_kind


@dataclass(frozen=True)
class MCTS:
    """MCTS(N_sim, C_max) with UCT selection.

    Attributes:
        n_simulations: Number of simulations.
        max_children: Samples drawn when a state is expanded.
        c_uct: Exploration constant; by default 4.0 with the true reward (App. "MASPRM
            training data generation") and 2.0 otherwise.
        leaf: ``"rollout"`` or ``"bootstrap"``, see the module.
        virtual_visits: Whether new children start with N = 1 and W = their value; by
            default exactly when values of intermediate states exist.
        values: ``"process"``: a critic of any state; ``"likelihood"``: policy likelihood;
            ``"outcome"``: a critic of terminal states; ``"reward"``: the true reward;
            ``"auto"``: what the run offers.
        rank: What orders the candidates after the chosen one: ``"path"``, the path score,
            or ``"leaf"``, the terminal child's Q.
        parallel: Simulations under way at once; more than one need fewer replies one after another, and are kept
            apart by virtual loss, see `search.planners.parallel`.
    """

    n_simulations: int = 10
    max_children: int = 3
    c_uct: float | None = None
    leaf: Literal["rollout", "bootstrap"] = "rollout"
    virtual_visits: bool | None = None
    values: ValueKind | Literal["auto"] = "auto"
    rank: Literal["path", "leaf"] = "path"
    parallel: int = 1

    def __post_init__(self) -> None:
        """Check the settings."""
        check_at_least(
            self, 1, n_simulations=self.n_simulations, max_children=self.max_children, parallel=self.parallel
        )
        if self.c_uct is not None and not (isinstance(self.c_uct, int | float) and 0 <= self.c_uct < math.inf):
            raise ConfigError(f"MCTS: expected c_uct to be a finite number >= 0, got {self.c_uct!r}")
        allowed: dict[str, tuple[str, ...]] = {
            "leaf": ("rollout", "bootstrap"),
            "values": ("auto", "process", "outcome", "likelihood", "reward"),
            "rank": ("path", "leaf"),
        }
        for name, choices in allowed.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"MCTS: expected {name} to be one of {choices}, got {getattr(self, name)!r}")
        terminal_only = self.values in ("outcome", "reward")
        if terminal_only and self.leaf == "bootstrap":
            raise ConfigError(f"MCTS: values={self.values!r} are defined on terminal states alone: use leaf='rollout'")
        if terminal_only and self.virtual_visits:
            raise ConfigError(f"MCTS: no virtual visits with values={self.values!r}: new children have no value")

    def for_run(self, critic: Critic | None, training: bool) -> MCTS:
        """Settle which values the run offers."""
        if self.values != "auto":
            return self
        kind = value_kind(critic, training)
        if kind is None:
            raise ConfigError("MCTS needs a critic: pass critic=load_critic(...), or training=True for the true reward")
        return replace(self, values=kind)

    def plan(self, model: Model, root: MASState, rng: random.Random) -> PlanGenerator:
        """Run the simulations and decode; a spent budget ends the simulations early."""
        search = self.simulation(model, root)
        try:
            yield from search.simulate()
            yield from search.complete()
        except BudgetError:
            if search.decode() is None:
                raise
        return search.finish()

    def simulation(self, model: Model, root: MASState) -> Simulation:
        """Return the machinery that this planner runs on."""
        return Simulation(self, model, root) if self.parallel == 1 else Parallel(self, model, root)
