"""The run store: one SQLite file with every finished search, its tree, texts, seeds and settings.

`store` reads, `record` writes one run, `config` says what determines a run's results, `rows` turns
searches into rows and back, `file` has the tables and their digests, `lock` keeps a second writer out
of a run, and `export` writes Parquet and data sets.
"""

from search.store.config import engine_identity, run_config
from search.store.info import RunInfo
from search.store.record import RunRecord, open_record
from search.store.store import Store, open_store

__all__ = ["RunInfo", "RunRecord", "Store", "engine_identity", "open_record", "open_store", "run_config"]
