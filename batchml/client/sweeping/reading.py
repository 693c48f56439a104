"""From the word on the command line to a sweep and its job, with all mistakes of both at once."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from batchml.client.naming import name_of
from batchml.client.order import Order, Ordered, read_order
from batchml.errors import BatchmlError, ConfigError, NotFound
from batchml.model.job import JobSpec, Retry
from batchml.model.names import is_valid_name, to_name
from batchml.model.sweep import SweepSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchml.client.place import Place

FILE = "sweep.toml"  # in a job's folder: the job's name alone is enough for it
_ATTEMPTS = 3  # of a trial whose host was lost, unless job.toml says how many


class Wish(Struct, frozen=True, kw_only=True):
    """What the user asked for. `changes` are those of `--set`; `table` stands for a file, and `job`
    for the job that it names: one in no file, or the name or folder of another."""

    file: str = ""
    table: "Mapping[str, Any] | None" = None
    job: JobSpec | str | None = None
    changes: tuple[str, ...] = ()
    name: str = ""
    include_secrets: bool = False
    strict: bool = False


class Read(Struct, frozen=True):
    """A sweep and its job, before anything was fitted to a place."""

    where: str
    text: str
    spec: SweepSpec
    ordered: Ordered


def widths(trials: int | None, parallel: int | None) -> tuple[str, ...]:
    """`--trials` and `--parallel` as changes of the file."""
    given = (("limits.trials", trials), ("limits.parallel", parallel))
    return tuple(f"{key}={value}" for key, value in given if value is not None)


def read_wish(place: "Place", wish: Wish) -> Read:
    """The sweep that is meant. Raises ConfigError with every mistake of the file and of its job,
    NotFound for a file that is not there."""
    from batchml.model.sweepfile import check_with_job, read_sweep
    from batchml.sweep.optuna_door import lacking

    path = None if wish.table is not None else find_file(place, wish.file)
    where, text = ("The sweep", "") if path is None else (_shown(place, path), _text(path))
    table = dict(wish.table) if wish.table is not None else _table(where, text)
    if wish.name:
        table["name"] = wish.name
    if path is not None and path.name == FILE:
        table.setdefault("job", str(path.parent))
    if wish.job is not None:
        job = wish.job
        table["job"] = job if isinstance(job, str) else job.name or name_of(job.command)
    beside = path.parent if path else place.here
    _name_after_folder(table, beside)
    mistakes: list[str] = []
    spec, ordered = None, None
    try:
        spec = read_sweep(table, where, text=text, changes=wish.changes)
    except ConfigError as error:
        mistakes += error.mistakes
    named = spec.job if spec is not None else table.get("job")
    if isinstance(named, str) and named:
        try:
            ordered = _job(place, wish, named, beside, _lent(spec, table))
        except ConfigError as error:
            mistakes += [f"{error.where}: {mistake}" for mistake in error.mistakes]
        except NotFound as error:
            mistakes.append(f"job: {error}")
    method = spec.method if spec is not None else table.get("method")
    mistakes += lacking(method) if isinstance(method, str) else []
    if spec is not None and ordered is not None:
        mistakes += check_with_job(spec, ordered.spec)
    if mistakes:
        raise ConfigError(where, mistakes)
    assert spec is not None and ordered is not None
    return Read(where, text, spec, ordered)


def _name_after_folder(table: dict[str, Any], beside: Path) -> None:
    """`job = "."` says no name: that of its folder does."""
    from batchml.model.sweepfile import MAX_NAME

    job = table.get("job")
    if isinstance(job, str) and job and "name" not in table and not job.strip("./"):
        name = to_name((beside / job).resolve().name)[:MAX_NAME]
        if is_valid_name(name):
            table["name"] = name


def _lent(spec: SweepSpec | None, table: dict[str, Any]) -> frozenset[str]:
    """What every trial is given: such a parameter needs no default of the job."""
    if spec is not None:
        return frozenset(name for name, each in spec.space.items() if not each.when)
    space = table.get("space")
    return frozenset(map(str, space)) if isinstance(space, dict) else frozenset()


def find_file(place: "Place", word: str) -> Path:
    """The sweep file that a word means: itself, or the `sweep.toml` of a job's folder or name.

    Raises NotFound.
    """
    named = place.here / word
    if named.is_file():
        return named
    for folder in (named, *(jobs / word for jobs in place.job_folders)):
        if (folder / FILE).is_file():
            return folder / FILE
    if named.is_dir():
        raise NotFound("File", str(Path(word) / FILE), [], "It says what the sweep tries.")
    known = [path.name for path in place.here.glob("*.toml") if path.name != "batchml.toml"]
    known += [path.parent.name for jobs in place.job_folders for path in jobs.glob(f"*/{FILE}")]
    hint = f"Give a sweep file, or a job that has a {FILE}. How one is written: docs/sweep-file.md."
    raise NotFound("Sweep file", word, known, hint)


def _shown(place: "Place", path: Path) -> str:
    try:
        return str(path.relative_to(place.here))
    except ValueError:
        return str(path)


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), [f"not UTF-8: {error.reason}."]) from error


def _table(where: str, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(where, [f"not TOML: {error}."]) from error


def _job(place: "Place", wish: Wish, name: str, beside: Path, lent: frozenset[str]) -> Ordered:
    """The job, looked for beside the sweep file first."""
    from batchml.ops.jobs import find_job

    if isinstance(wish.job, JobSpec):
        order = Order(spec=wish.job, include_secrets=wish.include_secrets, lent=lent)
        ordered = read_order(place, order)
        return _patient(ordered) if wish.job.retry == Retry() else ordered
    folder = _found(find_job, name, place.job_folders, (beside, place.here))
    order = Order(job=str(folder), include_secrets=wish.include_secrets, lent=lent)
    ordered = read_order(place, order)
    if "retry" in _table(str(folder), (folder / "job.toml").read_text("utf-8")):
        return ordered
    return _patient(ordered)


def _patient(ordered: Ordered) -> Ordered:
    """A host that is lost is no trial's fault: it is tried again, unless the job says otherwise."""
    retry = Retry(attempts=_ATTEMPTS, on=("host-lost", "image-error"))
    return Ordered(
        replace(ordered.spec, retry=retry),
        ordered.folder,
        ordered.job,
        replace(ordered.said, retry=retry),
    )


def _found(find: Any, name: str, folders: Sequence[Path], places: Sequence[Path]) -> Path:
    """As `submit` finds a job, from each place in turn; what the last one says where none has."""
    error: BatchmlError | None = None
    for here in dict.fromkeys(places):
        try:
            found: Path = find(name, folders, here)
        except NotFound as missing:
            error = missing
        else:
            return found
    assert error is not None
    raise error
