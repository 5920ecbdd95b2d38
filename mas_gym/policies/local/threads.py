"""How many CPU threads a model gets.

torch takes one thread per core and lets them wait for each other by spinning. The
operations of a small model are too short to share: on a quiet machine more threads gain
little, and beside another process they spin away most of the time that they get.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL_MODEL = 50_000_000
"""Models of up to this many parameters get one thread."""

_CHOSEN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@contextmanager
def threads_for(parameters: int, threads: int | None = None) -> Iterator[None]:
    """Set the number of torch's threads for the body, as seen from this thread; wrap forward passes and training in it.

    Args:
        parameters: Of the model.
        threads: The user's own choice. By default one thread for a model of up to `SMALL_MODEL` parameters, and torch's
            number for others or if ``OMP_NUM_THREADS`` or ``MKL_NUM_THREADS`` is set.
    """
    if threads is None and (parameters > SMALL_MODEL or any(name in os.environ for name in _CHOSEN)):
        yield
        return
    before, wanted = torch.get_num_threads(), threads or 1
    if before == wanted:
        yield
        return
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)
