"""Work out the requests of a rerun: the same code, image and command."""

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from batchml.aws.batch.jobs import list_child_indices
from batchml.aws.diagnosis import Diagnosis
from batchml.errors import NotFound, UsageError
from batchml.model.group import GROUP_TAG
from batchml.model.run import JobStatus
from batchml.runs.find import recall
from batchml.runs.names import bare_id
from batchml.runs.options import RunRequest
from batchml.runs.prepare import PreparedRun, prepare
from batchml.runs.rerun.resume import resuming
from batchml.runs.rerun.rules import (
    RerunSpec,
    again,
    first_id,
    first_numbers,
    groups_of,
    only,
    ranges,
    remembered,
)
from batchml.runtime.entry.fetch import BadArchive, unpack

if TYPE_CHECKING:
    from batchml.aws.batch.requests import SubmissionRequests
    from batchml.aws.session import Session
    from batchml.context import Context
    from batchml.model.explanation import Explanation
    from batchml.model.job import Group
    from batchml.model.record import Record
    from batchml.model.run import Run
    from batchml.runs.search import FoundRun

_UNCHANGED = RunRequest()
_S3 = re.compile(r"s3://([^/]+)/(.+)")


def prepare_again(
    context: "Context",
    found: "FoundRun",
    *,
    failed: bool = False,
    resume: bool = False,
    request: RunRequest = _UNCHANGED,
    dry_run: bool = False,
) -> PreparedRun | None:
    """Work out the requests of the same run; nothing is sent.

    With `failed`, only the children of an array that failed; None if nothing failed. With `resume`
    the new run, or each child, goes on from its checkpoint. Parameters, changes, tags and the
    budget of `request` replace the run's.

    Raises UsageError, ConfigError, and NotFound for code or checkpoints that do not exist.
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
        (found,) = recall(context, [parent])
    groups, images = _gang(context, found)
    wanted = again(found.run, found.record, bool(request.params), groups)
    if child:
        children = [int(child)]
    elif failed and wanted.array:
        children = _failed(context, found)
        if not children:
            return None
    if children is not None:
        wanted = only(wanted, children)
    if resume:
        wanted = resuming(context, asked_for, found, wanted, children)
    with unpacked(context, wanted.code) as code:
        return _prepared(context, found, wanted, code, request, dry_run, images)


def _gang(context: "Context", found: "FoundRun") -> "tuple[tuple[Group, ...], dict[str, str]]":
    """The groups of a group run that are not in the history, and the image of each group."""
    from batchml.runs.groups.members import parts_of

    record, run = found.record, found.run
    if record is not None and record.spec:
        workers = context.history.newest_first(context.env) if record.groups else []
        return (), {
            each.tags.get(GROUP_TAG, ""): each.image for each in workers if each.gang == record.key
        }
    told = {each.group: each.found.run for each in parts_of(context, found) if each.found}
    known = {group: each for group, each in told.items() if each is not None}
    groups = groups_of(run, known) if run is not None else ()
    return groups, {group: each.image for group, each in known.items()}


def _prepared(
    context: "Context",
    found: "FoundRun",
    wanted: RerunSpec,
    code: str,
    asked: RunRequest,
    dry_run: bool,
    images: Mapping[str, str],
) -> PreparedRun:
    spec, record = wanted.spec, found.record
    order = RunRequest(
        # Like a command of the command line: braces may be the shell's.
        spec=replace(spec, command=("-",), code=code or False),
        command=spec.command,
        params=asked.params,
        changes=asked.changes,
        tags={**wanted.tags, **asked.tags},
        own_tags=wanted.own_tags,
        share=wanted.share,
        array=wanted.array,
        max_cost=wanted.max_cost if asked.max_cost is None else asked.max_cost,
        include_secrets=True,  # the user has agreed to it once
    )
    made = prepare(context, order, dry_run=dry_run, images=images)
    if wanted.own_tags and not made.store.is_read:
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


def _as_before(requests: "SubmissionRequests", new: "Record", found: "FoundRun") -> "Record":
    """The record, and the tags of its request, with the job and the commit of the first run."""
    record = found.record
    tags = {**requests.submit.get("tags", {})}
    tags.pop("batchml:commit", None)  # the commit of the current folder
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


def _said(wanted: RerunSpec) -> Iterator[str]:
    if wanted.children:
        count = len(wanted.children)
        which = ranges(wanted.children[:200]) + (" ..." if count > 200 else "")
        what, new = ("Children", f"an array of {count}") if count > 1 else ("Child", "a single run")
        yield (
            f"{what} {which} of {wanted.size}, as {new}: AWS_BATCH_JOB_ARRAY_INDEX is what it was "
            "for each."
        )


def _failed(context: "Context", found: "FoundRun") -> list[int]:

    known = list_child_indices(context.connect(), found.job_id, JobStatus.FAILED)
    if not known and (found.run is None or found.run.children.get("FAILED")):
        raise NotFound(
            "Children of", found.job_id, [],
            "AWS Batch has forgotten which of them failed: rerun without --failed runs all again.",
        )  # fmt: skip
    return known


@contextmanager
def unpacked(context: "Context", address: str) -> Iterator[str]:
    """A temporary folder with the code of a run; an empty string for none.

    Raises NotFound for code that was deleted.
    """
    if not address:
        yield ""
        return

    with tempfile.TemporaryDirectory(prefix="batchml-again-") as folder:
        code = Path(folder) / "code"
        code.mkdir()
        try:
            unpack(str(_archive(context, address, Path(folder))), str(code))
        except (BadArchive, FileNotFoundError) as error:
            hint = f"Submit its job again: batchml submit JOB. ({error})"
            raise NotFound("Code of the run", address, [], hint) from error
        yield str(code)


def _archive(context: "Context", where: str, folder: Path) -> Path:
    stored = _S3.fullmatch(where)
    if stored is None:
        return context.home.code / Path(where).name  # the state folder may have been moved since
    from batchml.aws.s3 import BucketStore

    path = folder / "archive"
    BucketStore(context.connect(), stored[1]).get_file(
        stored[2], str(path)
    )  # none: told by who reads it
    return path


# --- Partial reruns of an array, explained by the first numbers of the children -------------------


class RenumberedDiagnosis(Diagnosis):
    """A Diagnosis that names children of `whole` by their first numbers; ids are those of AWS."""

    def __init__(self, session: "Session", whole: str, record: "Record | None") -> None:
        super().__init__(session)
        self._whole = whole
        self._first = first_numbers(None, record)

    def runs(self, job_ids: Sequence[str]) -> "tuple[Run, ...]":
        found = super().runs(job_ids)
        for run in found:
            if bare_id(run.job_id) == self._whole:
                self._first = self._first or first_numbers(run, None)
        return tuple(map(self._numbered, found))

    def children(self, array: "Run", status: str) -> "tuple[Run, ...]":
        return tuple(map(self._numbered, super().children(array, status)))

    def named(self, found: "Explanation") -> "Explanation":
        """The run with ids of children as people type them: `batchml logs ID:4`."""
        if not self._first:
            return found
        return replace(
            found,
            verdict=self._named(found.verdict),
            evidence=tuple(map(self._named, found.evidence)),
            fix=self._named(found.fix),
            command=self._named(found.command),
        )

    def _named(self, text: str) -> str:
        text = re.sub(
            rf"{re.escape(self._whole)}:\d+", lambda it: first_id(it[0], self._first), text
        )
        # "child 4 of 2" would be one of neither array
        return re.sub(r"^(child \d+) of \d+(?=$| stands)", r"\1", text)

    def _numbered(self, run: "Run") -> "Run":
        index = run.array_index
        if bare_id(run.job_id) != self._whole or index is None or index >= len(self._first):
            return run
        return replace(run, array_index=self._first[index])
