"""Work out the requests of a rerun: the same code, image and command."""

import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch.jobs import list_child_indices
from batchml.aws.diagnosis import Diagnosis
from batchml.aws.naming import make_platform
from batchml.context import Context, open_cache
from batchml.errors import NotFound, UsageError
from batchml.model.group import GROUP_TAG
from batchml.model.run import RESUMES_TAG, JobStatus, Record, Run
from batchml.runs.find import load_runs
from batchml.runs.names import bare_id
from batchml.runs.options import RunRequest
from batchml.runs.prepare import PreparedRun, prepare
from batchml.runs.rerun.rules import (
    RerunSpec,
    display_id,
    format_ranges,
    groups_of,
    limit_to_children,
    make_rerun,
    original_id,
    original_numbers,
    record_spec,
)
from batchml.runtime.checkpoint.layout import list_checkpoints, looks_whole
from batchml.runtime.checkpoint.remote import CheckpointFiles as Saved
from batchml.runtime.checkpoint.remote import child_prefix
from batchml.runtime.checkpoint.resume import VARIABLE, ResumeSource, checkpoint_folder
from batchml.runtime.entry.fetch import BadArchive, unpack

if TYPE_CHECKING:
    from batchml.aws.batch.requests import SubmissionRequests
    from batchml.aws.session import Session
    from batchml.model.explanation import Explanation
    from batchml.model.job import Group
    from batchml.runs.search import FoundRun

# --- resume ---------------------------------------------------------------------------------------
# `rerun --resume`: find the checkpoints of a run, and pass their place to the new run.


_FOLDER = "BATCHML_CHECKPOINT_DIR"
_STORE = re.compile(r"s3://([^/]+)/(.+)")
_SHOWN = 20  # numbers of children


class SavedCheckpoints(Struct, frozen=True):
    """The checkpoints that a run, or a child, has saved; none where both fields have their
    defaults.
    """

    step: int | None = None
    files: int = 0  # of a program that saves files in its own way

    def __bool__(self) -> bool:
        return self.step is not None or self.files > 0


def with_checkpoints(
    context: Context,
    found: "FoundRun",
    whole: "FoundRun",
    wanted: RerunSpec,
    children: Sequence[int] | None,
) -> RerunSpec:
    """The request `wanted`, going on from the checkpoints of `found`, with a notice that names
    them.

    `whole` is the array that `found` is a child of, else the same; `children` are the indices of
    those that run again, None for all. Raises UsageError for a run that cannot go on, and NotFound
    if no checkpoint is found where this machine can look.
    """
    _check_can_resume(found, wanted, children is not None)
    is_array = wanted.array is not None
    told = ResumeSource(
        job=bare_id(whole.job_id),
        name=whole.name,
        key=_key(whole),
        store=_store(context, whole),
        folder=str(context.home.runs / bare_id(whole.job_id)) if context.settings.is_local else "",
        children=format_ranges(children or ()),
        is_array=is_array,
    )
    numbers: list[int | None] = [None]
    if children is not None or is_array:
        numbers = list(range(wanted.array or 0)) if children is None else list(children)
    seen = _find_checkpoints(context, told, numbers)
    first = original_numbers(whole.run, whole.record)
    who = f"{found.name} {original_id(found.job_id, first)}"
    if seen is None:
        words = _unverified_notice(who)
    elif not any(seen.values()):
        raise _no_checkpoint_error(context, found, who)
    else:
        words = _resume_notice(who, seen, first)
    spec = replace(wanted.spec, env={**wanted.spec.env, VARIABLE: told.to_json()})
    return replace(
        wanted,
        spec=spec,
        own_tags={RESUMES_TAG: found.job_id},
        notices=(*wanted.notices, words),
    )


def _check_can_resume(found: "FoundRun", wanted: RerunSpec, some: bool) -> None:
    run = found.run
    if run is not None and not run.status.is_terminal and not (some and run.children):
        raise UsageError(
            f"--resume: {found.name} {found.job_id} is {run.status}: it goes on by itself. To end "
            f"it first: batchml cancel {found.job_id}"
        )
    if _FOLDER in wanted.spec.env:
        raise UsageError(
            f"--resume: the job names a {_FOLDER} of its own, which every run of it finds: rerun "
            "it without --resume, and it goes on there."
        )


def _key(found: "FoundRun") -> str:
    known = found.run.key if found.run else ""
    return known or (found.record.key if found.record else "")


