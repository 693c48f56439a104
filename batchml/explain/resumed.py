"""Find a file that a run missed among the files of another run, from which it could go on.

`rerun --resume` copies what the other run has saved into the new run's checkpoint folder, and kept
files into its working folder, so that a path of the other run's folders may be wrong there. A rerun
without --resume starts with an empty checkpoint folder.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from msgspec import Struct

from batchml.context import Context
from batchml.model.run import RESUMES_TAG, Record, Run
from batchml.runs.find import display_id
from batchml.runs.rerun.resubmit import find_local_checkpoints
from batchml.runtime.checkpoint.resume import (
    VARIABLE,
    ResumeSource,
    checkpoint_folder,
    kept_folder,
)

_CHECKPOINTS = "{checkpoints}"


class SavedFile(Struct, frozen=True):
    """A file that the run missed, as another run has saved it.

    `path`: the path for a run that resumes `job_id`, such as `{checkpoints}/last.pt`. `params`:
    the parameters of that run; None if they are unknown. `has_resumed`: whether the run that missed
    the file resumes that run; else an earlier run with the same command did resume.
    """

    job_id: str  # as users type it
    name: str  # of the run
    path: str
    has_resumed: bool = True
    is_partial: bool = False  # whether only failed children of an array run again
    params: dict[str, Any] | None = None

    def parameters(self, run: Run, missed: str) -> list[str]:
        """The words `-p NAME=VALUE` with which a rerun finds the file; [] if no parameter of the
        run names the missed path.
        """
        own = [name for name, value in run.params.items() if _is_path(f"{value}", missed)]
        if not own:
            return []
        before = run.params if self.params is None else self.params
        changed = [name for name in run.params if before.get(name) != run.params[name]]
        values: Mapping[str, Any] = {**run.params, **dict.fromkeys(own, self.path)}
        names = dict.fromkeys((*(each for each in changed if each not in own), *own))
        return [word for name in names for word in ("-p", f"{name}={values[name]}")]


def find_saved(context: Context, record: Record | None, run: Run, missed: str) -> SavedFile | None:
    """The file of another run that has the name of a missed file; None if there is none.

    `record`: the run in the history. The folders of the run that it resumes are searched on
    `local` only: elsewhere they are not on this machine.
    """
    if VARIABLE in run.environment:
        return _find_in_source(context, run, missed)
    return _find_before(context, record, run, missed) if record is not None else None


def _find_in_source(context: Context, run: Run, missed: str) -> SavedFile | None:
    """The file in the folders of the run that this run resumes."""
    child = run.job_id.partition(":")[2]
    try:
        source = ResumeSource.read(run.environment[VARIABLE])
        number = source.child(int(child) if child else None)
    except ValueError:  # of another version of batchml
        return None
    if not source.folder:
        return None
    places = (
        *_paths(checkpoint_folder(source.folder, number), f"{_CHECKPOINTS}/", missed),
        *_paths(kept_folder(source.folder, number), "", missed),
    )
    path = next((each for each in places if each != missed), "")
    if not path:
        return None
    before = run.tags.get(RESUMES_TAG, source.job)
    known = context.history.records(context.env).get(before.partition(":")[0])
    return SavedFile(
        display_id(context, before), source.name, path,
        is_partial=bool(source.children) and ":" not in before,
        params=known.params if known is not None else None,
    )  # fmt: skip


def _paths(folder: str, prefix: str, missed: str) -> Iterator[str]:
    """The paths of files with the name of the missed file, the most similar path first."""
    name = PurePosixPath(missed).name
    files = (path for path in Path(folder).rglob("*") if path.name == name and path.is_file())
    found = [path.relative_to(folder).as_posix() for path in files]
    for path in sorted(found, key=lambda each: (not each.endswith(missed), len(each), each)):
        yield f"{prefix}{path}"


def _find_before(context: Context, record: Record, run: Run, missed: str) -> SavedFile | None:
    """The file of `{checkpoints}` that an earlier run with the same command had by --resume."""
    words = [f"{word}" for word in (*run.command, *run.params.values())]
    inner = [word.partition(_CHECKPOINTS)[2] for word in words if _is_path(word, missed)]
    rest = next(filter(None, inner), "")
    if not rest:
        return None
    for each in context.history.records(context.env):
        is_alike = (each.command, each.folder) == (record.command, record.folder)
        if each.at > record.at or not is_alike or RESUMES_TAG not in each.tags:
            continue
        for job_id in (each.job_id, each.tags[RESUMES_TAG]):
            is_seen = context.settings.is_local and not record.array_size
            if not is_seen or find_local_checkpoints(context, job_id):
                path = f"{_CHECKPOINTS}{rest}"
                return SavedFile(display_id(context, job_id), each.name, path, has_resumed=False)
    return None


def _is_path(word: str, missed: str) -> bool:
    """Whether a word of a command, or the value of a parameter, is the path of a missed file."""
    _, placed, rest = word.partition("}")
    return word.removeprefix("./") == missed or bool(placed and rest and missed.endswith(rest))
