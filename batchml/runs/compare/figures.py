"""The figures of runs: metrics, speed, resource use, cost, and their spread over seeds. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev

from msgspec import Struct, ValidationError, convert
from msgspec.structs import replace

from batchml.cost.bill import Bill
from batchml.model.job import JobSpec, Scalar
from batchml.model.names import short_id
from batchml.model.params import is_seed
from batchml.runs.compare.facts import Value, list_facts
from batchml.runs.metrics.pace import Pace
from batchml.runs.metrics.series import Series
from batchml.runs.metrics.usage import UsageSample, use_of
from batchml.runs.search import FoundRun
from batchml.runtime.protocol.variables import fill_command

Figure = tuple[str, ...]  # a name: ("speed", "secondsPerStep"), ("metrics", "loss", "last")

HOUR = 3600.0  # seconds
MAX_LABEL = 30  # characters of a label
DATA_WAIT = "data_wait"  # a metric: percent of the time that the training waits for data


class MeasuredRun(Struct, frozen=True):
    """A run with all that its logs and its bill say. `found` has its metrics."""

    found: FoundRun
    series: Mapping[str, Series] = {}
    steps: Pace | None = None
    epochs: Pace | None = None
    uses: tuple[UsageSample, ...] = ()
    bill: Bill | None = None
    is_whole: bool = True  # False if only a part of a long log was read


class MeanValue(Struct, frozen=True):
    """The mean of a figure over `n` runs, with their standard deviation if there are several."""

    mean: float
    sd: float | None = None
    n: int = 1


class RunGroup(Struct, frozen=True):
    """Runs that are compared as one: a single run, runs that differ only in a seed, or an array.

    `facts` are those that all runs have in common, and the seeds. `label` is short and unique.
    """

    runs: tuple[MeasuredRun, ...]
    facts: Mapping[str, Value]
    figures: Mapping[Figure, MeanValue]
    label: str = ""

    @property
    def first(self) -> FoundRun:
        return self.runs[0].found

    @property
    def is_array(self) -> bool:
        """Whether the runs are the children of one array."""
        wholes = {each.found.job_id.partition(":")[0] for each in self.runs}
        return len(self.runs) > 1 and len(wholes) == 1

    @property
    def short_id(self) -> str:
        """The short id of the array or of the first run: `6b0e2f6c`, `6b0e2f6c:3`, `6b0e2f6c#1`."""
        job_id = self.first.shown_id
        return short_id(job_id.partition(":")[0] if self.is_array else job_id)

    @property
    def params(self) -> dict[str, Value]:
        """The parameters that all runs have in common, and the seeds."""
        start = "params."
        return {n.removeprefix(start): v for n, v in self.facts.items() if n.startswith(start)}

    def value(self, *name: str) -> float | None:
        known = self.figures.get(name)
        return known.mean if known else None


# --- The figures of one run -----------------------------------------------------------------------


def figures_of(measured: MeasuredRun, now_ms: int) -> dict[Figure, float]:
    """The figures of a run that are known, by name."""
    found: dict[Figure, float | None] = {}
    for name in measured.found.metrics.keys() | measured.found.first_metrics.keys():
        for function, values in (
            ("first", measured.found.first_metrics),
            ("best", measured.found.best_metrics),
            ("last", measured.found.metrics),
        ):
            found["metrics", name, function] = values.get(name)
    found |= {("speed", name): value for name, value in _speed(measured, now_ms).items()}
    found |= {("use", name): value for name, value in _use(measured.uses).items()}
    found |= {("cost", name): value for name, value in _cost(measured, now_ms).items()}
    return {name: value for name, value in found.items() if value is not None}


def _speed(measured: MeasuredRun, now_ms: int) -> dict[str, float | None]:
    step = measured.steps.seconds_each if measured.steps else None
    epoch = measured.epochs.seconds_each if measured.epochs else None
    times = measured.found.times(now_ms)
    return {
        "secondsPerStep": step,
        "stepsPerSecond": 1 / step if step else None,
        "epochsPerHour": HOUR / epoch if epoch else None,
        "seconds": times.ran or None,
        "waited": times.waited if times.started else None,
    }


def _use(uses: Sequence[UsageSample]) -> dict[str, float | None]:
    """The CPU of all nodes in cores, the mean use of their GPUs in percent, the most memory."""
    known = [use for sample in uses if (use := use_of(sample))]
    gpus = [(use.gpu, use.gpus) for use in known if use.gpu is not None and use.gpus]
    series = [each for use in uses if (each := use.series.get("gpu_memory"))]
    gpu_memory = [value for each in series for value in each.values]
    return {
        "cpu": sum(use.cpu for use in known) if known else None,
        "vcpus": float(sum(use.vcpus for use in known)) or None,
        "memory": max((use.memory for use in known), default=0) or None,
        "gpu": 100 * sum(gpu for gpu, _ in gpus) / sum(n for _, n in gpus) if gpus else None,
        "gpuMemory": max(gpu_memory, default=None),
    }


def _cost(measured: MeasuredRun, now_ms: int) -> dict[str, float | None]:
    """Dollars of the run, by the upper bound of its bill; empty where no price is known."""
    bill = measured.bill
    usd = bill.upper_bound if bill is not None and not bill.is_free else None
    seconds = measured.found.times(now_ms).ran
    if usd is None or not (usd or seconds):  # nothing has started
        return {}
    steps = measured.steps.done if measured.steps else None
    epochs = measured.epochs.done if measured.epochs else None
    return {
        "usd": usd,
        "usdPerHour": usd * HOUR / seconds if seconds else None,
        "usdPerStep": usd / steps if steps else None,
        "usdPerEpoch": usd / epochs if epochs else None,
    }


# --- Runs that differ only in a seed --------------------------------------------------------------


def group_runs(entries: Iterable[Sequence[MeasuredRun]], now_ms: int) -> list[RunGroup]:
    """The groups to compare, in their order.

    An entry is a single run, or the children of an array, which are a group. Single runs that
    differ only in a seed are a group.
    """
    groups: dict[object, list[MeasuredRun]] = {}
    for entry in entries:
        is_single = len(entry) == 1
        key = _request(entry[0].found) if is_single else entry[0].found.job_id
        groups.setdefault(key, []).extend(entry)
    found: list[RunGroup] = []
    for together in groups.values():
        is_array = ":" in together[0].found.job_id and together[0].found.job_id in groups
        if is_array or len({_seeds(each.found) for each in together}) > 1:
            found.append(_make(together, now_ms))
        else:
            found += [_make([each], now_ms) for each in together]
    return _with_labels(found)


def request_facts(found: FoundRun) -> dict[str, Value]:
    """The facts of a request. The command has its placeholders, where they are known."""
    facts = dict(list_facts(found))
    facts["command"] = _template(found) or facts.get("command")
    return facts


def _template(found: FoundRun) -> str:
    """The command with the placeholders of its job; "" if it was not made from the job's."""
    try:
        spec = convert(found.record.spec if found.record else {}, JobSpec, strict=False)
        params = convert(found.params, dict[str, Scalar])
    except ValidationError:  # of another version, or of another client
        return ""
    is_filled = fill_command(spec.template, params) == list(found.command)
    return " ".join(spec.command) if is_filled else ""


