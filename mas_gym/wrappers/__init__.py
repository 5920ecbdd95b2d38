"""Wrappers around `mas_gym.MASEnv`."""

from mas_gym.wrappers.candidate_choice import CandidateChoice, ChoiceSnapshot, ProposedMessage

__all__ = ["CandidateChoice", "ChoiceSnapshot", "ProposedMessage"]
