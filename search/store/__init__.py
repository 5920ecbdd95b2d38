"""The run store: one SQLite file with every finished search, its tree, texts, seeds and settings.

| module | purpose |
|---|---|
| `store` | reads and exports runs |
| `resume` | loads a run's finished searches and writes new ones |
| `run_identity` | defines the data that determines a run's results |
| `run_lock` | allows only one writer per run |
| `row_conversion` | writes and reads the rows of runs and searches |
| `table_schema` | defines the tables and their checksums |
| `read_results` | reads the results for tables, without the trees |
| `regrading`, `stored_grades` | grade stored searches again; read these grades |
| `transcript_import` | writes recorded transcripts as runs |
| `recorded_runs` | opens runs to search them again |
| `stored_states` | yields the states of runs with the recorded outcomes |
| `recorded_critic` | provides recorded values as a critic |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mas_gym.internal.lazy import lazy_names

if TYPE_CHECKING:
    from search.results.run_info import RunInfo
    from search.store.recorded_critic import RecordedCritic
    from search.store.recorded_runs import Recorded
    from search.store.regrading import regrade
    from search.store.store import Store, open_store
    from search.store.stored_states import RecordedState, recorded_states
    from search.store.transcript_import import Imported, import_transcripts

_HOMES = {
    "search.results.run_info": "RunInfo",
    "search.store.transcript_import": "Imported import_transcripts",
    "search.store.recorded_runs": "Recorded",
    "search.store.regrading": "regrade",
    "search.store.stored_states": "RecordedState recorded_states",
    "search.store.store": "Store open_store",
    "search.store.recorded_critic": "RecordedCritic",
}

__all__ = [
    "Imported",
    "Recorded",
    "RecordedCritic",
    "RecordedState",
    "RunInfo",
    "Store",
    "import_transcripts",
    "open_store",
    "recorded_states",
    "regrade",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
