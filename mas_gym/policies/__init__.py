"""Policies write the messages of agents; see `mas_gym.policies.base` for the contract."""
