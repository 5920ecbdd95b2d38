"""Datasets on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from mas_gym.errors import DataNotFoundError, need, shown
from mas_gym.tasks.data_rows import RawRow

PROBE_SECONDS = 4.0


class Hub(NamedTuple):
    """A dataset on the hub.

    Attributes:
        path: Owner and name.
        config: The configuration; ``"*"`` if each partition is a configuration with the single split ``train``.
        revision: A branch or commit.
    """

    path: str
    config: str | None = None
    revision: str | None = None


def read_hub(hub: Hub, partitions: Collection[str]) -> dict[str, list[RawRow]]:
    """Read those of the partitions that the hub, or its cache if the hub cannot be reached, has.

    Raises:
        DataNotFoundError: There is none of them; raised within seconds if the hub is unreachable.
        MissingDependencyError: The datasets library is not installed.
    """
    datasets = need("datasets", f"{hub.path}: loading a data set from the hub", "data")
    before = datasets.config.HF_HUB_OFFLINE
    offline = before or not _reachable(datasets.config.HF_ENDPOINT)
    found: dict[str, list[RawRow]] = {}
    faults: list[Exception] = []
    datasets.config.HF_HUB_OFFLINE = offline
    try:
        for partition in partitions:
            config, split = (partition, "train") if hub.config == "*" else (hub.config, partition)
            try:
                rows = datasets.load_dataset(hub.path, config, split=split, revision=hub.revision)
            except Exception as error:
                faults.append(error)
            else:
                place = f"{hub.path}/{partition}"
                found[partition] = [RawRow(f"{place}: row {number}", dict(row)) for number, row in enumerate(rows)]
    finally:
        datasets.config.HF_HUB_OFFLINE = before
    if not found:
        state = "cannot be reached, and its cache does not contain" if offline else "did not return"
        fault = f"{type(faults[0]).__name__}: {shown(str(faults[0]))}"
        raise DataNotFoundError(f"the hub {state} {hub.path!r}, split {', '.join(partitions)} ({fault})")
    return found


def _reachable(endpoint: str) -> bool:
    """Return whether the hub responds: its client would retry for half a minute."""
    import urllib.error
    import urllib.request

    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=PROBE_SECONDS).close()
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError) as error:
        # The hub's own client may trust a certificate that urllib does not.
        return "CERTIFICATE" in str(error)
    return True