def _request(found: FoundRun) -> object:
    """What runs with several seeds have in common."""
    facts = request_facts(found)
    if facts.get("code"):  # the same content may have been sent from two commits
        facts["commit"] = facts["uncommitted"] = None
    names = (name for name in facts if not name.startswith("tags."))
    return tuple((n, facts[n]) for n in names if not is_seed(n.removeprefix("params.")))


def _seeds(found: FoundRun) -> tuple[str, ...]:
    return tuple(str(value) for name, value in found.params.items() if is_seed(name))


def _make(together: Sequence[MeasuredRun], now_ms: int) -> RunGroup:
    all_facts = [request_facts(each.found) for each in together]
    facts: dict[str, Value] = {}
    for name in dict.fromkeys(name for each in all_facts for name in each):
        values = list(dict.fromkeys(each.get(name) for each in all_facts))
        if len(values) == 1:
            facts[name] = values[0]
        elif is_seed(name.removeprefix("params.")):
            facts[name] = ", ".join(map(str, values))
    figures: dict[Figure, list[float]] = {}
    for each in together:
        for figure, value in figures_of(each, now_ms).items():
            figures.setdefault(figure, []).append(value)
    return RunGroup(
        tuple(together), facts, {name: mean_value(values) for name, values in figures.items()}
    )


def mean_value(values: Sequence[float]) -> MeanValue:
    """The mean, and the standard deviation of a sample (divided by n - 1)."""
    return MeanValue(fmean(values), stdev(values) if len(values) > 1 else None, len(values))


def _with_labels(groups: Sequence[RunGroup]) -> list[RunGroup]:
    labels = choose_labels(
        [group.first.name for group in groups],
        [group.params for group in groups],
        [group.short_id for group in groups],
        [group.first.shown_id for group in groups],
    )
    return [replace(group, label=label) for group, label in zip(groups, labels, strict=True)]


def choose_labels(
    names: Sequence[str],
    params: Sequence[Mapping[str, object]],
    short_ids: Sequence[str],
    ids: Sequence[str],
) -> list[str]:
    """Short labels: names if they differ, else parameters that differ, else ids."""
    for labels in (
        list(names),
        _param_labels(params, with_seeds=False),
        _param_labels(params, with_seeds=True),
        list(short_ids),
        list(ids),
    ):
        if len(set(labels)) == len(labels):
            break
    return labels


def _param_labels(params: Sequence[Mapping[str, object]], *, with_seeds: bool) -> list[str]:
    """The parameters that differ; "" for all if they are long."""
    names = dict.fromkeys(name for each in params for name in each if name)
    shown = [name for name in names if with_seeds or not is_seed(name)]
    differ = [n for n in shown if len({str(each.get(n)) for each in params}) > 1]
    labels = [
        " ".join(f"{name}={each[name]}" for name in differ if name in each) for each in params
    ]
    return labels if max(map(len, labels), default=0) <= MAX_LABEL else ["" for _ in params]
