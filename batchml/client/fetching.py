"""Where a run's outputs are: folders of this machine, or the environment's bucket."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from batchml.errors import NotFound
from batchml.ops.ignore import OWN_FILE
from batchml.ops.outputs import Copied, Entry, Folder, Source, Together, Unreadable, copy
from batchml.ops.rerun import first_numbers
from batchml.ops.select import bare_id

if TYPE_CHECKING:
    from batchml.aws.s3 import Bucket
    from batchml.client.place import Place
    from batchml.model.run import Run
    from batchml.ops.search import Found

_STORE = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])/(.+)")


class Stored:
    """Outputs in a bucket, below a prefix that ends with a slash."""

    def __init__(self, bucket: "Bucket", prefix: str) -> None:
        self._bucket = bucket
        self._prefix = prefix

    def entries(self) -> Iterator[Entry]:
        for item in self._bucket.list(self._prefix):
            name = item.key.removeprefix(self._prefix)
            if name and not name.endswith("/"):  # a console makes such to show a folder
                yield Entry(name, item.size, round(item.modified * 1000) * 1_000_000)

    def fetch(self, entry: Entry, path: Path) -> None:
        if not self._bucket.download(self._prefix + entry.name, path):
            raise Unreadable("it was there a moment ago")


def outputs(place: "Place", found: "Found", dest: Path) -> Iterable[Entry | Copied]:
    """Copy the outputs of a run to `dest`; each file as it is copied, and then what was done.

    Of an array, each child's lie in a folder named by its number. A folder that is made for them
    does not travel with later runs as code. Raises NotFound where none can be had.
    """
    source = source_of(place, found)
    return copy(source, dest) if os.path.lexists(dest) else _copy_anew(source, dest)


def _copy_anew(source: Source, dest: Path) -> Iterator[Entry | Copied]:
    dest.mkdir(parents=True)
    own = dest / OWN_FILE
    own.write_text(f"# Outputs of a run: {OWN_FILE} keeps them out of the code of others.\n*\n")
    for each in copy(source, dest):
        yield each
        if each == Copied():  # nothing was left: no folder, either
            own.unlink()
            dest.rmdir()


def source_of(place: "Place", found: "Found") -> Source:
    """Where the outputs of a run are. Raises NotFound."""
    source = _here(place, found) if place.settings.is_local else _there(place, found)
    first = first_numbers(found.run, found.record)
    is_child = bare_id(found.job_id) != found.job_id
    if not first or is_child:
        return source
    return Together({str(first[0]): source}) if len(first) == 1 else Renumbered(source, first)


class Renumbered:
    """The outputs of an array whose children have other numbers for people than for AWS Batch."""

    def __init__(self, source: Source, first: Sequence[int]) -> None:
        self._source = source
        self._named = {str(index): str(number) for index, number in enumerate(first)}
        self._own = {number: index for index, number in self._named.items()}

    @property
    def left_out(self) -> list[str]:
        return [_moved(text, self._named) for text in getattr(self._source, "left_out", [])]

    def entries(self) -> Iterator[Entry]:
        for entry in self._source.entries():
            yield entry._replace(name=_moved(entry.name, self._named))

    def fetch(self, entry: Entry, path: Path) -> None:
        self._source.fetch(entry._replace(name=_moved(entry.name, self._own)), path)


def _moved(path: str, folders: Mapping[str, str]) -> str:
    folder, slash, name = path.partition("/")
    return f"{folders.get(folder, folder)}{slash}{name}"


def _here(place: "Place", found: "Found") -> Source:
    runs, job_id = place.home.runs, found.job_id
    whole, is_node, _ = job_id.partition("#")
    for name in (job_id, whole) if is_node else (job_id,):  # nodes share the whole run's
        if (runs / name / "output").is_dir():
            return Folder(runs / name / "output")
    parts = {
        _below(folder.name.removeprefix(job_id)): Folder(folder / "output")
        for folder in runs.glob(f"{job_id}[:#]*")
        if (folder / "output").is_dir()
    }
    if not parts:
        raise NotFound("Outputs of run", job_id, [], _why_none(found.run))
    return Together({name: parts[name] for name in sorted(parts, key=lambda it: (len(it), it))})


def _below(part: str) -> str:
    """The folder of what a child `:3` or a node `#1` left, below that of the whole run's outputs.

    The first node's is that of the run: it is the one that leads, and often the only one to save.
    """
    kind, number = part[:1], part[1:]
    if kind == ":":
        return number
    return f"node-{number}" if number and number != "0" else ""


def _why_none(run: "Run | None") -> str:
    if run is None or run.started_at or run.children:
        return "Its folder is gone."
    return "It never began." if run.status.is_terminal else "It has not begun yet."


def _there(place: "Place", found: "Found") -> Source:
    from batchml.aws.s3 import Bucket

    store = found.run.environment.get("BATCHML_STORE", "") if found.run else ""
    if not store and found.record and found.record.key:
        from batchml.client.known import open_known

        bucket = open_known(place).outputs().get("BucketName", "")
        store = f"s3://{bucket}/runs/{found.record.key}" if bucket else ""
    parts = _STORE.fullmatch(store)
    if parts is None:
        raise NotFound(
            "Outputs of run", found.job_id, [],
            "Its image was not built by batchml, or its environment has no bucket: nothing kept "
            "what it left in BATCHML_OUTPUT_DIR.",
        )  # fmt: skip
    below = _below(found.job_id[len(bare_id(found.job_id)) :])
    prefix = "/".join(filter(None, (parts[2], "output", below)))
    return Stored(Bucket(place.connect(), parts[1]), f"{prefix}/")
