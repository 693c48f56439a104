"""`rerun --resume`: find the checkpoints of a run, and pass their place to the new run."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from batchml.aws.naming import make_platform
from batchml.context import open_cache
from batchml.errors import NotFound, UsageError
from batchml.model.record import RESUMES_TAG
from batchml.runs.names import bare_id
from batchml.runs.rerun.numbering import typed
from batchml.runs.rerun.rules import RerunSpec, first_id, first_numbers, ranges
from batchml.runtime.checkpoint.layout import list_checkpoints, looks_whole
from batchml.runtime.checkpoint.remote import CheckpointFiles as Saved
from batchml.runtime.checkpoint.remote import child_prefix
from batchml.runtime.checkpoint.resume import VARIABLE, ResumeSource, checkpoint_folder

if TYPE_CHECKING:
    from batchml.context import Context
    from batchml.runs.search import FoundRun

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


def resuming(
    context: "Context",
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
    _check(found, wanted, children is not None)
    is_array = wanted.array is not None
    told = ResumeSource(
        job=bare_id(whole.job_id),
        name=whole.name,
        key=_key(whole),
        store=_store(context, whole),
        folder=str(context.home.runs / bare_id(whole.job_id)) if context.settings.is_local else "",
        children=ranges(children or ()),
        is_array=is_array,
    )
    numbers: list[int | None] = [None]
    if children is not None or is_array:
        numbers = list(range(wanted.array or 0)) if children is None else list(children)
    seen = _look(context, told, numbers)
    first = first_numbers(whole.run, whole.record)
    who = f"{found.name} {first_id(found.job_id, first)}"
    if seen is None:
        words = _unseen(who)
    elif not any(seen.values()):
        raise _nothing(context, found, who)
    else:
        words = _seen(who, seen, first)
    spec = replace(wanted.spec, env={**wanted.spec.env, VARIABLE: told.to_json()})
    return replace(
        wanted,
        spec=spec,
        own_tags={RESUMES_TAG: found.job_id},
        notices=(*wanted.notices, words),
    )


def _check(found: "FoundRun", wanted: RerunSpec, some: bool) -> None:
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


def _store(context: "Context", found: "FoundRun") -> str:
    """The bucket folder of a run in AWS; empty where it has none."""
    if context.settings.is_local:
        return ""
    told = found.run.environment.get("BATCHML_STORE", "") if found.run else ""
    if told:
        return told

    bucket = open_cache(context).outputs().get("BucketName", "")
    return f"s3://{bucket}/runs/{_key(found)}" if bucket and _key(found) else ""


# --- Finding checkpoints --------------------------------------------------------------------------


def _look(
    context: "Context", told: ResumeSource, numbers: Sequence[int | None]
) -> Mapping[int | None, SavedCheckpoints] | None:
    """The checkpoints of each child; None where this machine cannot look.

    In AWS one call for each 1,000 files.
    """
    if told.folder:
        return {each: _here(Path(checkpoint_folder(told.folder, each))) for each in numbers}
    if _has_workspace(context):
        return None
    stored = _STORE.fullmatch(told.store)
    if stored is None:
        return {}
    from batchml.aws.s3 import BucketStore

    top = f"{stored[2]}/{child_prefix(numbers[0] if len(numbers) == 1 else None)}"
    names = BucketStore(context.connect(), stored[1]).keys(top)
    return dict(_sorted(names, f"{stored[2]}/", numbers))


def saved_here(context: "Context", job_id: str) -> SavedCheckpoints:
    """The checkpoints of a run of this machine, or of a child."""
    whole, _, child = job_id.partition(":")
    return _here(
        Path(checkpoint_folder(str(context.home.runs / whole), int(child) if child else None))
    )


def _here(folder: Path) -> SavedCheckpoints:
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


def _sorted(
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
        whole = saved.whole()
        others = [name for name in saved.others if not _is_ours(name)]
        yield (
            number,
            SavedCheckpoints(whole[0].step) if whole else SavedCheckpoints(files=len(others)),
        )


def _is_ours(name: str) -> bool:
    return name.startswith((".batchml", ".saving-", ".removing-"))


def _has_workspace(context: "Context") -> bool:

    outputs = open_cache(context).outputs()
    return bool(make_platform(context.env, context.settings.environment, outputs).workspace)


# --- Messages -------------------------------------------------------------------------------------


def _seen(who: str, seen: Mapping[int | None, SavedCheckpoints], first: Sequence[int]) -> str:
    steps = sorted({each.step for each in seen.values() if each.step is not None})
    if steps:
        last = f" to {steps[-1]}" if len(steps) > 1 else ""
        words = f"It resumes from step{'s' if last else ''} {steps[0]}{last} of {who}."
    else:
        words = f"It resumes from what {who} has saved."
    without = [number for number, each in seen.items() if number is not None and not each]
    if without:
        named = [first[number] if number < len(first) else number for number in without]
        shown = ranges(named[:_SHOWN]) + (" ..." if len(without) > _SHOWN else "")
        words += f" {len(without)} of {len(seen)} children saved nothing and begin anew: {shown}."
    return words


def _unseen(who: str) -> str:
    return (
        f"It resumes from what {who} has saved in the workspace, which is not seen from here: "
        "without a checkpoint there it ends with 78 before its command."
    )


def _nothing(context: "Context", found: "FoundRun", who: str) -> NotFound:

    before = found.tags.get(RESUMES_TAG, "")
    hint = f"From the beginning: batchml rerun {typed(context, found.job_id)}{context.option}"
    if before:
        again = f"batchml rerun --resume {typed(context, before)}{context.option}"
        hint = f"It was to go on from another: {again}"
    return NotFound("Checkpoints of run", who, [], hint)
