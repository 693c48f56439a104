"""Compare what two runs requested: parameters, code, image, resources. Pure."""

from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct

from batchml.runs.search import FoundRun, code_digest
from batchml.runtime.protocol.variables import takes

Value = str | int | float | bool | None


class RunDifference(Struct, frozen=True):
    """A fact of two runs; None if a run does not have the fact."""

    what: str  # the name of the fact: "image", "params.lr"
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


def compare(left: FoundRun, right: FoundRun) -> list[RunDifference]:
    """Every fact that either run has, in a fixed order."""
    one, other = dict(list_facts(left)), dict(list_facts(right))
    # In the order of the left run; facts that only the right run has end their group.
    names = sorted({**one, **other}, key=lambda name: (_group(name), *_position(name, one, other)))
    found = [RunDifference(name, one.get(name), other.get(name)) for name in names]
    return [each for each in found if (each.left, each.right) != (None, None)]


def list_facts(found: FoundRun) -> Iterator[tuple[str, Value]]:
    """The facts of a request that can be compared, by name."""
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
        yield "command", found.own_command or None
        yield "vcpus", asked.vcpus or None
        yield "memory", asked.memory_mib or None
        yield "gpus", asked.gpus
        yield from [("neurons", asked.neurons)] if asked.neurons else []
        yield from [("data", found.data_dir)] if found.data_dir else []
        yield from _flatten("data", found.data_sets)
        yield "array", asked.array_size or None
    tags = {name: value for name, value in found.tags.items() if not name.startswith("batchml:")}
    yield from _flatten("tags", tags)


# --- Parameters that the command does not use -----------------------------------------------------


UNUSED = "*"  # after the value of such a parameter in a table


def unused_params(found: FoundRun) -> list[str]:
    """The parameters that no word of the run's command uses: only BATCHML_PARAMS has them."""
    spec = found.record.spec if found.record else {}
    command, params = spec.get("command") or (), spec.get("params") or {}
    return [
        name for name in found.params
        if command and name in params and not takes(command, name, params)
    ]  # fmt: skip


def describe_unused(names: Iterable[str]) -> str:
    """The note below a table with these marked parameters; "" without any."""
    shown = ", ".join(dict.fromkeys(names))
    words = "no word of the command uses it; only the variable BATCHML_PARAMS has it."
    return shown and f"{UNUSED} {shown}: {words}"


# --- The order and the form of facts --------------------------------------------------------------


_GROUPS = (
    "name", "queue", "params", "commit", "uncommitted", "code", "image", "command", "vcpus",
    "memory", "gpus", "data", "array", "tags",
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
