"""The system as Gymnasium and PettingZoo environments, their spaces, wrappers and vector environments."""