def _store(context: Context, found: "FoundRun") -> str:
    """The bucket folder of a run in AWS; empty where it has none."""
    if context.settings.is_local:
        return ""
    told = found.run.environment.get("BATCHML_STORE", "") if found.run else ""
    if told:
        return told

    bucket = open_cache(context).outputs().get("BucketName", "")
    return f"s3://{bucket}/runs/{_key(found)}" if bucket and _key(found) else ""


# --- Finding checkpoints --------------------------------------------------------------------------


def _find_checkpoints(
    context: Context, told: ResumeSource, numbers: Sequence[int | None]
) -> Mapping[int | None, SavedCheckpoints] | None:
    """The checkpoints of each child; None where this machine cannot look.

    In AWS one call for each 1,000 files.
    """
    if told.folder:
        return {
            each: _find_in_folder(Path(checkpoint_folder(told.folder, each))) for each in numbers
        }
    if _has_workspace(context):
        return None
    stored = _STORE.fullmatch(told.store)
    if stored is None:
        return {}
    from batchml.aws.s3 import BucketStore

    top = f"{stored[2]}/{child_prefix(numbers[0] if len(numbers) == 1 else None)}"
    names = BucketStore(context.connect(), stored[1]).keys(top)
    return dict(_by_child(names, f"{stored[2]}/", numbers))


def find_local_checkpoints(context: Context, job_id: str) -> SavedCheckpoints:
    """The checkpoints of a run of this machine, or of a child."""
    whole, _, child = job_id.partition(":")
    return _find_in_folder(
        Path(checkpoint_folder(str(context.home.runs / whole), int(child) if child else None))
    )


def _find_in_folder(folder: Path) -> SavedCheckpoints:
    """The checkpoints of a folder, by names and sizes: the runtime checks them before the command
    starts.
    """
    found = list_checkpoints(str(folder))
    whole = (each.step for each in found if looks_whole(str(folder / each.name), each.step))
    step = next(whole, None)
    if step is not None:
        return SavedCheckpoints(step)
    files = (path for path in folder.rglob("*") if path.is_file())
    return SavedCheckpoints(
        files=sum(not _is_ours(str(path.relative_to(folder))) for path in files)
    )


def _by_child(
    names: Iterable[str], above: str, numbers: Sequence[int | None]
) -> Iterator[tuple[int | None, SavedCheckpoints]]:
    below: dict[str, list[str]] = {}
    prefixes = {child_prefix(each): each for each in numbers}
    for name in names:
        key = name.removeprefix(above)
        parts = key.split("/")
        for prefix in ("checkpoints/", "/".join([*parts[:2], ""])):
            if prefix in prefixes:
                below.setdefault(prefix, []).append(key.removeprefix(prefix))
    for prefix, number in prefixes.items():
        saved = Saved.among(below.get(prefix, ()))
        whole = saved.with_manifest()
        others = [name for name in saved.others if not _is_ours(name)]
        yield (
            number,
            SavedCheckpoints(whole[0].step) if whole else SavedCheckpoints(files=len(others)),
        )


def _is_ours(name: str) -> bool:
    return name.startswith((".batchml", ".saving-", ".removing-"))


def _has_workspace(context: Context) -> bool:

    outputs = open_cache(context).outputs()
    return bool(make_platform(context.env, context.settings.environment, outputs).workspace)


# --- Messages -------------------------------------------------------------------------------------


def _resume_notice(
    who: str, seen: Mapping[int | None, SavedCheckpoints], first: Sequence[int]
) -> str:
    steps = sorted({each.step for each in seen.values() if each.step is not None})
    if steps:
        last = f" to {steps[-1]}" if len(steps) > 1 else ""
        words = f"It resumes from step{'s' if last else ''} {steps[0]}{last} of {who}."
    else:
        words = f"It resumes from what {who} has saved."
    without = [number for number, each in seen.items() if number is not None and not each]
    if without:
        named = [first[number] if number < len(first) else number for number in without]
        shown = format_ranges(named[:_SHOWN]) + (" ..." if len(without) > _SHOWN else "")
        words += f" {len(without)} of {len(seen)} children saved nothing and begin anew: {shown}."
    return words


def _unverified_notice(who: str) -> str:
    return (
        f"It resumes from what {who} has saved in the workspace, which is not seen from here: "
        "without a checkpoint there it ends with 78 before its command."
    )


def _no_checkpoint_error(context: Context, found: "FoundRun", who: str) -> NotFound:

    before = found.tags.get(RESUMES_TAG, "")
    hint = (
        f"From the beginning: batchml rerun {display_id(context, found.job_id)}{context.env_option}"
    )
    if before:
        again = f"batchml rerun --resume {display_id(context, before)}{context.env_option}"
        hint = f"It was to go on from another: {again}"
    return NotFound("Checkpoints of run", who, [], hint)


