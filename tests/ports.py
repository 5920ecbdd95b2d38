"""Ports for servers that start later than their address is known."""

import os
import socket
from contextlib import suppress


def free_port() -> int:
    """Return a port that is free until it is bound, below those that `bind` to port 0 gives away."""
    first = 20_000 + os.getpid() % 240 * 50
    for port in range(first, first + 50):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port")
