"""Prepare a rerun: the same image and command, with the code of then or of today."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.batch.jobs import list_child_indices
from batchml.aws.diagnosis import Diagnosis
from batchml.aws.naming import make_platform
from batchml.context import Context, open_cache
from batchml.errors import NothingToRerun, UsageError
from batchml.model.group import GROUP_TAG
from batchml.model.image import parse_own_image
from batchml.model.numbering import format_ranges, original_id, original_numbers
from batchml.model.run import DATA_VARIABLE, FUNCTION_TAG, RESUMES_TAG, JobStatus, Record, Run
from batchml.runs.find import display_id, load_runs
from batchml.runs.functions.packing import read_packed
from batchml.runs.job_images import changed_image_notice, check_kept_image, kept_flavor_notice
from batchml.runs.names import bare_id
from batchml.runs.options import RunRequest
from batchml.runs.outputs import FolderOutputs
from batchml.runs.package import CommitQuery, GitCommit, describe_changed_code, unpack_code
from batchml.runs.prepare import PreparedRun, prepare
from batchml.runs.rerun.rules import (
    RerunSpec,
    groups_of,
    limit_to_children,
    make_rerun,
    record_spec,
)
from batchml.runtime.checkpoint.layout import list_checkpoints, looks_whole
from batchml.runtime.checkpoint.remote import CheckpointFiles as Saved
from batchml.runtime.checkpoint.remote import child_prefix
from batchml.runtime.checkpoint.resume import (
    VARIABLE,
    ResumeSource,
    checkpoint_folder,
    kept_folder,
    kept_prefix,
)

if TYPE_CHECKING:
    from batchml.aws.batch.requests import SubmissionRequests
    from batchml.aws.s3 import BucketStore
    from batchml.aws.session import Session
    from batchml.model.explanation import Explanation
    from batchml.model.job import Group
    from batchml.runs.search import FoundRun

# --- `rerun --resume`: find the checkpoints of a run, and tell the new run where they are ---------


_FOLDER = "BATCHML_CHECKPOINT_DIR"
_S3_URL = re.compile(r"s3://([^/]+)/(.+)")
_SHOWN = 20  # numbers of children in a message
_ASKED_SINGLY = 20  # children for whose files the bucket is asked one by one


class SavedCheckpoints(Struct, frozen=True):
    """The checkpoints of a run or a child: the step of the newest, or a number of files.

    `files` counts files that the program saved in its own way; `is_kept`: in its working folder,
    with nothing in the checkpoint folder. False if there are none.
    """

    step: int | None = None
    files: int = 0
    is_kept: bool = False

    def __bool__(self) -> bool:
        return self.step is not None or self.files > 0


def with_checkpoints(
    context: Context,
    found: "FoundRun",
    whole: "FoundRun",
    wanted: RerunSpec,
    children: Sequence[int] | None,
) -> RerunSpec:
    """The request `wanted` with the checkpoints of `found`, and a notice about them.

    `whole` is the array of the child `found`, else `found` itself; `children` are the indices of
    the children that run again, None for all. Raises UsageError for a run that cannot go on, and
    NotFound if there is no checkpoint where this machine can look.
    """
    _check_can_resume(found, wanted, children is not None)
    is_array = wanted.array is not None
    source = ResumeSource(
        job=bare_id(whole.job_id),
        name=whole.name,
        key=whole.key,
        store=_store(context, whole),
        folder=str(context.home.runs / bare_id(whole.job_id)) if context.settings.is_local else "",
        children=format_ranges(children or ()),
        is_array=is_array,
    )
    numbers: list[int | None] = [None]
    if children is not None or is_array:
        numbers = list(range(wanted.array or 0)) if children is None else list(children)
    saved = _find_checkpoints(context, source, numbers)
    first = original_numbers(whole.run, whole.record)
    who = f"{found.name} {found.shown_id}"
    if saved is None:
        words = _unverified_notice(who)
    elif not any(saved.values()):
        raise _no_checkpoint_error(context, found, who)
    else:
        words = _resume_notice(who, saved, first)
    if found.run is not None and found.run.status is JobStatus.SUCCEEDED:
        words += " It had succeeded: unless the program sees that, it does all its work again."
    spec = replace(wanted.spec, env={**wanted.spec.env, VARIABLE: source.to_json()})
    tags, notices = {RESUMES_TAG: found.job_id}, (*wanted.notices, words)
    return replace(wanted, spec=spec, own_tags=tags, notices=notices)


def _check_can_resume(found: "FoundRun", wanted: RerunSpec, some: bool) -> None:
    run = found.run
    if run is not None and not run.status.is_terminal and not (some and run.children):
        raise UsageError(
            f"--resume: {found.name} {found.shown_id} is {run.status}: it has not ended. To end it "
            f"first: batchml cancel {found.shown_id}"
        )
    if _FOLDER in wanted.spec.env:
        raise UsageError(
            f"--resume: the job sets {_FOLDER} itself, and every run of it uses that folder: "
            "rerun it without --resume, and it goes on from there."
        )


def _store(context: Context, found: "FoundRun") -> str:
    """The address of a run's folder in the bucket; "" without one."""
    if context.settings.is_local:
        return ""
    store = found.run.environment.get("BATCHML_STORE", "") if found.run else ""
    if store:
        return store

    bucket = open_cache(context).outputs().get("BucketName", "")
    return f"s3://{bucket}/runs/{found.key}" if bucket and found.key else ""


