"""What the saves of one process (`save`) and of all ranks (`save_shards`) have in common."""

from __future__ import annotations

import os
import sys
from typing import Callable, List, Optional, Set

from batchml.runtime.checkpoint.layout import (
    MANIFEST,
    REMOVING,
    SAVING,
    FenceTerm,
    claim_folder,
    commit,
    describe_files,
    list_checkpoints,
    make_manifest,
    prune,
    remove,
)

Writer = Callable[[str], object]

# Mistakes of a program, which every save would repeat. They are raised; errors of a disk are not.
_MISTAKES = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError,
    NotImplementedError, TypeError, ValueError,
)  # fmt: skip
damaged_paths: Set[str] = set()  # checkpoints whose files have changed, found by `newest`
active_saves: Set[str] = set()  # names of the temporary folders of this process's saves
_failing: Set[str] = set()  # folders to which the last save failed


def resolve_folder(folder: str) -> str:
    """The given folder, the run's, or outside a run `checkpoints` in the working directory."""
    return os.path.abspath(folder or os.environ.get("BATCHML_CHECKPOINT_DIR") or "checkpoints")


def newest_step(folder: str) -> Optional[int]:
    """The step of the newest complete checkpoint. It takes microseconds: files are not read."""
    try:
        found = list_checkpoints(folder)
    except OSError:
        return None
    for each in found:
        if os.path.exists(os.path.join(folder, each.name, MANIFEST)):
            return each.step
    return None


def run_save(folder: str, step: int, save: Callable[[], str]) -> bool:
    """Call `save`, which returns why it failed, or "". Report a failure once. True if it is saved.

    Raises mistakes of the program.
    """
    try:
        why = save()
    except _MISTAKES:
        raise
    except Exception as error:
        if type(error).__name__ == "PicklingError":
            raise
        why = " ".join(str(error).split())[:300] or type(error).__name__
    except BaseException as error:
        if type(error).__name__ != "CheckpointException":  # of torch.distributed.checkpoint
            raise
        why = " ".join(str(error).split())[:300]
    if not why:
        if folder in _failing:
            _failing.discard(folder)
            say(f"saving works again: the checkpoint of step {step} was saved")
        return True
    if folder not in _failing:
        _failing.add(folder)
        old = newest_step(folder)
        left = f"the checkpoint of step {old} is kept" if old is not None else "there is none yet"
        if old == step:  # it was renamed, and the disk failed after that
            left = "it is there, but may not outlive a power cut"
        say(f"the checkpoint of step {step} was not saved: {why}. The training goes on; {left}.")
    return False


def finish_save(folder: str, temporary: str, step: int, keep: int, term: FenceTerm) -> str:
    """Make a checkpoint of the files in `temporary`, or return that a later generation saves."""
    files = describe_files(temporary)
    if not files:
        raise ValueError(f"the writer of step {step} wrote no file into the folder it was given")
    refusal = claim_folder(folder, term)
    if not refusal:
        manifest = make_manifest(term, step, _world(), os.path.basename(temporary), files)
        remove_old(folder, keep, commit(folder, temporary, manifest))
    return refusal


def remove_old(folder: str, keep: int, new: str) -> None:
    """Remove old checkpoints. An error does not matter: the new checkpoint is saved."""
    damaged = {os.path.basename(path) for path in damaged_paths if os.path.dirname(path) == folder}
    try:
        prune(folder, keep, new, damaged - {new})
    except OSError:
        pass  # the next save removes them


def remove_leftovers(folder: str, term: FenceTerm) -> None:
    """Remove the temporary folders of saves that were killed."""
    ours = f"{term.attempt}.{term.generation}"
    for name in _temporary_names(folder):
        if name.startswith(REMOVING):
            remove(folder, name)
            continue
        saver, pid = [*name.split("-"), "", "", ""][2:4]
        if name not in active_saves and (saver != ours or not os.path.exists(f"/proc/{pid}")):
            remove(folder, name)


def say(message: str) -> None:
    print(f"batchml: {message}", file=sys.stderr, flush=True)


def _temporary_names(folder: str) -> List[str]:
    return [name for name in os.listdir(folder) if name.startswith((SAVING, REMOVING))]


def _world() -> int:
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isdigit() else 1
