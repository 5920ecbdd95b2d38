"""The run store: one SQLite file with every finished search, its tree, texts, seeds and settings.

`store` reads and exports runs. `record` writes a run with the identity of its settings and locks it for other
writers. `rows` converts runs and searches to rows and back, and `file` has the tables and their
checksums. `results` reads what tables need without the trees. `regrade` grades stored searches again, and `importing`
writes recorded transcripts as runs, and `recorded` opens runs to search them again.
"""

from search.results.run_info import RunInfo
from search.store.importing import Imported, import_transcripts
from search.store.record import RunRecord, engine_identity, open_record, run_config
from search.store.recorded import Recorded, as_recorded
from search.store.regrade import Regrade, regrade
from search.store.results import Totals, TreeValues, outcome_of_row
from search.store.store import Store, open_store

__all__ = [
    "Imported",
    "Recorded",
    "Regrade",
    "RunInfo",
    "RunRecord",
    "Store",
    "Totals",
    "TreeValues",
    "as_recorded",
    "engine_identity",
    "import_transcripts",
    "open_record",
    "open_store",
    "outcome_of_row",
    "regrade",
    "run_config",
]