# --- Finding checkpoints --------------------------------------------------------------------------


def _find_checkpoints(
    context: Context, source: ResumeSource, numbers: Sequence[int | None]
) -> Mapping[int | None, SavedCheckpoints] | None:
    """The checkpoints of each child; None for a workspace, which this machine cannot see.

    In a bucket, one call for each 1,000 files.
    """
    if source.folder:
        return {each: _find_on_this_machine(source.folder, each) for each in numbers}
    if _has_workspace(context):
        return None
    stored = _S3_URL.fullmatch(source.store)
    if stored is None:
        return {}
    from batchml.aws.s3 import BucketStore

    top = f"{stored[2]}/{child_prefix(numbers[0] if len(numbers) == 1 else None)}"
    store = BucketStore(context.connect(), stored[1])
    found = dict(_by_child(store.keys(top), f"{stored[2]}/", numbers))
    without = [number for number, each in found.items() if not each]
    return {**found, **_find_kept_files(store, f"{stored[2]}/", without)}


def _find_kept_files(
    store: "BucketStore", above: str, numbers: Sequence[int | None]
) -> Mapping[int | None, SavedCheckpoints]:
    """Which children have kept files of their working folders.

    One call for each of a few children; for many, one call for each 1,000 outputs of all.
    """
    prefixes = {f"{above}{kept_prefix(each)}": each for each in numbers}
    if len(prefixes) <= _ASKED_SINGLY:
        having = [prefix for prefix in prefixes if store.keys(prefix, 1)]
    else:
        names = store.keys(f"{above}output/")
        folders = {"/".join([*name.removeprefix(above).split("/")[:3], ""]) for name in names}
        having = [prefix for prefix in prefixes if prefix.removeprefix(above) in folders]
    return {prefixes[prefix]: SavedCheckpoints(files=1, is_kept=True) for prefix in having}


def find_local_checkpoints(context: Context, job_id: str) -> SavedCheckpoints:
    """The checkpoints of a run on this machine, or of a child."""
    whole, _, child = job_id.partition(":")
    return _find_on_this_machine(str(context.home.runs / whole), int(child) if child else None)


def _find_on_this_machine(folder: str, child: int | None) -> SavedCheckpoints:
    """The checkpoints of a run or a child, or else the files of its working folder."""
    found = _find_in_folder(Path(checkpoint_folder(folder, child)))
    return found or replace(_find_in_folder(Path(kept_folder(folder, child))), is_kept=True)


def _find_in_folder(folder: Path) -> SavedCheckpoints:
    """The checkpoints in a folder, judged by names and sizes: the runtime checks their content."""
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
        is_kept = all(each.is_kept for each in seen.values() if each)
        what = "the files that it wrote" if is_kept else "{checkpoints} and kept files"
        words = f"What {who} has saved is there again: {what}. The program has to load them."
    without = [number for number, each in seen.items() if number is not None and not each]
    if without:
        named = [first[number] if number < len(first) else number for number in without]
        shown = format_ranges(named[:_SHOWN]) + (" ..." if len(without) > _SHOWN else "")
        words += (
            f" {len(without)} of {len(seen)} children have no checkpoint and start anew: {shown}."
        )
    return words


