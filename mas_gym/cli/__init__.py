"""The command line ``mas-gym``: one front door over the library. Nothing imports it.

``app`` holds the commands and the way errors are shown; each command has a module of its own,
which imports what is heavy only when it runs.
"""

from mas_gym.cli.app import app, main

__all__ = ["app", "main"]
