"""Datasets on the Hugging Face hub."""

from __future__ import annotations

from typing import NamedTuple

from mas_gym.errors import DataNotFoundError, MissingDependencyError, shown
from mas_gym.tasks.data_rows import RawRow
from mas_gym.tasks.files import three_ways

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


def read_hub(hub: Hub, partition: str, name: str) -> list[RawRow]:
    """Read a partition from the hub, or from its cache if the hub cannot be reached.

    Raises:
        DataNotFoundError: The hub is unreachable and the data is not cached; raised within seconds.
        MissingDependencyError: The datasets library is not installed.
    """
    try:
        import datasets
    except ImportError:
        why = "loading from the hub needs the package datasets, which is not installed"
        raise MissingDependencyError(three_ways(name, why)) from None
    before = datasets.config.HF_HUB_OFFLINE
    offline = before or not _reachable(datasets.config.HF_ENDPOINT)
    config, split = (partition, "train") if hub.config == "*" else (hub.config, partition)
    datasets.config.HF_HUB_OFFLINE = offline
    try:
        rows = datasets.load_dataset(hub.path, config, split=split, revision=hub.revision)
    except Exception as error:
        state = "cannot be reached, and its cache does not contain" if offline else "did not return"
        why = f"the hub {state} {hub.path!r}, split {partition!r} ({type(error).__name__}: {shown(str(error))})"
        raise DataNotFoundError(three_ways(name, why)) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = before
    return [RawRow(f"{hub.path}/{partition}: row {number}", dict(row)) for number, row in enumerate(rows)]


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