def _unverified_notice(who: str) -> str:
    return (
        f"It resumes from what {who} has saved in the workspace, which this machine cannot see: "
        "without a checkpoint there it ends with exit code 78 before its command."
    )


def _no_checkpoint_error(context: Context, found: "FoundRun", who: str) -> NothingToRerun:
    shown, option = display_id(context, found.job_id), context.env_option
    before = found.tags.get(RESUMES_TAG, "")
    words = (
        f"--resume: {who} has saved nothing to go on from: {{checkpoints}} has no file, and none "
        f"of its working folder was kept.{_outputs_sentence(context, found.job_id)}"
    )
    if before:
        again = f"batchml rerun --resume {display_id(context, before)}{option}"
        return NothingToRerun(f"{words} It went on from another run; to do that again: {again}")
    return NothingToRerun(f"{words} From the beginning: batchml rerun {shown}{option}")


def _outputs_sentence(context: Context, job_id: str) -> str:
    """Where the files are that the run wrote to {outputs}; "" if it wrote none on this machine."""
    if not context.settings.is_local:
        shown = display_id(context, job_id)
        return f" Its outputs, if it has any: batchml get {shown}{context.env_option}."
    folder = context.outputs(job_id)
    count = sum(1 for _ in FolderOutputs(folder).entries()) if folder is not None else 0
    if not count:
        return ""
    files = "1 file" if count == 1 else f"{count} files"
    return (
        f" Its outputs, {files}, stay in {folder}, and a later run does not find them: let the "
        "program save to {checkpoints}, or to a relative path."
    )


# --- The requests ---------------------------------------------------------------------------------


_UNCHANGED = RunRequest()


def prepare_again(
    context: Context,
    found: "FoundRun",
    *,
    failed: bool = False,
    resume: bool = False,
    code: bool = False,
    request: RunRequest = _UNCHANGED,
    dry_run: bool = False,
) -> PreparedRun | None:
    """Make the requests of the same run; nothing is sent.

    With `failed`, only the children of an array that failed run again; None if nothing failed. With
    `resume` the new run, or each child, goes on from its checkpoint. With `code` it gets the files
    that the folder of its code has now. The command, parameters, changes, tags and cost limit of
    `request` replace those of the run.

    Raises UsageError, ConfigError, and NotFound for code or checkpoints that do not exist.
    """
    if failed and found.run is None and not (found.record and found.record.array_size):
        raise UsageError(
            "--failed: AWS Batch has forgotten the run, and the history does not say whether it "
            "failed. Without --failed it runs again."
        )
    if failed and _did_not_fail(found.run):
        return None
    requested, children = found, None
    parent, _, child = found.job_id.partition(":")
    if child:
        (found,) = load_runs(context, [parent])
    groups, images = _groups_and_images(context, found)
    _check_changes(found, request, has_groups=bool(groups or images))
    wanted = make_rerun(found.run, found.record, request.params, groups, request.command or ())
    if child:
        children = [int(child)]
    elif failed and wanted.array:
        children = _failed_children(context, found)
        if not children:
            return None
    if children is not None:
        wanted = limit_to_children(wanted, children)
    if resume:
        wanted = with_checkpoints(context, requested, found, wanted, children)
    if code:
        folder = _present_folder(found, wanted)
        query = CommitQuery(Path(folder))
    elif request.include_secrets:
        raise UsageError("--include-secrets: only with --code, which sends files anew.")
    files = _function_files(context, found, wanted)
    with nullcontext(folder) if code else unpack_code(context, wanted.code) as source:
        made = _prepare(context, found, wanted, source, request, dry_run, images, code, files)
    if not code:
        return _with_notice(made, _changed_code_notice(context, found, wanted, files))
    commit = query.read()
    workers = tuple(
        replace(each, record=_at_commit(each.requests, each.record, commit))
        for each in made.workers
    )
    made = replace(made, record=_at_commit(made.requests, made.record, commit), workers=workers)
    if "image" not in request.changes:
        made = _with_notice(made, changed_image_notice(context, found.record, wanted.spec))
    is_same = made.archive is not None and made.archive.name == wanted.code.rpartition("/")[2]
    return _with_notice(made, _SAME_CODE if is_same else "")


