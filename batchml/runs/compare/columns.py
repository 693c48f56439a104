"""Columns of runs for `ls`: facts by name, parameters, and values of metrics. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from heapq import nlargest, nsmallest
from itertools import islice
from typing import NamedTuple

from batchml.cli.render import duration, timestamp
from batchml.config.project import project_name
from batchml.errors import UsageError, did_you_mean
from batchml.model.names import dollars, idle_text, short_id
from batchml.model.numbering import shown_params
from batchml.model.run import NOT_KNOWN, OutcomeClass, Record, Run, classify, describe_state
from batchml.runs.compare.facts import UNUSED, unused_params
from batchml.runs.metrics.conditions import NO_METRICS, MetricValue, child_of, read_metric_value
from batchml.runs.search import FoundRun

Value = str | int | float | None

_LISTED = 20  # parameters or metrics that an error names


class Column(NamedTuple):
    """A column of a table of runs. The functions take a run and the time in ms since the epoch."""

    heading: str
    value: Callable[[FoundRun, int], Value]  # by which runs are sorted; None if unknown
    text: Callable[[FoundRun, int], str]
    metric: MetricValue | None = None  # the value of a metric that the column shows


class KnownNames(NamedTuple):
    """The parameters and metrics of known runs."""

    params: frozenset[str]
    metrics: frozenset[str]


# --- Facts ----------------------------------------------------------------------------------------


def _column(
    heading: str,
    value: Callable[[FoundRun, int], Value],
    text: Callable[[Value], str] = lambda value: str(value),
) -> Column:
    """A column whose text is that of its value; empty if the value is unknown."""

    def cell(found: FoundRun, now_ms: int) -> str:
        known = value(found, now_ms)
        return "" if known is None else text(known)

    return Column(heading, value, cell)


def _of_run(read: Callable[[Run], Value]) -> Callable[[FoundRun, int], Value]:
    """A value of the run itself; unknown for a run that AWS Batch has forgotten."""
    return lambda found, _: read(found.run) if found.run else None


def _of_request(read: Callable[[Run | Record], Value]) -> Callable[[FoundRun, int], Value]:
    """A value of the run, or of its record; 0 and "" are unknown."""

    def value(found: FoundRun, _: int) -> Value:
        asked = found.run or found.record
        return (read(asked) or None) if asked else None

    return value


def _state(found: FoundRun, _: int) -> Value:
    if found.run is None:
        return NOT_KNOWN
    return ", ".join(filter(None, (describe_state(found.run), idle_text(found.idle))))


def _outcome(run: Run) -> OutcomeClass | None:
    return classify(run).outcome if run.status.is_terminal else None


def _exit_code(run: Run) -> int | None:
    return classify(run).exit_code if run.status.is_terminal else None


def _count_attempts(run: Run) -> int | None:
    return None if run.array_size else len(run.attempts)  # those of children are not known


def _age(found: FoundRun, now_ms: int) -> Value:
    return (now_ms - found.created_at) / 1000 if found.created_at else None


def _ran(found: FoundRun, now_ms: int) -> Value:
    return found.times(now_ms).ran


def _waited(found: FoundRun, now_ms: int) -> Value:
    return found.times(now_ms).waited


def _seconds(value: Value) -> str:
    return duration(float(value or 0))


def _usd(value: Value) -> str:
    return dollars(Decimal(str(value)))


def _params(found: FoundRun, _: int) -> Value:
    return " ".join(f"{name}={text}" for name, text in _params_of(found).texts.items()) or None


class _ShownParams(NamedTuple):
    found: FoundRun | None
    params: dict[str, object]
    texts: dict[str, str]


_newest = _ShownParams(None, {}, {})


def _params_of(found: FoundRun) -> _ShownParams:
    """The parameters of a run, and their texts: of an array with the numbers of its children.

    Those of the newest run are kept: a row has many columns of parameters.
    """
    global _newest
    kept = _newest
    if kept.found is not found:
        params, unused = found.params, set(unused_params(found))
        shown = shown_params(params, found.run, found.record)
        texts = {
            name: f"{shown.get(name, '')}{UNUSED if name in unused else ''}" for name in params
        }
        kept = _newest = _ShownParams(found, params, texts)
    return kept


FACTS: Mapping[str, Column] = {
    "id": Column("ID", lambda found, _: found.job_id, lambda found, _: short_id(found.shown_id)),
    "name": _column("NAME", lambda found, _: found.name),
    "project": _column("PROJECT", lambda found, _: found.project or None,
                       lambda project: project_name(str(project))),
    "queue": _column("QUEUE", lambda found, _: found.queue),
    "status": _column("STATUS", _state),
    "class": _column("CLASS", _of_run(_outcome)),
    "code": _column("CODE", _of_run(_exit_code)),
    "age": _column("AGE", _age, _seconds),
    "ran": _column("RAN", _ran, _seconds),
    "waited": _column("WAITED", _waited, _seconds),
    "submitted": _column("SUBMITTED", lambda found, _: found.created_at or None,
                         lambda value: timestamp(int(value or 0))),
    "attempts": _column("ATTEMPTS", _of_run(_count_attempts)),
    "params": _column("PARAMS", _params),
    "cost": _column("COST", lambda found, _: found.cost, _usd),
    "commit": _column("COMMIT", lambda found, _: found.commit[:12] or None),
    "image": _column("IMAGE", _of_request(lambda asked: asked.image)),
    "vcpus": _column("VCPUS", _of_request(lambda asked: asked.vcpus)),
    "memory": _column("MEMORY", _of_request(lambda asked: asked.memory_mib), lambda mib: f"{mib}M"),
    "gpus": _column("GPUS", _of_request(lambda asked: asked.gpus)),
}  # fmt: skip
DEFAULT = ("id", "name", "queue", "status", "class", "code", "age", "ran")


# --- Parameters and metrics -----------------------------------------------------------------------


def param_column(name: str) -> Column:
    def value(found: FoundRun, _: int) -> Value:
        known = _params_of(found).params.get(name)
        return known if known is None or isinstance(known, int | float) else str(known)

    return Column(name, value, lambda found, _: _params_of(found).texts.get(name, ""))


def metric_column(metric: MetricValue) -> Column:
    words = metric.name if metric.function == "last" else f"{metric.function}({metric.name})"

    def text(found: FoundRun, _: int) -> str:
        value = metric.read(found.record)
        if value is not None:
            return f"{value:g}"
        # The history has finite values only: a metric with some, but without a last one, diverged.
        has_diverged = found.record is not None and metric.name in found.record.ranges
        return "nan/inf" if has_diverged and metric.function == "last" else ""

    return Column(words, lambda found, _: metric.read(found.record), text, metric)


def known_names(
    runs: Iterable[FoundRun], params: Iterable[str] = (), metrics: Iterable[str] = ()
) -> KnownNames:
    """The parameters and metrics of runs, and these; `loss:3` is the metric `loss` of child 3."""
    params, metrics = set(params), set(metrics)
    for each in runs:
        params |= each.params.keys()
        if record := each.record:
            metrics |= record.metrics.keys() | record.patterns.keys() | record.directions.keys()
    metrics |= {child_of(name)[0] for name in metrics}
    return KnownNames(frozenset(params), frozenset(metrics - {"step"}))


def read_column(text: str, flag: str, known: KnownNames) -> Column:
    """The column of a name: a fact, a parameter, a metric or a function of a metric.

    `params.lr` and `metrics.lr` say which of two is meant. Raises UsageError.
    """
    word = text.strip()
    if word.lower() in FACTS:
        return FACTS[word.lower()]
    kind, _, name = word.partition(".")
    if name and kind == "params" and name in known.params:
        return param_column(name)
    if word in known.params:
        return param_column(word)
    metric = read_metric_value(name if name and kind == "metrics" else word, flag)
    if metric.name in known.metrics:
        return metric_column(metric)
    names = [*FACTS, *sorted(known.params), *sorted(known.metrics)]
    raise UsageError(
        f"{flag} {text}: no such column.{did_you_mean(metric.name, names)} "
        f"Columns: {', '.join(FACTS)}{_listed('parameters', known.params)}"
        f"{_listed('metrics', known.metrics)}.{'' if known.metrics else ' ' + NO_METRICS}"
    )


def _listed(what: str, names: Iterable[str]) -> str:
    shown = list(islice(sorted(names), _LISTED + 1))
    more = ", ..." if len(shown) > _LISTED else ""
    return f"; {what}: {', '.join(shown[:_LISTED])}{more}" if shown else ""


def first_runs(
    count: int, runs: Iterable[FoundRun], column: Column, now_ms: int, *, descending: bool = False
) -> list[FoundRun]:
    """The first `count` runs by a column, numbers before texts; no more are kept in memory.

    Runs without a value are the last; runs with the same value stay in their order.
    """

    def rank(found: FoundRun) -> tuple[bool, bool, float, str]:
        value = column.value(found, now_ms)
        is_last = (value is None) is not descending
        return (is_last, True, 0.0, value) if isinstance(value, str) else (
            is_last, False, float(value or 0), ""
        )  # fmt: skip

    return (nlargest if descending else nsmallest)(count, runs, key=rank)


def to_rows(columns: Sequence[Column], runs: Iterable[FoundRun], now_ms: int) -> list[list[str]]:
    """A table: the headings, then a row for each run."""
    heading = [column.heading for column in columns]
    return [heading, *([column.text(each, now_ms) for column in columns] for each in runs)]
