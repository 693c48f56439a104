"""Compare two runs: their requests and their results. Pure."""

from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct

from batchml.model.run import classify
from batchml.runs.metrics.series import FEW, child_of, spread
from batchml.runs.rerun.rules import plain_command
from batchml.runs.search import FoundRun, code_digest

Value = str | int | float | bool | None


class RunDifference(Struct, frozen=True):
    """A fact of two runs; None if a run does not have the fact."""

    what: str  # the name of the fact: "status", "params.lr", "metrics.loss"
    left: Value
    right: Value

    @property
    def same(self) -> bool:
        return self.left == self.right

    @property
    def change(self) -> float | None:
        """The difference of two numbers; None for other values."""
        before, after = _number(self.left), _number(self.right)
        return None if before is None or after is None else after - before


def compare(left: FoundRun, right: FoundRun, now_ms: int) -> list[RunDifference]:
    """Every fact that either run has, in a fixed order: requests first, then results."""
    one, other = dict(list_facts(left, now_ms)), dict(list_facts(right, now_ms))
    # In the order of the left run; facts that only the right run has end their group.
    names = sorted({**one, **other}, key=lambda name: (_group(name), *_position(name, one, other)))
    found = [RunDifference(name, one.get(name), other.get(name)) for name in names]
    return [each for each in found if (each.left, each.right) != (None, None)]


def summarize(found: Iterable[RunDifference]) -> list[RunDifference]:
    """The differences for a table.

    Waiting times that differ by less than a second are left out; the metrics of many children are
    replaced by their distribution.
    """
    kept = [each for each in found if not (each.what == "waited" and abs(each.change or 0) < 1)]
    values: dict[str, list[dict[int, float]]] = {}
    for each in kept:
        for side, value in enumerate((each.left, each.right)):
            name, child = child_of(each.what)
            number = _number(value)
            if child is not None and number is not None and name.startswith("metrics."):
                values.setdefault(name, [{}, {}])[side][child] = number
    many = {name: sides for name, sides in values.items() if max(map(len, sides)) > FEW}
    shown: dict[str, list[RunDifference]] = {}
    for each in kept:
        name = child_of(each.what)[0]
        shown.setdefault(name if name in many else each.what, [each])
    for name, sides in many.items():
        shown[name] = _spreads(name, *sides)
    return [each for group in shown.values() for each in group]


def _spreads(
    name: str, left: Mapping[int, float], right: Mapping[int, float]
) -> list[RunDifference]:
    one, other = (spread(side) if side else None for side in (left, right))
    return [
        RunDifference(f"{name} {words}", getattr(one, field, None), getattr(other, field, None))
        for words, field in (
            ("children", "count"), ("least", "least"), ("median", "middle"), ("most", "most"),
        )
    ]  # fmt: skip


def list_facts(found: FoundRun, now_ms: int) -> Iterator[tuple[str, Value]]:
    """The facts that can be compared, by name."""
    run, record = found.run, found.record
    yield "name", found.name
    yield "queue", found.queue
    yield from _flatten("params", found.params)
    yield "commit", found.commit or None
    if record is not None:
        yield "uncommitted", record.dirty if found.commit else None
    yield "code", code_digest(found.code)[:12] or None
    asked = run or record
    if asked is not None:
        yield "image", asked.image or None
        yield "command", " ".join(plain_command(found.command)) or None
        yield "vcpus", asked.vcpus or None
        yield "memory", asked.memory_mib or None
        yield "gpus", asked.gpus
        yield "array", asked.array_size or None
    tags = {name: value for name, value in found.tags.items() if not name.startswith("batchml:")}
    yield from _flatten("tags", tags)
    if run is not None:
        yield "status", run.status.value
        if run.status.is_terminal:
            outcome, code = classify(run)
            yield "class", outcome.value
            yield "exitCode", code
        yield "attempts", len(run.attempts)
        if run.started_at:
            yield "seconds", round(((run.stopped_at or now_ms) - run.started_at) / 1000, 3)
            yield "waited", round((run.started_at - found.created_at) / 1000, 3)
    yield "cost", found.cost
    yield from _flatten("metrics", found.metrics)


_GROUPS = (
    "name", "queue", "params", "commit", "uncommitted", "code", "image", "command", "vcpus",
    "memory", "gpus", "array", "tags", "status", "class", "exitCode", "attempts", "seconds",
    "waited", "cost", "metrics",
)  # fmt: skip


def _group(name: str) -> int:
    return _GROUPS.index(name.partition(".")[0])


def _position(name: str, one: Mapping[str, Value], other: Mapping[str, Value]) -> tuple[int, int]:
    for number, each in enumerate((one, other)):
        if name in each:
            return number, list(each).index(name)
    return 2, 0


def _flatten(what: str, table: Mapping[str, object]) -> Iterator[tuple[str, Value]]:
    for name, value in table.items():
        yield f"{what}.{name}", value if isinstance(value, str | int | float) else str(value)


def _number(value: Value) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and value is not None else None