def _check_changes(found: "FoundRun", request: RunRequest, *, has_groups: bool) -> None:
    """Raise UsageError for a command or an image that the run cannot get."""
    image = request.changes.get("image", "")
    if image and has_groups:
        raise UsageError("--image: each group of a run keeps its image. Submit the job again.")
    if image and parse_own_image(image) is not None and not (found.record and found.record.folder):
        raise UsageError(
            f"--image {image}: the history of this machine does not have the folder of the run."
        )
    if request.command and FUNCTION_TAG in found.tags:
        raise UsageError("The run calls a function, and takes no command.")


_SAME_CODE = "The code is the same as before."


def _present_folder(found: "FoundRun", wanted: RerunSpec) -> str:
    """The folder of the run's code, for `--code`. Raises UsageError if there is none."""
    if not wanted.code:
        raise UsageError("--code: the run had no code of its own; its code is in its image.")
    folder = found.record.folder if found.record else ""
    if not folder:
        raise UsageError(
            "--code: the history of this machine does not have the folder of the run's code. "
            "Submit its job: batchml submit JOB."
        )
    if not Path(folder).is_dir():
        raise UsageError(
            f"--code: {folder}, the folder of the run's code, does not exist. Without --code it "
            "runs the code of then."
        )
    return folder


def _function_files(context: Context, found: "FoundRun", wanted: RerunSpec) -> Mapping[str, bytes]:
    """The files of the function that the run calls, which are in no folder; {} for a command."""
    if FUNCTION_TAG not in found.tags:
        return {}
    with unpack_code(context, wanted.code) as code:
        return read_packed(Path(code))


def _changed_code_notice(
    context: Context, found: "FoundRun", wanted: RerunSpec, files: Mapping[str, bytes]
) -> str:
    """A notice that the run gets older files than the folder of its code has now, else ""."""
    folder = found.record.folder if found.record else ""
    name = wanted.code.rpartition("/")[2]
    changed = describe_changed_code(context, folder, name, found.created_at / 1000, files)
    return f"It runs {changed}" if changed else ""


def _with_notice(made: PreparedRun, notice: str) -> PreparedRun:
    return replace(made, notices=(*made.notices, notice)) if notice else made


def _at_commit(requests: "SubmissionRequests", record: Record, commit: GitCommit) -> Record:
    """The record with the commit of the present code; the tags of its request likewise."""
    tags = {**record.tags, "batchml:commit": commit.id}
    if not commit.id:
        del tags["batchml:commit"]
    requests.submit["tags"] = tags
    return replace(record, commit=commit.id, dirty=commit.is_dirty, tags=tags)


def _groups_and_images(
    context: Context, found: "FoundRun"
) -> "tuple[tuple[Group, ...], dict[str, str]]":
    """The groups of a group run, if the history does not have them, and the image of each group."""
    from batchml.runs.groups.members import find_worker_groups

    record, run = found.record, found.run
    if record is not None and record.spec:
        workers = context.history.newest_first(context.env) if record.groups else []
        return (), {
            each.tags.get(GROUP_TAG, ""): each.image for each in workers if each.gang == record.key
        }
    described = find_worker_groups(context, found)
    members = {each.group: each.found.run for each in described if each.found}
    known = {group: each for group, each in members.items() if each is not None}
    groups = groups_of(run, known) if run is not None else ()
    return groups, {group: each.image for group, each in known.items()}


def _data_notice(context: Context, found: "FoundRun") -> list[str]:
    """A message if this shell names another folder of data sets than that of the run."""
    own, then = context.settings.data_dir, found.data_dir
    if own is None or not then or own.value == then:
        return []
    return [f"{DATA_VARIABLE} is {then}, as then, and not {own.value} of this shell."]


