"""Comparisons of planners and critics: `compare` returns a table with intervals and paired differences.

`comparison_runs` runs the searches, `cost_matching` adjusts planners to an equal cost, and `comparison` builds the
tables of `search.results`. `first_errors` evaluates critics on `transcripts` with a known first wrong step,
`reliability` evaluates them on stored trees, `selection_curves` computes the accuracy of selecting among recorded
samples, `paired_results` compares evaluations that other tools ran, and `blame` finds the message with the largest
drop in value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mas_gym.internal.lazy import lazy_names

if TYPE_CHECKING:
    from search.compare.comparison import compare as compare
    from search.compare.first_errors import bench_critic as bench_critic
    from search.compare.paired_results import compare_results as compare_results
    from search.compare.selection_curves import select as select
    from search.results.table import Comparison as Comparison

__getattr__, __dir__, __all__ = lazy_names(__name__)
