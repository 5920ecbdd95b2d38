"""Wrappers around `mas_gym.MASEnv`."""

from mas_gym.wrappers.candidate_choice import Candidate, CandidateChoice, ChoiceSnapshot

__all__ = ["Candidate", "CandidateChoice", "ChoiceSnapshot"]
