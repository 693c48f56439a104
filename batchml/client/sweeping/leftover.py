"""What a trial has left: outputs of its job, its checkpoint; and its code, so that it is a job."""

import filecmp
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from batchml.errors import BatchmlError, NotFound, UsageError
from batchml.ops.ignore import OWN_FILE
from batchml.runtime.protocol.sweep_store import checkpoint_prefix

if TYPE_CHECKING:
    from batchml.client.place import Place
    from batchml.client.sweeping.boards import Board
    from batchml.client.sweeping.freezing import Frozen
    from batchml.model.sweep import Trial
    from batchml.ops.search import Found

OUTPUTS, CHECKPOINT = "outputs", "checkpoint"  # folders in the one that is fetched to
JOB = "job.toml"
MADE = "# Found by the sweep "  # a line of the job.toml that is written there


class Fetched(Struct, frozen=True):
    """How many files; `missing`: why there are none of a kind, in words."""

    outputs: int
    checkpoint: int
    code: int = 0
    missing: tuple[str, ...] = ()


def fetch_trial(
    place: "Place", frozen: "Frozen", board: "Board", trial: "Trial", dest: Path
) -> Fetched:
    """Copy the code to DEST, outputs to DEST/outputs and the checkpoint to DEST/checkpoint.

    Raises UsageError, before anything is written, where DEST has other files of those names;
    OSError, and BatchmlError when the board cannot be had.
    """
    missing: list[str] = []
    found = _recall(place, trial, missing)
    code = _code(place, _address(frozen, board, trial, found), frozen.folder, dest, missing)
    folders = {name.partition("/")[0] for name in code}
    outputs = 0
    if found is not None:
        try:
            outputs = _outputs(place, found, dest / _free(OUTPUTS, folders, trial))
        except BatchmlError as error:
            missing.append(f"Its outputs cannot be had: {error}")
    checkpoint = _checkpoint(board, trial, dest / _free(CHECKPOINT, folders, trial))
    if not checkpoint and frozen.platform.workspace:
        missing.append("Its checkpoint lies in the environment's workspace, where its jobs see it.")
    return Fetched(outputs, checkpoint, len(code), tuple(missing))


def _recall(place: "Place", trial: "Trial", missing: list[str]) -> "Found | None":
    """The trial's run, where it is known still."""
    from batchml.client.finding import recall

    try:
        return recall(place, [trial.job_id])[0] if trial.job_id else None
    except BatchmlError as error:
        missing.append(f"Its outputs cannot be had: {error}")
        return None


def _address(frozen: "Frozen", board: "Board", trial: "Trial", found: "Found | None") -> str:
    """Where the code lies that the trial ran: other code may have been sent since, or before."""
    from batchml.client.sweeping.recoding import coded, with_code

    if not frozen.code:
        return ""
    if found is not None and found.run is not None:
        name = found.run.environment.get("BATCHML_CODE", "").rpartition("/")[2]
        if name:
            return f"{frozen.code.rpartition('/')[0]}/{name}"
    is_since = coded(frozen, board).at > (trial.started_at or 0.0)
    return frozen.code if is_since else with_code(frozen, board).code


def _code(place: "Place", address: str, origin: str, dest: Path, missing: list[str]) -> list[str]:
    """Copy the code that the trial ran, which was packed from `origin`; its files."""
    from batchml.client.reruns import unpacked

    try:
        with unpacked(place, address) as folder:
            names = sorted(_files(Path(folder))) if folder else []
            _refuse_others(Path(folder), names, dest)
            dest.mkdir(parents=True, exist_ok=True)
            for name in names:
                (dest / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(Path(folder) / name, dest / name)
            return names
    except NotFound:
        dest.mkdir(parents=True, exist_ok=True)
        missing.append(f"Its code is not kept any more. It was packed from {origin}.")
        return []


def _free(name: str, taken: set[str], trial: "Trial") -> str:
    """The name of a folder beside the code, which may have one of that name."""
    return f"{name}-of-trial-{trial.number}" if name in taken else name


def _files(folder: Path) -> Iterator[str]:
    """Files below it, but for a job.toml of its own: that of the trial takes its place."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != JOB:
            yield name


def _refuse_others(folder: Path, names: list[str], dest: Path) -> None:
    """Nothing of the user's is written over. What was fetched there before may stay."""
    others = [
        name
        for name in names
        if os.path.lexists(dest / name) and not _is_same(folder / name, dest / name)
    ]
    job = dest / JOB
    if os.path.lexists(job) and not (job.is_file() and MADE in job.read_text("utf-8", "replace")):
        others.insert(0, JOB)
    if others:
        listed = ", ".join(others[:5]) + (", ..." if len(others) > 5 else "")
        raise UsageError(f"--get {dest}: it has another {listed}. Name a folder that is new.")


def _is_same(one: Path, other: Path) -> bool:
    return other.is_file() and filecmp.cmp(one, other, shallow=False)


def _outputs(place: "Place", found: "Found", dest: Path) -> int:
    from batchml.client.fetching import outputs
    from batchml.ops.outputs import Copied

    done = Copied()
    try:
        for each in outputs(place, found, dest):
            done = each if isinstance(each, Copied) else done
    except NotFound:  # it left nothing at all
        return 0
    return done.files + done.unchanged


def _checkpoint(board: "Board", trial: "Trial", dest: Path) -> int:
    """Files on the board; a key is parts that are no `..`, so none lands outside of `dest`."""
    prefix, count = checkpoint_prefix(trial.number), 0
    for key in board.keys(prefix):
        path = dest / key.removeprefix(prefix)
        path.parent.mkdir(parents=True, exist_ok=True)
        count += board.get_file(key, str(path))
    if count:
        own = dest / OWN_FILE
        own.write_text(f"# A checkpoint: {OWN_FILE} keeps it out of the code of runs.\n*\n")
    return count