# --- resubmit -------------------------------------------------------------------------------------


_UNCHANGED = RunRequest()
_S3 = re.compile(r"s3://([^/]+)/(.+)")


def prepare_again(
    context: Context,
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
    if failed and _did_not_fail(found.run):
        return None
    asked_for, children = found, None
    parent, _, child = found.job_id.partition(":")
    if child:
        (found,) = load_runs(context, [parent])
    groups, images = _groups_and_images(context, found)
    wanted = make_rerun(found.run, found.record, bool(request.params), groups)
    if child:
        children = [int(child)]
    elif failed and wanted.array:
        children = _failed_children(context, found)
        if not children:
            return None
    if children is not None:
        wanted = limit_to_children(wanted, children)
    if resume:
        wanted = with_checkpoints(context, asked_for, found, wanted, children)
    with unpack_code(context, wanted.code) as code:
        return _prepare(context, found, wanted, code, request, dry_run, images)


def _groups_and_images(
    context: Context, found: "FoundRun"
) -> "tuple[tuple[Group, ...], dict[str, str]]":
    """The groups of a group run that are not in the history, and the image of each group."""
    from batchml.runs.groups.members import find_members

    record, run = found.record, found.run
    if record is not None and record.spec:
        workers = context.history.newest_first(context.env) if record.groups else []
        return (), {
            each.tags.get(GROUP_TAG, ""): each.image for each in workers if each.gang == record.key
        }
    told = {each.group: each.found.run for each in find_members(context, found) if each.found}
    known = {group: each for group, each in told.items() if each is not None}
    groups = groups_of(run, known) if run is not None else ()
    return groups, {group: each.image for group, each in known.items()}


def _prepare(
    context: Context,
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
        _as_before(made.requests, made.record, found), spec=record_spec(made.spec, record)
    )
    workers = [
        replace(each, record=_as_before(each.requests, each.record, found)) for each in made.workers
    ]
    notices = (*wanted.notices, *_children_notices(wanted), *made.notices)
    kept = replace(kept, spec=record_spec(made.spec, record))
    return replace(made, record=kept, workers=tuple(workers), notices=notices)


def _as_before(requests: "SubmissionRequests", new: Record, found: "FoundRun") -> Record:
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


def _did_not_fail(run: Run | None) -> bool:
    """True for a single run, or child, that did not fail."""
    return run is not None and not run.children and run.status is not JobStatus.FAILED


def _children_notices(wanted: RerunSpec) -> Iterator[str]:
    if wanted.children:
        count = len(wanted.children)
        which = format_ranges(wanted.children[:200]) + (" ..." if count > 200 else "")
        what, new = ("Children", f"an array of {count}") if count > 1 else ("Child", "a single run")
        yield (
            f"{what} {which} of {wanted.size}, as {new}: AWS_BATCH_JOB_ARRAY_INDEX is what it was "
            "for each."
        )


def _failed_children(context: Context, found: "FoundRun") -> list[int]:

    known = list_child_indices(context.connect(), found.job_id, JobStatus.FAILED)
    if not known and (found.run is None or found.run.children.get("FAILED")):
        raise NotFound(
            "Children of", found.job_id, [],
            "AWS Batch has forgotten which of them failed: rerun without --failed runs all again.",
        )  # fmt: skip
    return known


@contextmanager
def unpack_code(context: Context, address: str) -> Iterator[str]:
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


def _archive(context: Context, where: str, folder: Path) -> Path:
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

    def __init__(self, session: "Session", whole: str, record: Record | None) -> None:
        super().__init__(session)
        self._whole = whole
        self._first = original_numbers(None, record)

    def runs(self, job_ids: Sequence[str]) -> tuple[Run, ...]:
        found = super().runs(job_ids)
        for run in found:
            if bare_id(run.job_id) == self._whole:
                self._first = self._first or original_numbers(run, None)
        return tuple(map(self._numbered, found))

    def children(self, array: Run, status: str) -> tuple[Run, ...]:
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
            rf"{re.escape(self._whole)}:\d+", lambda it: original_id(it[0], self._first), text
        )
        # "child 4 of 2" would be one of neither array
        return re.sub(r"^(child \d+) of \d+(?=$| stands)", r"\1", text)

    def _numbered(self, run: Run) -> Run:
        index = run.array_index
        if bare_id(run.job_id) != self._whole or index is None or index >= len(self._first):
            return run
        return replace(run, array_index=self._first[index])
