"""The command line ``mas-gym``. No other package imports it."""

from mas_gym.cli.commands import app, main

__all__ = ["app", "main"]
