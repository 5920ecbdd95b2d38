"""The run store: one SQLite file with every finished search, its tree, texts, seeds and settings.

| module | purpose |
|---|---|
| `store` | reads and exports runs |
| `run_writer` | loads a run's finished searches and writes new ones |
| `run_identity` | defines the data that determines a run's results |
| `run_lock` | allows only one writer per run |
| `search_rows` | writes and reads the rows of runs and searches |
| `table_schema` | defines the tables and their checksums |
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
    from search.results.run_info import RunInfo as RunInfo
    from search.store.recorded_critic import RecordedCritic as RecordedCritic
    from search.store.recorded_runs import Recorded as Recorded
    from search.store.regrading import regrade as regrade
    from search.store.store import Store as Store
    from search.store.store import open_store as open_store
    from search.store.stored_states import RecordedState as RecordedState
    from search.store.stored_states import recorded_states as recorded_states
    from search.store.transcript_import import Imported as Imported
    from search.store.transcript_import import import_transcripts as import_transcripts

__getattr__, __dir__, __all__ = lazy_names(__name__)
