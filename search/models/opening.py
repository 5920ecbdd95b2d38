"""`open_models`: the models of a run's searches."""

from __future__ import annotations

from mas_gym.policies.base import PolicyBase
from search.models.base import Models, Sample
from search.models.played import PlayedModels
from search.setup import Setup


def open_models(setup: Setup, policy: PolicyBase, sample: Sample) -> Models:
    """Return the models of searches with a setup; ``sample`` samples from the policy."""
    if setup.recorded is not None:
        from search.models.recorded import RecordedModels

        return RecordedModels(setup.recorded)
    if setup.program is not None:
        from search.models.programs import ProgramModels

        return ProgramModels(setup.program, policy, sample)
    return PlayedModels(policy, sample)
