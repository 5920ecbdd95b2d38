"""Disk space and time of a folder world's copies: ``python -m benchmarks.world_copies FOLDER``.

FOLDER is on the file system to measure. Where it supports reflinks (XFS, Btrfs), copies share their blocks.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from mas_gym.programs.worlds import Folder

SIZE = 60 * 2**20
COPIES = 4


def used(folder: Path) -> float:
    """Return the MiB that are in use on a folder's file system."""
    os.sync()
    found = os.statvfs(folder)
    return (found.f_blocks - found.f_bfree) * found.f_frsize / 2**20


def main(base: Path) -> None:
    """Measure a world of one large file and print the result."""
    with tempfile.TemporaryDirectory(dir=base) as folder:
        tempfile.tempdir = folder
        source = Path(folder, "source")
        source.mkdir()
        (source / "large.bin").write_bytes(os.urandom(SIZE))
        world = Folder(source)
        empty = used(base)
        token = world.snapshot()
        stored, start = used(base), perf_counter()
        copies = [world.restore(token) for _ in range(COPIES)]
        seconds = perf_counter() - start
        copied = used(base)
        for copy in copies:
            world.release(copy)
    print(
        f"A folder of {SIZE / 2**20:.0f} MiB in {base}: snapshot {stored - empty:.0f} MiB; {COPIES} copies "
        f"{copied - stored:.0f} MiB, {seconds / COPIES * 1000:.1f} ms each"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
