"""The checkpoints of a trial, in a place that all batches of the trial share.

The trial's progress is stored beside them: a program that continues may print no step numbers.
"""

from __future__ import annotations

import json
import os
import shutil
from typing import Callable, List, NamedTuple, Optional

from batchml.runtime.protocol.sweep_store import checkpoint_prefix
from batchml.runtime.protocol.variables import RuntimeEnv
from batchml.runtime.storage.files import read_json
from batchml.runtime.storage.store import Store
from batchml.runtime.sweep.assignment import TrialAssignment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from batchml.runtime.checkpoint.remote import CheckpointSender

_PROGRESS_FILE = ".batchml-step"
_OTHER_PREFIXES = (
    ".batchml-",
    ".saving-",
    ".removing-",
)  # prefixes of names that are not checkpoints


class TrialProgress(NamedTuple):
    """The last step of a trial, and the difference between its steps and the numbers it prints."""

    step: int
    shift: Optional[int]  # None: it prints no step numbers


def shared_checkpoint_folder(env: RuntimeEnv, work: TrialAssignment) -> str:
    """The folder of the trial's checkpoints; "" where no folder is shared.

    It is emptied for a trial that begins anew.
    """
    if "://" not in env.sweep:
        path = os.path.join(env.sweep, *checkpoint_prefix(work.entry.trial).split("/")[:-1])
    elif env.workspace:
        parts = (".batchml", "sweeps", work.contract.key, str(work.entry.trial), "checkpoint")
        path = os.path.join(env.workspace, *parts)
    else:
        return ""
    if work.is_main and not work.entry.resumes and env.attempt == 1:
        shutil.rmtree(path, ignore_errors=True)
    try:
        os.makedirs(path, exist_ok=True)
    except OSError:
        return ""
    return path


def fetch_checkpoints(
    store: Store, work: TrialAssignment, attempt: int, folder: str, say: Callable[[str], None]
) -> CheckpointSender:
    """Fetch the checkpoints of earlier batches and attempts from the store. What stores new ones.

    Raises StoreError and OSError.
    """
    from batchml.runtime.checkpoint.remote import CheckpointSender, fetch_newest

    prefix = checkpoint_prefix(work.entry.trial)
    if not work.entry.resumes and attempt == 1:
        store.delete(*store.keys(prefix))  # it begins anew
    else:
        fetch_newest(store, prefix, folder, say)
    return CheckpointSender(folder, store, prefix)


def has_checkpoints(folder: str) -> bool:
    return bool(_names(folder))


def save_progress(folder: str, progress: TrialProgress) -> None:
    """Store the trial's progress beside its checkpoints, if there are any."""
    if has_checkpoints(folder):
        try:
            with open(os.path.join(folder, _PROGRESS_FILE), "w", encoding="ascii") as file:
                json.dump(progress, file)
        except OSError:
            pass  # a full disk, which the program itself will report


def load_progress(folder: str) -> Optional[TrialProgress]:
    """The progress of an earlier attempt or batch; None: unknown."""
    try:
        step, shift = read_json(os.path.join(folder, _PROGRESS_FILE))
        return TrialProgress(int(step), None if shift is None else int(shift))
    except (OSError, TypeError, ValueError):
        return None


def _names(folder: str) -> List[str]:
    try:
        return [name for name in os.listdir(folder) if not name.startswith(_OTHER_PREFIXES)]
    except OSError:
        return []
