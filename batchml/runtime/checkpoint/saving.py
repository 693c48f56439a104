"""The code that `save` (one process) and `save_shards` (all ranks) share."""

from __future__ import annotations

import os
import sys
from typing import Callable, Optional, Set

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
from batchml.runtime.protocol.log_marks import error_line
from batchml.runtime.protocol.variables import number_of

Writer = Callable[[str], object]

# Errors in a program's code, which every save would repeat. They are raised; disk errors are not.
_MISTAKES = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError,
    NotImplementedError, TypeError, ValueError,
)  # fmt: skip
damaged_paths: Set[str] = set()  # checkpoints whose files have changed, found by `newest`
active_saves: Set[str] = set()  # names of the temporary folders of this process's saves
_failing: Set[str] = set()  # folders for which the last save failed


def resolve_folder(folder: str) -> str:
    """The absolute path of a checkpoint folder: `folder`, or the run's if that is empty.

    Outside a run it is `checkpoints` in the working directory.
    """
    return os.path.abspath(folder or os.environ.get("BATCHML_CHECKPOINT_DIR") or "checkpoints")


def newest_step(folder: str) -> Optional[int]:
    """The step of the newest complete checkpoint; None without one.

    This takes microseconds, because it does not read the files.
    """
    try:
        found = list_checkpoints(folder)
    except OSError:
        return None
    steps = (e.step for e in found if os.path.exists(os.path.join(folder, e.name, MANIFEST)))
    return next(steps, None)


def run_save(folder: str, step: int, save: Callable[[], str]) -> bool:
    """Call `save`, which returns why it failed, or an empty text. Return whether it has saved.

    Of failures in a row the first is reported. Raises errors in the program's code.
    """
    try:
        why = save()
    except _MISTAKES:
        raise
    except Exception as error:
        if type(error).__name__ == "PicklingError":
            raise
        why = error_line(error)
    except BaseException as error:
        if type(error).__name__ != "CheckpointException":  # of torch.distributed.checkpoint
            raise
        why = error_line(error)
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
    """Make a checkpoint of the files in `temporary`.

    Return an empty text, or why this generation may not save.
    """
    files = describe_files(temporary)
    if not files:
        raise ValueError(f"the writer of step {step} wrote no file into the folder it was given")
    refusal = claim_folder(folder, term)
    if not refusal:
        world = number_of(os.environ.get("WORLD_SIZE"), 1)
        manifest = make_manifest(term, step, world, os.path.basename(temporary), files)
        remove_old(folder, keep, commit(folder, temporary, manifest))
    return refusal


def remove_old(folder: str, keep: int, new: str) -> None:
    """Remove old checkpoints after `new` was saved. Errors are ignored."""
    damaged = {os.path.basename(path) for path in damaged_paths if os.path.dirname(path) == folder}
    try:
        prune(folder, keep, new, damaged - {new})
    except OSError:
        pass  # the next save removes them


def remove_leftovers(folder: str, term: FenceTerm) -> None:
    """Remove the temporary folders of saves that were killed."""
    ours = f"{term.attempt}.{term.generation}"
    for name in os.listdir(folder):
        if name.startswith(SAVING):
            saver, pid = [*name.split("-"), "", "", ""][2:4]
            if name not in active_saves and (saver != ours or not os.path.exists(f"/proc/{pid}")):
                remove(folder, name)
        elif name.startswith(REMOVING):
            remove(folder, name)


def say(message: str) -> None:
    print(f"batchml: {message}", file=sys.stderr, flush=True)
