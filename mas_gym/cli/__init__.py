"""The command line ``mas-gym``: one front door over the library. Nothing imports it.

``app`` registers the commands and shows errors; each command has a module, which imports heavy packages
only when it runs.
"""

from mas_gym.cli.app import app, main

__all__ = ["app", "main"]
