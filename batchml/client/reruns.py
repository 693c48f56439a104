"""Submit a run again: the same code, image and command."""

import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from batchml.client.finding import recall
from batchml.client.order import Order
from batchml.client.submission import Prepared, prepare
from batchml.errors import NotFound, UsageError
from batchml.model.run import JobStatus
from batchml.ops.rerun import Again, again, only, ranges, remembered

if TYPE_CHECKING:
    from batchml.aws.batch.requests import Submission
    from batchml.client.place import Place
    from batchml.model.job import Group
    from batchml.model.record import Record
    from batchml.model.run import Run
    from batchml.ops.search import Found

_S3 = re.compile(r"s3://([^/]+)/(.+)")


def prepare_again(
    place: "Place",
    found: "Found",
    *,
    failed: bool = False,
    resume: bool = False,
    params: Mapping[str, str] | None = None,
    more: Order | None = None,
    dry_run: bool = False,
) -> Prepared | None:
    """Work out the same run again; nothing is sent. None when only failures are wanted and there
    are none.

    With `failed`, of an array only the children that failed; with `resume` it goes on from what the
    run, or each child, has saved. `params` replace the run's; so do the changes, the tags and the
    budget of `more`.
    Raises UsageError, ConfigError, and NotFound for code that is gone, or where nothing was saved.
    """
    if failed and found.run is None and not (found.record and found.record.array_size):
        raise UsageError(
            "--failed: AWS Batch has forgotten the run, and nobody here saw whether it failed. "
            "Without --failed it runs again."
        )
    if failed and _is_whole(found.run):
        return None
    asked_for, children = found, None
    parent, _, child = found.job_id.partition(":")
    if child:
        (found,) = recall(place, [parent])
    groups, images = _gang(place, found)
    wanted = again(found.run, found.record, bool(params), groups)
    if child:
        children = [int(child)]
    elif failed and wanted.array:
        children = _failed(place, found)
        if not children:
            return None
    if children is not None:
        wanted = only(wanted, children)
    if resume:
        from batchml.client.resuming import resuming

        wanted = resuming(place, asked_for, found, wanted, children)
    with unpacked(place, wanted.code) as code:
        asked = replace(more or Order(), params=dict(params or {}))
        return _prepared(place, found, wanted, code, asked, dry_run, images)


def _gang(place: "Place", found: "Found") -> "tuple[tuple[Group, ...], dict[str, str]]":
    """Of a gang: its groups, where the history does not have them, and the image of each."""
    from batchml.client.gang_parts import parts_of
    from batchml.model.group import GROUP_TAG
    from batchml.ops.rerun_nodes import groups_of

    record, run = found.record, found.run
    if record is not None and record.spec:
        workers = place.history.newest_first(place.env) if record.groups else []
        return (), {
            each.tags.get(GROUP_TAG, ""): each.image for each in workers if each.gang == record.key
        }
    told = {each.group: each.found.run for each in parts_of(place, found) if each.found}
    known = {group: each for group, each in told.items() if each is not None}
    groups = groups_of(run, known) if run is not None else ()
    return groups, {group: each.image for group, each in known.items()}


def _prepared(
    place: "Place",
    found: "Found",
    wanted: Again,
    code: str,
    asked: Order,
    dry_run: bool,
    images: Mapping[str, str],
) -> Prepared:
    spec, record = wanted.spec, found.record
    order = Order(
        # As a command of the command line: what looks like a placeholder may be the shell's.
        spec=replace(spec, command=("-",), code=code or False),
        command=spec.command,
        params=asked.params,
        changes=asked.changes,
        tags={**wanted.tags, **asked.tags},
        own_tags=wanted.own_tags,
        share=wanted.share,
        array=wanted.array,
        max_cost=wanted.max_cost if asked.max_cost is None else asked.max_cost,
        include_secrets=True,  # what was sent once, on purpose
    )
    made = prepare(place, order, dry_run=dry_run, images=images)
    if wanted.own_tags and not made.depot.is_read:
        raise UsageError(
            f"--resume: {wanted.spec.image} is not an image that batchml built: nothing in it "
            "would bring the checkpoints."
        )
    kept = replace(
        _as_before(made.requests, made.record, found), spec=remembered(made.spec, record)
    )
    workers = [
        replace(each, record=_as_before(each.requests, each.record, found)) for each in made.workers
    ]
    notices = (*wanted.notices, *_said(wanted), *made.notices)
    kept = replace(kept, spec=remembered(made.spec, record))
    return replace(made, record=kept, workers=tuple(workers), notices=notices)


def _as_before(requests: "Submission", new: "Record", found: "Found") -> "Record":
    """A record, and the tags of its request, with the job and the commit of the run before."""
    record = found.record
    tags = {**requests.submit.get("tags", {})}
    tags.pop("batchml:commit", None)  # of the folder that we are in
    ours = {"batchml:commit": found.commit, "batchml:job": found.tags.get("batchml:job", "")}
    tags |= {name: value for name, value in ours.items() if value}
    requests.submit["tags"] = tags
    return replace(
        new,
        job=record.job if record else "",
        folder=record.folder if record else "",
        commit=found.commit,
        dirty=record.dirty if record else None,
        tags=tags,
    )


def _is_whole(run: "Run | None") -> bool:
    """True for a single run, or child, that did not fail."""
    return run is not None and not run.children and run.status is not JobStatus.FAILED


def _said(wanted: Again) -> Iterator[str]:
    if wanted.children:
        count = len(wanted.children)
        which = ranges(wanted.children[:200]) + (" ..." if count > 200 else "")
        what, new = ("Children", f"an array of {count}") if count > 1 else ("Child", "a single run")
        yield (
            f"{what} {which} of {wanted.size}, as {new}: AWS_BATCH_JOB_ARRAY_INDEX is what it was "
            "for each."
        )


def _failed(place: "Place", found: "Found") -> list[int]:
    from batchml.aws.batch.jobs import indices

    known = indices(place.connect(), found.job_id, JobStatus.FAILED)
    if not known and (found.run is None or found.run.children.get("FAILED")):
        raise NotFound(
            "Children of", found.job_id, [],
            "AWS Batch has forgotten which of them failed: rerun without --failed runs all again.",
        )  # fmt: skip
    return known


@contextmanager
def unpacked(place: "Place", address: str) -> Iterator[str]:
    """A folder with the code that a run had; empty for none. It is gone afterwards.

    Raises NotFound for code that is not kept any more.
    """
    if not address:
        yield ""
        return
    from batchml.runtime.entry.fetch import BadArchive, unpack

    with tempfile.TemporaryDirectory(prefix="batchml-again-") as folder:
        code = Path(folder) / "code"
        code.mkdir()
        try:
            unpack(str(_archive(place, address, Path(folder))), str(code))
        except (BadArchive, FileNotFoundError) as error:
            hint = f"Submit its job again: batchml submit JOB. ({error})"
            raise NotFound("Code of the run", address, [], hint) from error
        yield str(code)


def _archive(place: "Place", where: str, folder: Path) -> Path:
    stored = _S3.fullmatch(where)
    if stored is None:
        return place.home.code / Path(where).name  # the state folder may have been moved since
    from batchml.aws.s3 import Bucket

    path = folder / "archive"
    Bucket(place.connect(), stored[1]).download(stored[2], path)  # none: told by who reads it
    return path
