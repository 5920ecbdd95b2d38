"""The command line ``mas-gym``. No other package imports it."""

from mas_gym.cli.commands import app as app
from mas_gym.cli.commands import main as main
