"""The run store: one SQLite file with every finished search, its tree, texts, seeds and settings.

`store` reads and exports runs. `record` writes a run with the identity of its settings and locks it for other
writers. `rows` converts runs and searches to rows and back, and `file` has the tables and their
checksums. `regrade` grades stored searches again.
"""

from search.results.run_info import RunInfo
from search.store.record import RunRecord, engine_identity, open_record, run_config
from search.store.regrade import Regrade, regrade
from search.store.store import Store, open_store

__all__ = [
    "Regrade",
    "RunInfo",
    "RunRecord",
    "Store",
    "engine_identity",
    "open_record",
    "open_store",
    "regrade",
    "run_config",
]
