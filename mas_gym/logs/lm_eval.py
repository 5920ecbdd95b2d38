"""Samples of lm-evaluation-harness, written with ``--log_samples``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from mas_gym.errors import is_number, shown
from mas_gym.internal.json_types import JSONMapping
from mas_gym.logs.chats import QUESTION, reference_of
from mas_gym.logs.fields import AGENT, has_fields
from mas_gym.logs.messages import written
from mas_gym.logs.transcript import LoggedMessage, Transcript
from mas_gym.tasks.data_rows import BadRow, RawRow, first_of

_FIELDS = {
    *("doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics"),
    *("doc_hash", "prompt_hash", "target_hash"),
}

is_lm_eval = has_fields("doc_id", "doc", "resps")


def lm_eval_samples(rows: Iterable[RawRow]) -> Iterator[RawRow]:
    """Yield a row per response; responses that the harness writes again for a further filter are left out."""
    first: object = None
    for place, row in rows:
        if not is_lm_eval(row) or not isinstance(row, Mapping):
            yield RawRow(place, row)
            continue
        first = row.get("filter") if first is None else first
        if row.get("filter") != first:
            continue
        repeats = _responses(row)
        if len(repeats) < 2 or _choice(row) is not None:
            yield RawRow(place, row)
        else:
            # The metrics are those of the filtered response.
            plain = {key: value for key, value in row.items() if key in _FIELDS - {"metrics"}}
            for number, one in enumerate(repeats):
                yield RawRow(f"{place} response {number}", {**plain, "resps": [[one]]})


def lm_eval(row: JSONMapping) -> Transcript:
    """Read a sample of lm-evaluation-harness; of a multiple-choice task, the choice with the highest likelihood."""
    best = _choice(row)
    text = _responses(row)[0] if best is None else _prompt(row, best, 1).strip() or f"choice {best}"
    if not isinstance(text, str) or not text.strip():
        raise BadRow(f"expected resps with a response, got {shown(row['resps'])}")
    asked = first_of(row["doc"], QUESTION) if isinstance(row["doc"], Mapping) else None
    metrics = sample_metrics(row)
    value = next(iter(metrics.values()), None)
    facts = {"doc_id": str(row["doc_id"]), "filter": row.get("filter"), "metric": next(iter(metrics), None)}
    return Transcript(
        question=asked if isinstance(asked, str) else _prompt(row, 0, 0),
        messages=(LoggedMessage(AGENT, text),),
        reference=None if best is not None else reference_of(_plain(row.get("target"))),
        correct=bool(value) if value in (0, 1) else None,
        score=None if value in (0, 1) else value,
        facts={key: fact for key, fact in facts.items() if isinstance(fact, str)},
    )


def sample_metrics(row: JSONMapping) -> dict[str, float]:
    """Return a sample's metrics, in the harness's order."""
    named = row.get("metrics")
    names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    others = [name for name in row if name not in _FIELDS]
    return {name: float(row[name]) for name in names or others if is_number(row.get(name))}


def _plain(target: object) -> object:
    return target if target is None or isinstance(target, str | int | float | list) else written(target)


def _responses(row: JSONMapping) -> list[object]:
    """Return the responses to the first request."""
    listed = row.get("resps")
    first = listed[0] if isinstance(listed, list) and listed else []
    return first if isinstance(first, list) else [first]


def _choice(row: JSONMapping) -> int | None:
    """Return the number of the most likely continuation in a multiple-choice task; None for a task that generates."""
    scored = row.get("filtered_resps") or [one[0] if isinstance(one, list) and one else one for one in row["resps"]]
    if not isinstance(scored, list) or not scored:
        return None
    sums = []
    for one in scored:
        if not isinstance(one, list) or len(one) != 2:
            return None
        try:
            sums.append(float(one[0]))
        except (TypeError, ValueError):
            return None
    return max(range(len(sums)), key=sums.__getitem__)


def _prompt(row: JSONMapping, request: int, part: int) -> str:
    """Return a part of a request: 0 the prompt, 1 the continuation."""
    arguments = row.get("arguments")
    if isinstance(arguments, Mapping):
        found = arguments[f"gen_args_{request}"].get(f"arg_{part}")
    else:
        found = arguments[request][part] if arguments else None
    return found if isinstance(found, str) else ""