def _prepare(
    context: Context,
    found: "FoundRun",
    wanted: RerunSpec,
    code: str,
    changes: RunRequest,
    dry_run: bool,
    images: Mapping[str, str],
    is_new: bool,
    files: Mapping[str, bytes],
) -> PreparedRun:
    """The requests with the code in the folder `code`, which was not sent before if `is_new`, and
    with `files` besides.
    """
    spec = wanted.spec
    request = RunRequest(
        # As a command of the command line, since its braces may belong to the shell.
        spec=replace(spec, command=("-",), code=code or False),
        command=spec.command,
        params=changes.params,
        changes=changes.changes,
        folder=found.record.folder if found.record and "image" in changes.changes else "",
        tags={**wanted.tags, **changes.tags},
        own_tags=wanted.own_tags,
        files=dict(files),
        share=wanted.share,
        array=wanted.array,
        max_cost=wanted.max_cost if changes.max_cost is None else changes.max_cost,
        auto_resume=changes.auto_resume,
        # For code that was sent before, the user has agreed.
        include_secrets=changes.include_secrets or not is_new,
    )
    before = found.record.queue if found.record else found.run.queue if found.run else ""
    queue = str(changes.changes.get("queue") or before)
    if "image" not in changes.changes:
        check_kept_image(context, spec.image, before, queue)
    made = prepare(context, request, dry_run=dry_run, images=images)
    if wanted.own_tags and not made.store.is_read:
        raise UsageError(
            f"--resume: {wanted.spec.image} is not an image that batchml built: nothing in it "
            "would fetch the checkpoints."
        )
    workers = [
        replace(each, record=_as_before(each.requests, each.record, found)) for each in made.workers
    ]
    flavor = kept_flavor_notice(context, found.record, made.record.gpus)
    notices = (
        *wanted.notices, *filter(None, [flavor]), *_data_notice(context, found),
        *_children_notices(wanted), *made.notices,
    )  # fmt: skip
    first = _as_before(made.requests, made.record, found)
    kept = replace(first, spec=record_spec(made.spec, found.record),
                   other=first.other or bool(changes.command))  # fmt: skip
    return replace(made, record=kept, workers=tuple(workers), notices=notices)


def _as_before(requests: "SubmissionRequests", new: Record, found: "FoundRun") -> Record:
    """The record with the job and the commit of the first run; the tags of its request likewise."""
    record = found.record
    tags = {**requests.submit.get("tags", {})}
    tags.pop("batchml:commit", None)  # the commit of the current folder
    kept = {name: found.tags.get(name, "") for name in ("batchml:job", FUNCTION_TAG)}
    ours = {"batchml:commit": found.commit, **kept}
    tags |= {name: value for name, value in ours.items() if value}
    requests.submit["tags"] = tags
    return replace(
        new,
        job=record.job if record else "",
        folder=record.folder if record else "",
        commit=found.commit,
        dirty=record.dirty if record else None,
        other=record.other if record else new.other,
        tags=tags,
    )


def _did_not_fail(run: Run | None) -> bool:
    """True for a single run, or a child, that did not fail."""
    return run is not None and not run.children and run.status is not JobStatus.FAILED


def _children_notices(wanted: RerunSpec) -> Iterator[str]:
    if wanted.children:
        count = len(wanted.children)
        which = format_ranges(wanted.children[:200]) + (" ..." if count > 200 else "")
        what, new = ("Children", f"an array of {count}") if count > 1 else ("Child", "a single run")
        yield (
            f"{what} {which} of {wanted.size}, as {new}: each keeps its AWS_BATCH_JOB_ARRAY_INDEX."
        )


def _failed_children(context: Context, found: "FoundRun") -> list[int]:
    known = list_child_indices(context.connect(), found.job_id, JobStatus.FAILED)
    if not known and (found.run is None or found.run.children.get("FAILED")):
        raise NothingToRerun(
            f"--failed: AWS Batch has forgotten which children of {found.job_id} failed. To run "
            "all again: leave out --failed."
        )
    return known


# --- Explanations of partial reruns ---------------------------------------------------------------


_QUOTED = "\0"  # in an id that a line of a log has


class RenumberedDiagnosis(Diagnosis):
    """A Diagnosis with the first array's numbers for the children of `whole`; ids stay AWS's."""

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

    def last_lines(self, group: str, stream: str) -> tuple[str, ...] | None:
        """The lines; `named` leaves the ids in them, which have the first array's numbers."""
        lines = super().last_lines(group, stream)
        if not (lines and self._first):
            return lines
        return tuple(line.replace(f"{self._whole}:", f"{self._whole}{_QUOTED}:") for line in lines)

    def named(self, found: "Explanation") -> "Explanation":
        """The explanation with ids of children as users type them: `batchml logs ID:4`."""
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
        # Without the size: "child 4 of 2" would fit neither array.
        return re.sub(r"^(child \d+) of \d+(?=$| stands)", r"\1", text).replace(_QUOTED, "")

    def _numbered(self, run: Run) -> Run:
        index = run.array_index
        if bare_id(run.job_id) != self._whole or index is None or index >= len(self._first):
            return run
        return replace(run, array_index=self._first[index])
